// Products of bfloat16 by matrix tiles, for one token as for many; everything else as avx512 does it.
#include "kernels.h"
#if defined(MINIMOE_BF16)
#include <cpuid.h>
#include <immintrin.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "standard.h"
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bf16,amx-tile,amx-bf16"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bf16,amx-tile,amx-bf16")
#endif
#define WIDTH 16
#define FUSED(a, b, sum) ((Floats)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(sum)))
#define PAIRS(sums, a, b) ((Floats)_mm512_dpbf16_ps((__m512)(sums), (__m512bh)(a), (__m512bh)(b)))
#include "bfloat16.h"
#include "lanes.inl"
#include "mixture.inl"
#include "work.h"

namespace minimoe {
namespace {

#include "prompt.inl"
#include "tiles.inl"
#include "tiled_positions.inl"

constexpr int64_t BLOCK = 3 * WIDE;  // tokens that go through a weight together: packed, they lie in the L2 cache
constexpr int64_t CHUNK = 2 * ROWS;  // rows that a thread takes at a time
constexpr int64_t KEPT = 1 << 22;    // bytes of results that may still be in a cache when they are read

// One matrix, or two that are gates and ups, the packed tokens, and where products go.
struct Product {
    const bfloat16 *w, *ups;  // [rows, columns]; ups: null for one matrix
    int64_t rows, tokens;
    const bfloat16 *x;
    bfloat16 *y;  // [tokens, rows]; with ups, silu(gate) * up as packed tokens
};

using Products = Chunks<Product>;

// Two rows of gates and of ups, a tile's tokens each, as one row of a packed tile.
inline void gate_pairs(const float *gate, const float *up, bfloat16 *packed) {
    const Words even = (Words)gated<bfloat16>(load<Floats>(gate), load<Floats>(up));
    const Words odd = (Words)gated<bfloat16>(load<Floats>(gate + WIDE), load<Floats>(up + WIDE));
    const Words pairs = even >> 16 | odd;
    std::memcpy(packed, &pairs, sizeof pairs);
}

// Two strips of up to 16 rows at a time, one below the other or one of each matrix, with all tokens. Results go PAST
// the caches.
template <bool PAST>
void multiply(const Products::Chunk &chunk, const Products::Chunk &next, int64_t columns) {
    alignas(64) float out[2 * ROWS * WIDE];
    const Product &of = *chunk.of;
    const int64_t x_width = packed_size(columns), y_width = packed_size(of.rows);
    // Tokens in parts that are as alike as can be.
    const int64_t parts = (of.tokens + WIDE - 1) / WIDE, part = (tiles(of.tokens) + parts - 1) / parts * TOKENS;
    for (int64_t row = chunk.row, rows; row < chunk.row + chunk.rows; row += rows) {
        rows = std::min(of.ups ? ROWS : 2 * ROWS, chunk.row + chunk.rows - row);
        const bfloat16 *const upper = of.w + row * columns;
        const bfloat16 *const lower = of.ups ? of.ups + row * columns : upper + ROWS * columns;
        const int64_t lower_rows = of.ups ? rows : rows - ROWS;
        const bfloat16 *const after = row + rows < chunk.row + chunk.rows ? of.w + (row + rows) * columns
                                      : next.of                           ? next.of->w + next.row * columns
                                                                          : upper;
        for (int64_t t = 0; t < of.tokens; t += part) {
            const int64_t tokens = std::min(part, of.tokens - t);
            const bfloat16 *const x = of.x + t / TOKENS * x_width;
            const auto some = t ? products<false> : products<true>;
            some(upper, rows, columns, x, x_width, tokens, lower_rows > 0 ? lower : after, out);
            if (lower_rows > 0) some(lower, lower_rows, columns, x, x_width, tokens, after, out + ROWS * WIDE);
            if (!of.ups) {
                scatter<PAST>(out, WIDE, rows, tokens, of.y + t * of.rows + row, of.rows);
                continue;
            }
            // Two rows are a pair of places. What is no row is zero, and packs as zero.
            for (int64_t n = 0; n < tokens; n += TOKENS)
                for (int64_t r = 0; r < rows; r += 2)
                    gate_pairs(out + r * WIDE + n, out + (ROWS + r) * WIDE + n,
                               of.y + (t + n) / TOKENS * y_width + packed_place(row + r));
        }
    }
}

void linear_of(const Linear &l, int threads) {
    const int64_t all_rows = std::accumulate(l.B, l.B + l.n, int64_t(0)), width = packed_size(l.A);
    threads = worth(all_rows * l.A * sizeof(bfloat16) * l.T, threads);
    scratch.reserve(tiles(l.T) * width * sizeof(bfloat16));
    bfloat16 *const x = scratch.take<bfloat16>(tiles(l.T) * width);
    std::vector<const bfloat16 *> tokens(l.T);
    for (int64_t t = 0; t < l.T; t++) tokens[t] = static_cast<const bfloat16 *>(l.x) + t * l.A;
    std::vector<Product> all;
    for (int64_t i = 0; i < l.n; i++)
        for (int64_t t = 0; t < l.T; t += BLOCK)
            all.push_back({static_cast<const bfloat16 *>(l.w[i]), nullptr, l.B[i], std::min(BLOCK, l.T - t),
                           x + t / TOKENS * width, static_cast<bfloat16 *>(l.y[i]) + t * l.B[i]});
    const auto some = l.T * all_rows * int64_t(sizeof *x) > KEPT ? multiply<true> : multiply<false>;
    Products products(std::move(all), CHUNK, threads);
#pragma omp parallel num_threads(threads)
    {
        const Tiles configured;
#pragma omp for schedule(static)
        for (int64_t tile = 0; tile < tiles(l.T); tile++)
            pack(&tokens[tile * TOKENS], std::min(TOKENS, l.T - tile * TOKENS), l.A, x + tile * width);
#pragma omp for schedule(static)
        for (int share = 0; share < threads; share++) {
            products.run(share, [&](const auto &chunk, const auto &next) { some(chunk, next, l.A); });
            _mm_sfence();  // what went past the caches is there for other threads
        }
    }
}

int64_t experts_of(const Experts &m, int threads) {
    int64_t done = 0;
    const Pairs pairs(m);
    const int64_t P = pairs.tokens.size(), live = pairs.live.size();
    threads = worth(3 * m.I * m.D * sizeof(bfloat16) * P, threads);
    // Each live expert packs its tokens into tiles of its own; the j-th has those from firsts[j] on.
    std::vector<int64_t> firsts(live + 1);
    for (int64_t j = 0; j < live; j++)
        firsts[j + 1] = firsts[j] + tiles(pairs.offsets[pairs.live[j] + 1] - pairs.offsets[pairs.live[j]]);
    const int64_t x_width = packed_size(m.D), h_width = packed_size(m.I);
    scratch.reserve((firsts[live] * (x_width + h_width) + P * m.D) * sizeof(bfloat16));
    bfloat16 *const x = scratch.take<bfloat16>(firsts[live] * x_width);
    bfloat16 *const h = scratch.take<bfloat16>(firsts[live] * h_width);
    bfloat16 *const outs = scratch.take<bfloat16>(P * m.D);
    std::vector<const bfloat16 *> inputs(P);
    for (int64_t p = 0; p < P; p++) inputs[p] = static_cast<const bfloat16 *>(m.x) + pairs.tokens[p] * m.D;
    std::vector<Product> in, out;
    for (int64_t j = 0; j < live; j++) {
        const int64_t e = pairs.live[j], start = pairs.offsets[e], end = pairs.offsets[e + 1];
        for (int64_t p = start; p < end; p += BLOCK) {
            const int64_t tokens = std::min(BLOCK, end - p), tile = firsts[j] + (p - start) / TOKENS;
            in.push_back({static_cast<const bfloat16 *>(m.gate[e]), static_cast<const bfloat16 *>(m.up[e]), m.I, tokens,
                          x + tile * x_width, h + tile * h_width});
            out.push_back({static_cast<const bfloat16 *>(m.down[e]), nullptr, m.D, tokens, h + tile * h_width,
                           outs + p * m.D});
        }
    }
    const auto some = P * m.D * int64_t(sizeof *outs) > KEPT ? multiply<true> : multiply<false>;
    // Rows of all live experts are shared, so that an odd number of experts leaves no thread idle.
    Products first_layer(std::move(in), CHUNK, threads), second_layer(std::move(out), CHUNK, threads);
#pragma omp parallel num_threads(threads) reduction(+ : done)
    {
        const Tiles configured;
#pragma omp for schedule(static)
        for (int64_t j = 0; j < live; j++) {
            const int64_t end = pairs.offsets[pairs.live[j] + 1];
            int64_t tile = firsts[j];
            for (int64_t p = pairs.offsets[pairs.live[j]]; p < end; p += TOKENS, tile++) {
                pack(&inputs[p], std::min(TOKENS, end - p), m.D, x + tile * x_width);
                // What the first layer will not write of its last places is zeros.
                if (m.I % PLACES) std::fill_n(h + (tile + 1) * h_width - TILE, TILE, bfloat16{});
            }
        }
#pragma omp for schedule(static)
        for (int share = 0; share < threads; share++)
            first_layer.run(share, [&](const auto &chunk, const auto &next) {
                multiply<false>(chunk, next, m.D);
                done += 2 * chunk.of->tokens * chunk.rows * m.D;
            });
#pragma omp for schedule(static)
        for (int share = 0; share < threads; share++) {
            second_layer.run(share, [&](const auto &chunk, const auto &next) {
                some(chunk, next, m.I);
                done += chunk.of->tokens * chunk.rows * m.I;
            });
            _mm_sfence();  // what went past the caches is there for other threads
        }
        // A token's experts are added in ascending order.
#pragma omp for schedule(static)
        for (int64_t t = 0; t < m.T; t++)
            add_shares(pairs.own.data() + pairs.firsts[t], m.k[t], pairs.weights.data(), outs, m.D,
                       static_cast<bfloat16 *>(m.y) + t * m.D);
    }
    return done;
}

void linear(const Linear &l, DType dtype, int threads) {
    dtype == FLOAT32 ? avx512_kernels.linear(l, dtype, threads) : linear_of(l, threads);
}

int64_t experts(const Experts &m, DType dtype, int threads) {
    return dtype == FLOAT32 ? avx512_kernels.experts(m, dtype, threads) : experts_of(m, threads);
}

void norm(const Norm &n, DType dtype, int threads) { avx512_kernels.norm(n, dtype, threads); }

void turn(const Turn &of, DType dtype, int threads) { avx512_kernels.turn(of, dtype, threads); }

void attention(const Attention &a, DType dtype, int threads) { avx512_kernels.attention(a, dtype, threads); }

void attend(const Attend &a, DType dtype, int threads) {
    dtype == FLOAT32 ? avx512_kernels.attend(a, dtype, threads) : attend_of<bfloat16, TiledPositions>(a, threads);
}

void rank(const Rank &r, DType dtype, int threads) { avx512_kernels.rank(r, dtype, threads); }

// Whether the processor has tiles, and the system gives this process the memory to keep them in: Linux wants to be
// asked once (Documentation/arch/x86/xstate.rst), and says no where it does not save them.
bool supported() {
#if defined(__linux__)
    constexpr unsigned AMX_BF16 = 1u << 22, AMX_TILE = 1u << 24;  // of EDX in leaf 7 of CPUID
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;    // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    unsigned eax, ebx, ecx, edx;
    return avx512bf16_kernels.supported() && __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx & AMX_BF16) &&
           (edx & AMX_TILE) && syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
    return false;
#endif
}

}  // namespace

const Kernels amx_kernels = {supported, linear, experts, norm, turn, attention, attend, rank};

}  // namespace minimoe

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
