// What ctypes sees: the instruction sets by name, and each kernel with the set to use.
#include <cstring>

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

}  // namespace

extern "C" {

int minimoe_sets() { return COUNT; }

const char *minimoe_set_name(int set) { return SETS[set].name; }

int minimoe_set_supported(int set) { return SETS[set].kernels->supported(); }

void minimoe_linear(int set, int dtype, int threads, int64_t T, int64_t A, int64_t n, const int64_t *B, const void *x,
                    const void *const *w, void *const *y) {
    SETS[set].kernels->linear({T, A, n, B, x, w, y}, DType(dtype), threads);
}

void minimoe_rank(int set, int threads, int64_t T, int64_t E, const float *probs, float *sorted, int64_t *experts) {
    SETS[set].kernels->rank({T, E, probs, sorted, experts}, threads);
}

// Returns the multiply-adds done with expert weights, or -1 where k or an expert's id is out of range: nothing was read.
int64_t minimoe_experts(int set, int dtype, int threads, int64_t T, int64_t D, int64_t I, int64_t E, int64_t K,
                        const void *x, const void *const *gate, const void *const *up, const void *const *down,
                        const int64_t *experts, const float *weights, const int64_t *k, void *y) {
    for (int64_t t = 0; t < T; t++) {
        if (k[t] < 0 || k[t] > K) return -1;
        for (int64_t j = 0; j < k[t]; j++)
            if (experts[t * K + j] < 0 || experts[t * K + j] >= E) return -1;
    }
    return SETS[set].kernels->experts({T, D, I, E, K, x, gate, up, down, experts, weights, k, y}, DType(dtype), threads);
}

void minimoe_norm(int set, int dtype, int threads, int64_t T, int64_t D, float eps, const void *x, const void *w,
                  void *y) {
    SETS[set].kernels->norm({T, D, eps, x, w, y}, DType(dtype), threads);
}

// Returns -1 where a cache has no room for one more position: nothing was read or written.
int minimoe_attention(int set, int dtype, int threads, int64_t T, int64_t H, int64_t G, int64_t d, int64_t layer,
                      float eps, float clip, const void *q, const void *k, const void *v, const void *q_norm,
                      const void *k_norm, const void *cos, const void *sin, void *const *keys, void *const *values,
                      const int64_t *lengths, const int64_t *capacities, void *y) {
    for (int64_t t = 0; t < T; t++)
        if (lengths[t] < 0 || lengths[t] >= capacities[t]) return -1;
    SETS[set].kernels->attention({T, H, G, d, layer, eps, clip, q, k, v, q_norm, k_norm, cos, sin, keys, values,
                                  lengths, capacities, y},
                                 DType(dtype), threads);
    return 0;
}
}
