// What ctypes sees: the instruction sets by name, and each kernel with the set to use.
#include <algorithm>
#include <cmath>
#include <vector>

#include "bfloat16.h"
#include "interface.h"
#include "kernels.h"

namespace {

using namespace minimoe;

struct Named {
    const char *name;
    const Kernels *kernels;
};

// The best first.
const Named SETS[] = {
#if defined(MINIMOE_BF16)
    {"amx", &amx_kernels},
    {"avx512bf16", &avx512bf16_kernels},
#endif
#if defined(__x86_64__)
    {"avx512", &avx512_kernels},
    {"avx2", &avx2_kernels},
#endif
    {"scalar", &scalar_kernels},
};

const int COUNT = sizeof SETS / sizeof SETS[0];

template <class W>
bool finite(const W *x, int64_t n) {
    return std::all_of(x, x + n, [](W value) { return std::isfinite(widen(value)); });
}

}  // namespace

extern "C" {

int minimoe_sets() { return COUNT; }

const char *minimoe_set_name(int set) { return SETS[set].name; }

int minimoe_set_supported(int set) { return SETS[set].kernels->supported(); }

int minimoe_linear(int set, int dtype, int threads, int64_t T, int64_t A, int64_t n, const int64_t *B, const void *x,
                    const void *const *w, void *const *y) {
    return guarded([&] {
        SETS[set].kernels->linear({T, A, n, B, x, w, y}, DType(dtype), threads);
        return 0;
    });
}

int minimoe_rank(int set, int dtype, int threads, int64_t T, int64_t E, const void *logits, float *sorted,
                  int64_t *experts) {
    return guarded([&] {
        SETS[set].kernels->rank({T, E, logits, sorted, experts}, DType(dtype), threads);
        return 0;
    });
}

// Returns the multiply-adds done with expert weights, or -1 where k or an expert's id is out of range: nothing was read.
int64_t minimoe_experts(int set, int threads, const ExpertPlaces *of, int64_t T, int64_t K, const void *x,
                        const int64_t *experts, const float *weights, const int64_t *k, void *y) {
    for (int64_t t = 0; t < T; t++) {
        if (k[t] < 0 || k[t] > K) return -1;
        for (int64_t j = 0; j < k[t]; j++)
            if (experts[t * K + j] < 0 || experts[t * K + j] >= of->E) return -1;
    }
    return guarded([&] {
        return SETS[set].kernels->experts(
            {T, of->D, of->I, of->E, K, x, of->gate, of->up, of->down, experts, weights, k, y}, DType(of->dtype),
            threads);
    });
}

int minimoe_norm(int set, int dtype, int threads, int64_t T, int64_t D, float eps, const void *x, const void *w,
                  void *y) {
    return guarded([&] {
        SETS[set].kernels->norm({T, D, eps, x, w, y}, DType(dtype), threads);
        return 0;
    });
}

int minimoe_turn(int set, int dtype, int threads, int64_t T, int64_t H, int64_t d, float eps, float clip, const void *x,
                  const void *w, const void *cos, const void *sin, void *y) {
    return guarded([&] {
        SETS[set].kernels->turn({T, H, d, eps, clip, x, w, cos, sin, y}, DType(dtype), threads);
        return 0;
    });
}

int minimoe_attend(int set, int dtype, int threads, int64_t N, int64_t S, int64_t H, int64_t G, int64_t d,
                    int64_t position, int64_t head, const void *q, const void *k, const void *v, void *y) {
    return guarded([&] {
        SETS[set].kernels->attend({N, S, H, G, d, position, head, q, k, v, y}, DType(dtype), threads);
        return 0;
    });
}

int minimoe_finite(int dtype, int64_t n, const void *x) {
    return dtype == FLOAT32 ? finite(static_cast<const float *>(x), n) : finite(static_cast<const bfloat16 *>(x), n);
}

int minimoe_gate(int set, int threads, const GatePlaces *of, int64_t T, const void *x, void *normed, void *logits) {
    return guarded([&] {
        const Kernels &run = *SETS[set].kernels;
        run.norm({T, of->D, of->eps, x, of->norm, normed}, DType(of->dtype), threads);
        run.linear({T, of->D, 1, &of->E, normed, &of->gate, &logits}, DType(of->dtype), threads);
        return 0;
    });
}

// One new token of each of T sequences: y = x plus what attention adds to it. Returns -1 where a cache has no room for
// one more position: nothing was read or written.
int minimoe_attention(int set, int threads, const AttentionPlaces *of, const StepPlaces *at, const void *x, void *y) {
    const int64_t T = at->T, D = of->D, H = of->H, G = of->G, d = of->d;
    for (int64_t t = 0; t < T; t++)
        if (at->lengths[t] < 0 || at->lengths[t] >= at->rooms[t]) return -1;
    return guarded([&] {
        const Kernels &run = *SETS[set].kernels;
        const DType dtype = DType(of->dtype);
        const int64_t rows[] = {H * d, G * d, G * d}, size = dtype == FLOAT32 ? 4 : 2;
        std::vector<char> normed(T * D * size), q(T * rows[0] * size), k(T * rows[1] * size), v(T * rows[2] * size);
        std::vector<char> mixed(q.size());
        run.norm({T, D, of->eps, x, of->weights[0], normed.data()}, dtype, threads);
        void *const projections[] = {q.data(), k.data(), v.data()};
        run.linear({T, D, 3, rows, normed.data(), of->weights + 1, projections}, dtype, threads);
        run.attention({T, H, G, d, of->layer, of->eps, of->clip, q.data(), k.data(), v.data(), of->weights[4],
                       of->weights[5], at->cos, at->sin, at->keys, at->values, at->lengths, at->rooms, mixed.data()},
                      dtype, threads);
        run.linear({T, H * d, 1, &D, mixed.data(), of->weights + 6, &y}, dtype, threads);
        dtype == FLOAT32 ? add(static_cast<const float *>(x), T * D, static_cast<float *>(y))
                         : add(static_cast<const bfloat16 *>(x), T * D, static_cast<bfloat16 *>(y));
        return 0;
    });
}
}
