// As avx512, but pairs of bfloat16 are multiplied and added without being widened first.
#include "kernels.h"
#if defined(MINIMOE_BF16)
#include <immintrin.h>

#include "standard.h"
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bf16"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bf16")
#endif
#define KERNELS avx512bf16_kernels
#define WIDTH 16
#define ROWS 6
#define SINGLE 1
#define SUPPORTED (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bf16"))
#define FUSED(a, b, sum) ((Floats)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(sum)))
#define PAIRS(sums, a, b) ((Floats)_mm512_dpbf16_ps((__m512)(sums), (__m512bh)(a), (__m512bh)(b)))
#include "vector.inl"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
