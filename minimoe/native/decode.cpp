// A whole decode step: one new token of each of T sequences, from ids to logits. It makes the calls that Python would
// make layer by layer, and gives the same bits; Python itself costs some 6 % of a step between them (bench/README.md).
// Rules that keep a prefix of the ranking are followed here; every other one is asked in each layer.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>
#include <vector>

#include "bfloat16.h"
#include "interface.h"
#include "kernels.h"

using namespace minimoe;

namespace {

// What may be wrong, apart from router logits.
enum Refusal : int64_t { NO_ROOM = -1, NO_SUCH_ID = -2, ASKED_IN_VAIN = -3, BROKEN_ROUTING = -4 };

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
int64_t decode(int set, int threads, const ModelPlaces &of, const StepPlaces &at, const PrefixRule *rules, Ask ask,
               const int64_t *ids, const StepResults &into) {
    const int64_t T = at.T, D = of.D, E = of.E;
    std::vector<W> x(T * D), mixed(T * D), normed(T * D);
    double *const ends = into.seconds + 4 * of.layers;
    Clock clock;
    for (int64_t t = 0; t < T; t++)
        std::memcpy(&x[t * D], static_cast<const W *>(of.embed) + ids[t] * D, D * sizeof(W));
    ends[0] = clock();
    for (int64_t layer = 0; layer < of.layers; layer++) {
        W *const logits = static_cast<W *>(into.router_logits) + layer * T * E;
        double *const seconds = into.seconds + 4 * layer;
        minimoe_attention(set, threads, of.attention[layer], &at, x.data(), mixed.data());
        seconds[0] = clock();
        minimoe_gate(set, threads, of.gates[layer], T, mixed.data(), normed.data(), logits);
        if (!minimoe_finite(of.dtype, T * E, logits)) return layer + 1;
        seconds[1] = clock();
        Decision decided;
        if (rules) {
            const int64_t K = rules->limit;
            int64_t *const experts = into.experts + layer * T * K, *const k = into.k + layer * T;
            float *const weights = into.weights + layer * T * K;
            minimoe_prefix(set, of.dtype, threads, T, E, &rules[layer], logits, experts, weights, k);
            decided = {K, experts, weights, k};
        } else if (ask(layer, &decided)) {
            return ASKED_IN_VAIN;
        }
        seconds[2] = clock();
        if (minimoe_experts(set, threads, of.experts[layer], T, decided.K, normed.data(), decided.experts,
                            decided.weights, decided.k, x.data()) < 0)
            return BROKEN_ROUTING;
        add(mixed.data(), T * D, x.data());
        seconds[3] = clock();
    }
    minimoe_norm(set, of.dtype, threads, T, D, of.eps, x.data(), of.norm, normed.data());
    ends[1] = clock();
    minimoe_linear(set, of.dtype, threads, T, D, 1, &of.V, normed.data(), &of.head, &into.logits);
    ends[2] = clock();
    return 0;
}

}  // namespace

extern "C" {

// Under a rule for each layer, all of one limit, or, where these are null, one that is asked. Returns 0; or the number,
// counted from 1, of a layer whose router logits are not finite; or a refusal: -1 where a cache has no room for one more
// position and -2 where an id is out of range, then nothing was written; -3 where the rule that was asked failed, and -4
// where it gave a k or an id that is out of range. The caches are written to, but not longer.
int64_t minimoe_decode(int set, int threads, const ModelPlaces *of, const StepPlaces *at, const PrefixRule *rules,
                       Ask ask, const int64_t *ids, const StepResults *into) {
    for (int64_t t = 0; t < at->T; t++) {
        if (at->lengths[t] < 0 || at->lengths[t] >= at->rooms[t]) return NO_ROOM;
        if (ids[t] < 0 || ids[t] >= of->V) return NO_SUCH_ID;
    }
    return of->dtype == FLOAT32 ? decode<float>(set, threads, *of, *at, rules, ask, ids, *into)
                                : decode<bfloat16>(set, threads, *of, *at, rules, ask, ids, *into);
}
}
