// Products of bfloat16 by matrix tiles, for one token as for many; everything else as avx512 does it.
//
// A tile is 16 rows of 64 bytes. 16 rows of a weight, 32 places wide, are one as they lie in the file. Activations are
// packed to be the other factor: a row for each pair of places, in it that pair of each of 16 tokens. The product of the
// two adds to 16 x 16 sums in float32, [row of the weight, token].
//
// What a product adds to a sum depends on that row and that token alone, and places are added 32 at a time in ascending
// order, so a token's result does not depend on how many tokens or rows are computed beside it, or by how many threads.
// Nor may it depend on whether it comes alone, which is why one token goes through tiles as well: vectors would round
// differently. The processor takes numbers below 2^-126 for zero here.
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
#include "bfloat16.h"
#include "lanes.inl"
#include "work.h"

namespace minimoe {
namespace {

constexpr int64_t ROWS = 16;    // of a weight in a tile
constexpr int64_t PLACES = 32;  // of a row in a tile
constexpr int64_t TOKENS = 16;  // in a tile
constexpr int64_t TILE = ROWS * PLACES;
constexpr int64_t GROUP = 2 * TOKENS;  // tokens that are multiplied at a time, with as many rows

// All eight tiles in full size, for as long as a thread works with them.
class Tiles {
   public:
    Tiles() { _tile_loadconfig(&FULL); }
    ~Tiles() { _tile_release(); }
    Tiles(const Tiles &) = delete;

