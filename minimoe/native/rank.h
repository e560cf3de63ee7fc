// Ranking the experts of one token: too little work to be worth vectors.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels.h"

namespace minimoe {
namespace {

inline void rank_token(const Rank &r, int64_t t) {
    const float *probs = r.probs + t * r.E;
    int64_t *experts = r.experts + t * r.E;
    std::iota(experts, experts + r.E, int64_t(0));
    // A NaN comes last: it must not break the order that the sort relies on.
    const auto key = [probs](int64_t e) { return std::isnan(probs[e]) ? -INFINITY : probs[e]; };
    std::sort(experts, experts + r.E, [key](int64_t a, int64_t b) { return key(a) != key(b) ? key(a) > key(b) : a < b; });
    for (int64_t i = 0; i < r.E; i++) r.sorted[t * r.E + i] = probs[experts[i]];
}

}  // namespace
}  // namespace minimoe
