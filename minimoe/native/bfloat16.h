// bfloat16: the upper half of a float32. Rounding is to nearest, ties to even, as torch rounds.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace minimoe {
namespace {

struct bfloat16 {
    uint16_t bits;
};

inline float widen(float value) { return value; }

inline float widen(bfloat16 value) {
    const uint32_t bits = uint32_t(value.bits) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

template <class W>
inline W narrow(float value);

template <>
inline float narrow<float>(float value) {
    return value;
}

template <>
inline bfloat16 narrow<bfloat16>(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    // Without a branch, so that a loop of it becomes vector code.
    return {uint16_t(std::isnan(value) ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

// The value that a tensor of dtype W would hold.
template <class W>
inline float rounded(float value) {
    return widen(narrow<W>(value));
}

// silu(gate) * up, rounded after each of its two steps.
template <class W>
inline float gated(float gate, float up) {
    gate = rounded<W>(gate);
    return rounded<W>(rounded<W>(gate / (1.0f + std::exp(-gate))) * rounded<W>(up));
}

// y[i] = x[i] + y[i] for i < n.
template <class W>
inline void add(const W *x, int64_t n, W *y) {
    for (int64_t i = 0; i < n; i++) y[i] = narrow<W>(widen(x[i]) + widen(y[i]));
}

}  // namespace
}  // namespace minimoe