   private:
    struct alignas(64) Layout {
        uint8_t palette, first_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    };
    static constexpr Layout FULL = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
};

inline int64_t tiles(int64_t tokens) { return (tokens + TOKENS - 1) / TOKENS; }

// Numbers in n places of up to 16 packed tokens, and where among them place i of token t lies.
inline int64_t packed_size(int64_t n) { return (n + PLACES - 1) / PLACES * TILE; }
inline int64_t packed_place(int64_t i, int64_t t) { return i / 2 * GROUP + 2 * t + i % 2; }

// Packs n places of one of the tokens; the room was filled with zeros.
inline void pack(const bfloat16 *x, int64_t n, int64_t t, bfloat16 *packed) {
    for (int64_t i = 0; i + 2 <= n; i += 2) std::memcpy(packed + packed_place(i, t), x + i, 2 * sizeof *x);
    if (n % 2) packed[packed_place(n - 1, t)] = x[n - 1];
}

// Where a tile's rows of a weight start, and how many bytes apart.
struct Place {
    const bfloat16 *start;
    int64_t stride;
};

// The tile of a weight at w, of which so many rows and places are left: where it lies, or, if it is not whole, a copy
// filled up with zeros, for nothing beyond a weight may be read.
inline Place weight_tile(const bfloat16 *w, int64_t columns, int64_t rows, int64_t places, bfloat16 *copy) {
    if (rows >= ROWS && places >= PLACES) return {w, columns * int64_t(sizeof *w)};
    __asm__ volatile("" ::: "memory");  // to GCC, loading a tile reads no memory: keep loads before and after apart
    std::fill_n(copy, TILE, bfloat16{});
    for (int64_t r = 0; r < std::min(rows, ROWS); r++)
        std::memcpy(copy + r * PLACES, w + r * columns, std::min(places, PLACES) * sizeof *w);
    __asm__ volatile("" ::: "memory");
    return {copy, PLACES * sizeof *w};
}

// out[r * GROUP + t] = w[r] . x[t] for w[rows, columns] and the packed tokens of one tile, or of TWO that are x_width
// apart. `out` has room for whole tiles. Fresh rows come from memory: those of the next step are asked for ahead.
template <bool TWO>
void products(const bfloat16 *w, int64_t rows, int64_t columns, const bfloat16 *x, int64_t x_width, bool fresh,
              float *out) {
    alignas(64) bfloat16 copies[2][TILE];
    for (int64_t row = 0; row < rows; row += 2 * ROWS) {
        const int64_t ahead = fresh ? std::clamp<int64_t>(rows - row - 2 * ROWS, 0, 2 * ROWS) : 0;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t i = 0; i < columns; i += PLACES) {
            const bfloat16 *const from = w + row * columns + i;
            // Into the L2 cache: rows a power of two apart would drive each other out of the L1 cache.
            for (int64_t r = 0; r < ahead; r++) __builtin_prefetch(from + (2 * ROWS + r) * columns, 0, 2);
            const Place upper = weight_tile(from, columns, rows - row, columns - i, copies[0]);
            const Place lower = weight_tile(from + ROWS * columns, columns, rows - row - ROWS, columns - i, copies[1]);
            const bfloat16 *const tokens = x + i * TOKENS;
            _tile_loadd(6, tokens, PLACES * sizeof *x);
            _tile_loadd(4, upper.start, upper.stride);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(5, lower.start, lower.stride);
            _tile_dpbf16ps(1, 5, 6);
            if (TWO) {
                _tile_loadd(7, tokens + x_width, PLACES * sizeof *x);
                _tile_dpbf16ps(2, 4, 7);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        float *const sums = out + row * GROUP;
        _tile_stored(0, sums, GROUP * sizeof *out);
        _tile_stored(1, sums + ROWS * GROUP, GROUP * sizeof *out);
        if (TWO) {
            _tile_stored(2, sums + TOKENS, GROUP * sizeof *out);
            _tile_stored(3, sums + ROWS * GROUP + TOKENS, GROUP * sizeof *out);
        }
    }
}

// The same for 1 to GROUP tokens.
inline void products(const bfloat16 *w, int64_t rows, int64_t columns, const bfloat16 *x, int64_t x_width,
                     int64_t tokens, bool fresh, float *out) {
    tokens > TOKENS ? products<true>(w, rows, columns, x, x_width, fresh, out)
                    : products<false>(w, rows, columns, x, x_width, fresh, out);
}

// One row of a packed tile from two rows of gates and of ups, a tile's tokens each.
inline void gate_pairs(const float *gate, const float *up, bfloat16 *packed) {
    const Words even = (Words)gated<bfloat16>(load<Floats>(gate), load<Floats>(up));
    const Words odd = (Words)gated<bfloat16>(load<Floats>(gate + GROUP), load<Floats>(up + GROUP));
    const Words pairs = even >> 16 | odd;
    std::memcpy(packed, &pairs, sizeof pairs);
}

// Rows of a weight that one thread takes at a time, in whole steps.
inline int64_t whole_chunk(int64_t rows, int64_t columns, int64_t chunks) {
    const int64_t chunk = chunk_rows(rows, columns, sizeof(bfloat16), chunks);
    return (chunk + 2 * ROWS - 1) / (2 * ROWS) * (2 * ROWS);
}

void linear_of(const Linear &l, int threads) {
    const int64_t all_rows = std::accumulate(l.B, l.B + l.n, int64_t(0)), width = packed_size(l.A);
    threads = worth(all_rows * l.A * sizeof(bfloat16) * l.T, threads);
    const int64_t chunk = whole_chunk(all_rows, l.A, 4 * threads);
    // Chunks of all weights in one loop; the i-th weight has those from firsts[i] on.
    std::vector<int64_t> firsts(l.n + 1);
    for (int64_t i = 0; i < l.n; i++) firsts[i + 1] = firsts[i] + (l.B[i] + chunk - 1) / chunk;
    scratch.reserve(tiles(l.T) * width * sizeof(bfloat16));
    bfloat16 *const x = scratch.take<bfloat16>(tiles(l.T) * width);
#pragma omp parallel num_threads(threads)
    {
        const Tiles configured;
#pragma omp for schedule(static)
        for (int64_t tile = 0; tile < tiles(l.T); tile++) {
            std::fill_n(x + tile * width, width, bfloat16{});
            for (int64_t t = tile * TOKENS; t < std::min(l.T, (tile + 1) * TOKENS); t++)
                pack(static_cast<const bfloat16 *>(l.x) + t * l.A, l.A, t % TOKENS, x + tile * width);
        }
        std::vector<float> out(chunk * GROUP);
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < firsts[l.n]; item++) {
            const int64_t i = std::upper_bound(firsts.begin(), firsts.end(), item) - firsts.begin() - 1;
            const int64_t B = l.B[i], row = (item - firsts[i]) * chunk, rows = std::min(chunk, B - row);
            const bfloat16 *const w = static_cast<const bfloat16 *>(l.w[i]) + row * l.A;
            bfloat16 *const y = static_cast<bfloat16 *>(l.y[i]) + row;
            for (int64_t t = 0; t < l.T; t += GROUP) {
                const int64_t tokens = std::min(GROUP, l.T - t);
                products(w, rows, l.A, x + t / TOKENS * width, width, tokens, t == 0, out.data());
                for (int64_t n = 0; n < tokens; n++)
                    for (int64_t r = 0; r < rows; r++) y[(t + n) * B + r] = narrow<bfloat16>(out[r * GROUP + n]);
            }
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
    scratch.reserve(firsts[live] * (x_width + h_width) * sizeof(bfloat16) + m.T * m.D * sizeof(float));
    bfloat16 *const x = scratch.take<bfloat16>(firsts[live] * x_width);
    bfloat16 *const h = scratch.take<bfloat16>(firsts[live] * h_width);
    float *const y = scratch.take<float>(m.T * m.D);
    // Gate and up are read side by side, so each may fill half the cache.
    const int64_t in_chunk = whole_chunk(m.I, 2 * m.D, (4 * threads + live - 1) / std::max<int64_t>(live, 1));
    const int64_t in_chunks = (m.I + in_chunk - 1) / in_chunk;
    const int64_t out_chunk = whole_chunk(m.D, m.I, 16 * threads);
#pragma omp parallel num_threads(threads) reduction(+ : done)
    {
        const Tiles configured;
        std::vector<float> gate(in_chunk * GROUP), up(in_chunk * GROUP), out(out_chunk * GROUP);
#pragma omp for schedule(dynamic)
        for (int64_t j = 0; j < live; j++) {
            std::fill_n(x + firsts[j] * x_width, (firsts[j + 1] - firsts[j]) * x_width, bfloat16{});
            std::fill_n(h + firsts[j] * h_width, (firsts[j + 1] - firsts[j]) * h_width, bfloat16{});
            const int64_t start = pairs.offsets[pairs.live[j]], end = pairs.offsets[pairs.live[j] + 1];
            for (int64_t p = start; p < end; p++)
                pack(static_cast<const bfloat16 *>(m.x) + pairs.tokens[p] * m.D, m.D, (p - start) % TOKENS,
                     x + (firsts[j] + (p - start) / TOKENS) * x_width);
        }
        // Chunks of all live experts in one loop, so that an odd number of experts leaves no thread idle.
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < live * in_chunks; item++) {
            const int64_t j = item / in_chunks, e = pairs.live[j], row = item % in_chunks * in_chunk;
            const int64_t rows = std::min(in_chunk, m.I - row), all = pairs.offsets[e + 1] - pairs.offsets[e];
            for (int64_t p = 0; p < all; p += GROUP) {
                const int64_t tokens = std::min(GROUP, all - p), tile = firsts[j] + p / TOKENS;
                products(static_cast<const bfloat16 *>(m.gate[e]) + row * m.D, rows, m.D, x + tile * x_width, x_width,
                         tokens, p == 0, gate.data());
                products(static_cast<const bfloat16 *>(m.up[e]) + row * m.D, rows, m.D, x + tile * x_width, x_width,
                         tokens, p == 0, up.data());
                done += 2 * tokens * rows * m.D;
                // Two rows are a pair of places. What is no row or no token is zero, and packs as zero.
                for (int64_t r = 0; r < rows; r += 2)
                    for (int64_t n = 0; n < tokens; n += TOKENS) {
                        const int64_t at = r * GROUP + n;
                        gate_pairs(&gate[at], &up[at], h + (tile + n / TOKENS) * h_width + packed_place(row + r, 0));
                    }
            }
        }
        // A chunk of outputs belongs to one thread, which adds the experts to it in ascending order.
#pragma omp for schedule(dynamic)
        for (int64_t row = 0; row < m.D; row += out_chunk) {
            const int64_t rows = std::min(out_chunk, m.D - row);
            for (int64_t t = 0; t < m.T; t++) std::fill_n(y + t * m.D + row, rows, 0.0f);
            for (int64_t j = 0; j < live; j++) {
                const int64_t e = pairs.live[j], start = pairs.offsets[e], all = pairs.offsets[e + 1] - start;
                for (int64_t p = 0; p < all; p += GROUP) {
                    const int64_t tokens = std::min(GROUP, all - p);
                    products(static_cast<const bfloat16 *>(m.down[e]) + row * m.I, rows, m.I,
                             h + (firsts[j] + p / TOKENS) * h_width, h_width, tokens, p == 0, out.data());
                    done += tokens * rows * m.I;
                    for (int64_t n = 0; n < tokens; n++) {
                        float *const sums = y + pairs.tokens[start + p + n] * m.D + row;
                        const float weight = rounded<bfloat16>(pairs.weights[start + p + n]);
                        for (int64_t r = 0; r < rows; r++)
                            sums[r] += rounded<bfloat16>(rounded<bfloat16>(out[r * GROUP + n]) * weight);
                    }
                }
            }
            for (int64_t t = 0; t < m.T; t++)
                for (int64_t r = row; r < row + rows; r++)
                    static_cast<bfloat16 *>(m.y)[t * m.D + r] = narrow<bfloat16>(y[t * m.D + r]);
        }
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

void attend(const Attend &a, DType dtype, int threads) { avx512bf16_kernels.attend(a, dtype, threads); }

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
