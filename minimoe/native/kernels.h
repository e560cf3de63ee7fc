// The kernels' plain C interface, which minimoe/native/__init__.py calls through ctypes, and the table that every
// instruction set fills in. Pointers and numbers only: no torch, no Python.
//
// Shape letters: T tokens, A inputs, B outputs, D hidden, E experts, I expert intermediate, K slots, P live pairs;
// H heads, G kv heads, d head size.
// Matrices are row-major. A weight [rows, columns] is read where it lies, with any alignment, and never written.
#pragma once

#include <cstdint>

// Older compilers do not know the instructions for bfloat16; what they build has the other sets.
#if defined(__x86_64__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#define MINIMOE_BF16
#endif

namespace minimoe {

enum DType { FLOAT32 = 0, BFLOAT16 = 1 };

// y[T, B] = x[T, A] times the transpose of w[B, A] for each of n weights; the sum in float32, rounded once to the
// dtype of x.
struct Linear {
    int64_t T, A, n;
    const int64_t *B;
    const void *x;
    const void *const *w;
    void *const *y;
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

// y[t] = x[t] / sqrt(mean(x[t]^2) + eps), rounded, times w.
struct Norm {
    int64_t T, D;
    float eps;
    const void *x, *w;
    void *y;
};

// y[t, h] = head h of the norm of x[t] over all its heads, clipped and turned by the angles of token t: queries or keys
// on their way from projections to attention. Rounded where the same steps in torch round (minimoe/operations.py).
struct Turn {
    int64_t T, H, d;
    float eps, clip;          // clip: infinity for none
    const void *x, *w;        // [T, H * d], [H * d]
    const void *cos, *sin;    // [T, d]
    void *y;                  // [T, H, d]
};

// One new token of each of T sequences, from its projections to its mix of values: norms over the whole projections,
// clipping, rotary positions, one more key and value in the sequence's cache, attention to all of them. Rounded where
// the same steps in torch round (minimoe/operations.py).
struct Attention {
    int64_t T, H, G, d, layer;
    float eps, clip;  // clip: infinity for none
    const void *q, *k, *v;             // [T, H * d], [T, G * d], [T, G * d]
    const void *q_norm, *k_norm;       // [H * d], [G * d]
    const void *cos, *sin;             // [T, d]
    void *const *keys, *const *values; // of each sequence [layers, G, capacity, d]
    const int64_t *lengths, *capacities;  // of each sequence: positions that are filled, and that there is room for
    void *y;                           // [T, H * d]
};

// Causal attention of the last N positions of one sequence to all its S: y[n, h] = the mix of values that query n of head
// h sees, of positions 0 to S - N + n. Keys and values of kv head g start g * head numbers on, those of a position
// s * position on.
struct Attend {
    int64_t N, S, H, G, d, position, head;
    const void *q;       // [N, H, d]
    const void *k, *v;
    void *y;             // [N, H, d]
};

// Softmax of each row of logits, in descending order, and which expert each probability belongs to; ties go to the
// lowest id.
struct Rank {
    int64_t T, E;
    const void *logits;  // [T, E]
    float *sorted;       // [T, E]
    int64_t *experts;    // [T, E]
};

struct Kernels {
    bool (*supported)();
    void (*linear)(const Linear &, DType, int threads);
    int64_t (*experts)(const Experts &, DType, int threads);
    void (*norm)(const Norm &, DType, int threads);
    void (*turn)(const Turn &, DType, int threads);
    void (*attention)(const Attention &, DType, int threads);
    void (*attend)(const Attend &, DType, int threads);
    void (*rank)(const Rank &, DType, int threads);
};

extern const Kernels scalar_kernels;
#if defined(__x86_64__)
extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;
#endif
#if defined(MINIMOE_BF16)
extern const Kernels avx512bf16_kernels;
extern const Kernels amx_kernels;
#endif

}  // namespace minimoe
