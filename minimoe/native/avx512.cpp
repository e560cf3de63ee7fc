// 16 floats at a time, in 32 registers.
#if defined(__x86_64__)
#include <immintrin.h>

#include "standard.h"
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f"))), apply_to = function)
#else
#pragma GCC target("avx512f")
#endif
#define KERNELS avx512_kernels
#define WIDTH 16
#define ROWS 6
#define SINGLE 4
#define SUPPORTED (__builtin_cpu_supports("avx512f"))
#define FUSED(a, b, sum) ((Floats)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(sum)))
#include "vector.inl"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
