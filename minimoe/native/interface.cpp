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

void minimoe_linear(int set, int dtype, int threads, int64_t T, int64_t A, int64_t B, const void *x, const void *w,
                    void *y) {
    SETS[set].kernels->linear({T, A, B, x, w, y}, DType(dtype), threads);
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
}
