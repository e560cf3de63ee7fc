// A whole decode step: one new token of each of T sequences, from ids to logits. It makes the calls that Python would
// make layer by layer, and gives the same bits; Python itself costs some 6 % of a step between them (bench/README.md).
// Rules that keep a prefix of the ranking are followed here; for every other one a step comes back in each layer, to be
// told what was decided.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "bfloat16.h"
#include "interface.h"
#include "kernels.h"

using namespace minimoe;

namespace {

// What may be wrong, apart from router logits.
enum Refusal : int64_t { NO_ROOM = -1, NO_SUCH_ID = -2, BROKEN_ROUTING = -3 };

// Seconds since it was made or last read.
class Clock {
   public:
    double operator()() {
        const auto before = std::exchange(last_, std::chrono::steady_clock::now());
        return std::chrono::duration<double>(last_ - before).count();
    }

   private:
    std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

template <class W>
int64_t decode(int set, int threads, const ModelPlaces &of, const StepPlaces &at, const PrefixRule *rules,
               const int64_t *ids, const StepResults &into, int64_t layer, const Decision *decided) {
    const int64_t T = at.T, D = of.D, E = of.E;
    W *const x = static_cast<W *>(into.hidden), *const mixed = x + T * D, *const normed = mixed + T * D;
    double *const ends = into.seconds + 4 * of.layers;
    Clock clock;
    if (!decided) {
        for (int64_t t = 0; t < T; t++)
            std::memcpy(x + t * D, static_cast<const W *>(of.embed) + ids[t] * D, D * sizeof(W));
        ends[0] = clock();
    }
    for (; layer < of.layers; layer++) {
        double *const seconds = into.seconds + 4 * layer;
        Decision followed;
        if (!decided) {
            W *const logits = static_cast<W *>(into.router_logits) + layer * T * E;
            if (const int refused = minimoe_attention(set, threads, of.attention[layer], &at, x, mixed)) return refused;
            seconds[0] = clock();
            if (const int refused = minimoe_gate(set, threads, of.gates[layer], T, mixed, normed, logits)) return refused;
            if (!minimoe_finite(of.dtype, T * E, logits)) return layer + 1;
            seconds[1] = clock();
            if (!rules) return 0;
            const int64_t K = rules->limit;
            int64_t *const experts = into.experts + layer * T * K, *const k = into.k + layer * T;
            float *const weights = into.weights + layer * T * K;
            if (const int refused =
                    minimoe_prefix(set, of.dtype, threads, T, E, &rules[layer], logits, experts, weights, k))
                return refused;
            followed = {K, experts, weights, k};
            decided = &followed;
            seconds[2] = clock();
        }
        const int64_t done = minimoe_experts(set, threads, of.experts[layer], T, decided->K, normed, decided->experts,
                                             decided->weights, decided->k, x);
        if (done < 0) return done == NO_MEMORY ? NO_MEMORY : BROKEN_ROUTING;
        add(mixed, T * D, x);
        seconds[3] = clock();
        decided = nullptr;
    }
    if (const int refused = minimoe_norm(set, of.dtype, threads, T, D, of.eps, x, of.norm, normed)) return refused;
    ends[1] = clock();
    const int refused = minimoe_linear(set, of.dtype, threads, T, D, 1, &of.V, normed, &of.head, &into.logits);
    ends[2] = clock();
    return refused;
}

}  // namespace

extern "C" {

// From the beginning (layer 0, nothing decided) under a rule for each layer, all of one limit, to the end. Where there
// are no rules: up to the router logits of the first layer, and, from a layer about which somebody has decided, up to
// those of the next one or the end. Returns 0; or the number, counted from 1, of a layer whose router logits are not
// finite; or a refusal: -1 where a cache has no room for one more position and -2 where an id is out of range, then
// nothing was written; -3 where a k or an expert's id is out of range, -9 where memory ran out. The caches are written
// to, but not longer.
int64_t minimoe_decode(int set, int threads, const ModelPlaces *of, const StepPlaces *at, const PrefixRule *rules,
                       const int64_t *ids, const StepResults *into, int64_t layer, const Decision *decided) {
    for (int64_t t = 0; t < at->T; t++) {
        if (at->lengths[t] < 0 || at->lengths[t] >= at->rooms[t]) return NO_ROOM;
        if (ids[t] < 0 || ids[t] >= of->V) return NO_SUCH_ID;
    }
    return of->dtype == FLOAT32 ? decode<float>(set, threads, *of, *at, rules, ids, *into, layer, decided)
                                : decode<bfloat16>(set, threads, *of, *at, rules, ids, *into, layer, decided);
}
}
