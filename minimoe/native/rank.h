// Softmax and ranking of one token's experts: too little work to be worth vectors.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "bfloat16.h"
#include "kernels.h"

namespace minimoe {
namespace {

template <class W>
void rank_token(const Rank &r, int64_t t) {
    const W *logits = static_cast<const W *>(r.logits) + t * r.E;
    int64_t *experts = r.experts + t * r.E;
    std::vector<float> probs(r.E);
    float most = -INFINITY, total = 0;
    for (int64_t e = 0; e < r.E; e++) most = std::max(most, widen(logits[e]));
    for (int64_t e = 0; e < r.E; e++) total += probs[e] = std::exp(widen(logits[e]) - most);
    for (int64_t e = 0; e < r.E; e++) probs[e] /= total;
    std::iota(experts, experts + r.E, int64_t(0));
    // A NaN, if there is one, has made all of them NaN: it must not break the order that the sort relies on.
    if (!std::isnan(total))
        std::sort(experts, experts + r.E,
                  [&](int64_t a, int64_t b) { return probs[a] != probs[b] ? probs[a] > probs[b] : a < b; });
    for (int64_t i = 0; i < r.E; i++) r.sorted[t * r.E + i] = probs[experts[i]];
}

}  // namespace
}  // namespace minimoe
