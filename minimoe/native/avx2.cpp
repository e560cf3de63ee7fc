// 8 floats at a time, in 16 registers.
#if defined(__x86_64__)
#include <immintrin.h>

#include "standard.h"
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif
#define KERNELS avx2_kernels
#define WIDTH 8
#define ROWS 3
#define SINGLE 4
#define SUPPORTED (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
#define FUSED(a, b, sum) ((Floats)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(sum)))
#include "vector.inl"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
