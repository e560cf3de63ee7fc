// The kernels' plain C interface, which minimoe/native/__init__.py calls through ctypes, and the table that every
// instruction set fills in. Pointers and numbers only: no torch, no Python.
//
// Shape letters: T tokens, A inputs, B outputs, D hidden, E experts, I expert intermediate, K slots, P live pairs.
// Matrices are row-major. A weight [rows, columns] is read where it lies, with any alignment, and never written.
#pragma once

#include <cstdint>

namespace minimoe {

enum DType { FLOAT32 = 0, BFLOAT16 = 1 };

// y[T, B] = x[T, A] times the transpose of w[B, A]; the sum in float32, rounded once to the dtype of x.
struct Linear {
    int64_t T, A, B;
    const void *x, *w;
    void *y;
};

// y[t] = sum over the live slots j < k[t] of weights[t, j] * expert[experts[t, j]](x[t]), with
// expert(x) = down (silu(gate x) * (up x)). Rounded where minimoe/experts/bucketed.py rounds. A kernel returns the
// multiply-adds it has done with expert weights: 3 * D * I for each live pair, or one that is pruned was computed.
struct Experts {
    int64_t T, D, I, E, K;
    const void *x;
    const void *const *gate, *const *up, *const *down;  // E matrices [I, D], [I, D], [D, I]
    const int64_t *experts;                             // [T, K]; slots from k[t] on are not read
    const float *weights;                               // [T, K]
    const int64_t *k;                                   // [T]
    void *y;
};

struct Kernels {
    bool (*supported)();
    void (*linear)(const Linear &, DType, int threads);
    int64_t (*experts)(const Experts &, DType, int threads);
};

extern const Kernels scalar_kernels;
#if defined(__x86_64__)
extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;
#endif

}  // namespace minimoe
