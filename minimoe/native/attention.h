// The steps of attention that are too small to be worth vectors of their own, for one token.
#pragma once

#include <algorithm>

#include "bfloat16.h"
#include "kernels.h"

namespace minimoe {
namespace {

// y = x * scale, rounded, times w.
template <class W>
inline void scaled(const W *__restrict x, float scale, const W *__restrict w, int64_t n, W *__restrict y) {
    for (int64_t i = 0; i < n; i++) y[i] = narrow<W>(rounded<W>(widen(x[i]) * scale) * widen(w[i]));
}

template <class W>
inline void clipped(W *x, float limit, int64_t n) {
    if (!std::isinf(limit))
        for (int64_t i = 0; i < n; i++) x[i] = narrow<W>(std::clamp(widen(x[i]), -limit, limit));
}

// Rotary positions of one head: place i turns with place i + d / 2. y may not be x.
template <class W>
inline void rotated(const W *__restrict x, const W *__restrict cos, const W *__restrict sin, int64_t d,
                    W *__restrict y) {
    const int64_t half = d / 2;
    for (int64_t i = 0; i < half; i++) {
        const float low = widen(x[i]), high = widen(x[i + half]);
        y[i] = narrow<W>(rounded<W>(low * widen(cos[i])) + rounded<W>(-high * widen(sin[i])));
        y[i + half] = narrow<W>(rounded<W>(high * widen(cos[i + half])) + rounded<W>(low * widen(sin[i + half])));
    }
}

// Where sequence t keeps the keys or values of kv head g: [capacity, d].
template <class W>
inline W *cached(const Attention &a, void *const *caches, int64_t t, int64_t g) {
    return static_cast<W *>(caches[t]) + (a.layer * a.G + g) * a.capacities[t] * a.d;
}

// The heads of one token's queries or keys, normed by `scale` and w, clipped and turned; head h goes to place(h). `room`
// holds all H * d.
template <class W, class Place>
inline void turned(const W *x, float scale, const W *w, float clip, const W *cos, const W *sin, int64_t H, int64_t d,
                   W *room, Place place) {
    scaled(x, scale, w, H * d, room);
    clipped(room, clip, H * d);
    for (int64_t h = 0; h < H; h++) rotated(room + h * d, cos, sin, d, place(h));
}

// Norm, clip and turn the projections of token t; store its key and value. `query` holds H * d numbers, `room` as many.
template <class W>
void prepare(const Attention &a, int64_t t, float q_scale, float k_scale, W *room, W *query) {
    const W *q = static_cast<const W *>(a.q) + t * a.H * a.d, *k = static_cast<const W *>(a.k) + t * a.G * a.d;
    const W *v = static_cast<const W *>(a.v) + t * a.G * a.d;
    const W *cos = static_cast<const W *>(a.cos) + t * a.d, *sin = static_cast<const W *>(a.sin) + t * a.d;
    turned(q, q_scale, static_cast<const W *>(a.q_norm), a.clip, cos, sin, a.H, a.d, room,
           [&](int64_t h) { return query + h * a.d; });
    turned(k, k_scale, static_cast<const W *>(a.k_norm), a.clip, cos, sin, a.G, a.d, room,
           [&](int64_t g) { return cached<W>(a, a.keys, t, g) + a.lengths[t] * a.d; });
    for (int64_t g = 0; g < a.G; g++) {
        W *value = cached<W>(a, a.values, t, g) + a.lengths[t] * a.d;
        std::copy_n(v + g * a.d, a.d, value);
        clipped(value, a.clip, a.d);
    }
}

// Scores to weights that sum to 1.
inline void softmax(float *scores, int64_t n) {
    const float most = *std::max_element(scores, scores + n);
    float total = 0;
    for (int64_t s = 0; s < n; s++) total += scores[s] = std::exp(scores[s] - most);
    for (int64_t s = 0; s < n; s++) scores[s] /= total;
}

}  // namespace
}  // namespace minimoe
