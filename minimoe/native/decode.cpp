// A whole decode step: one new token of each of T sequences, from ids to logits, under a rule that ranks and counts. It
// makes the calls that Python would make layer by layer, and gives the same bits; Python itself costs some 6 % of a step
// between them (bench/README.md).
#include <algorithm>
#include <cstring>
#include <vector>

#include "bfloat16.h"
#include "interface.h"
#include "kernels.h"

using namespace minimoe;

namespace {

template <class W>
int64_t decode(int set, int threads, const ModelPlaces &of, const StepPlaces &at, const PrefixRule &rule,
               const int64_t *ids, const StepResults &into) {
    const int64_t T = at.T, D = of.D, E = of.E, K = rule.K;
    std::vector<W> x(T * D), mixed(T * D), normed(T * D);
    for (int64_t t = 0; t < T; t++)
        std::memcpy(&x[t * D], static_cast<const W *>(of.embed) + ids[t] * D, D * sizeof(W));
    for (int64_t layer = 0; layer < of.layers; layer++) {
        W *const logits = static_cast<W *>(into.router_logits) + layer * T * E;
        int64_t *const experts = into.experts + layer * T * K, *const k = into.k + layer * T;
        float *const weights = into.weights + layer * T * K;
        minimoe_attention(set, threads, of.attention[layer], &at, x.data(), mixed.data());
        minimoe_gate(set, threads, of.gates[layer], T, mixed.data(), normed.data(), logits);
        if (!minimoe_finite(of.dtype, T * E, logits)) return layer + 1;
        minimoe_prefix(set, of.dtype, threads, T, E, K, rule.floor, rule.elbow, logits, experts, weights, k);
        minimoe_experts(set, threads, of.experts[layer], T, K, normed.data(), experts, weights, k, x.data());
        add(mixed.data(), T * D, x.data());
    }
    minimoe_norm(set, of.dtype, threads, T, D, of.eps, x.data(), of.norm, normed.data());
    minimoe_linear(set, of.dtype, threads, T, D, 1, &of.V, normed.data(), &of.head, &into.logits);
    return 0;
}

}  // namespace

extern "C" {

// Returns 0; or, when the router logits of a layer are not finite, its number, counted from 1: the caches are written
// to, but not longer. Or -1 where a cache has no room for one more position, -2 where an id is out of range: then
// nothing was written.
int64_t minimoe_decode(int set, int threads, const ModelPlaces *of, const StepPlaces *at, const PrefixRule *rule,
                       const int64_t *ids, const StepResults *into) {
    for (int64_t t = 0; t < at->T; t++) {
        if (at->lengths[t] < 0 || at->lengths[t] >= at->rooms[t]) return -1;
        if (ids[t] < 0 || ids[t] >= of->V) return -2;
    }
    return of->dtype == FLOAT32 ? decode<float>(set, threads, *of, *at, *rule, ids, *into)
                                : decode<bfloat16>(set, threads, *of, *at, *rule, ids, *into);
}
}
