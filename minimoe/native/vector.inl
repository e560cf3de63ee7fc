// The kernels for one instruction set. The including file defines KERNELS (the table's name), WIDTH (floats in a
// vector), ROWS (rows of a weight that are multiplied with four tokens at a time), SUPPORTED, FUSED: a * b + sum, rounded
// once, and, if the set has it, PAIRS: adds to each float of a vector the products of two pairs of bfloat16. Left to a
// compiler, products would be fused for some shapes of a tile and not for others.
//
// All products with weights are built of one thing: the dot products of a few rows with a few tokens, kept in registers.
// Each (row, token) has one accumulator and the sum always runs in the same order, so a token's result does not
// depend on how many tokens or rows are computed beside it, or by how many threads.
//
// A register of packed bfloat16 holds 2 * WIDTH numbers; shifted left by 16 bits it holds its even ones as floats, and
// with the lower halves masked away its odd ones. Activations are laid out to match: packed once into float32, in
// blocks of 2 * WIDTH with the even places first, and padded with zeros to whole blocks. With PAIRS neither is needed,
// and bfloat16 stays bfloat16; such an instruction takes numbers below 2^-126 for zero.
#include "attention.h"
#include "bfloat16.h"
#include "kernels.h"
#include "lanes.inl"
#include "rank.h"
#include "work.h"

namespace minimoe {
namespace {

// What a packed activation of dtype W is made of.
#if defined(PAIRS)
template <class W>
using Packed = W;
inline Floats add_pairs(Floats sums, Floats a, Floats b) { return PAIRS(sums, a, b); }
#else
template <class W>
using Packed = float;
inline Floats add_pairs(Floats sums, Floats, Floats) { return sums; }  // never called
#endif

constexpr int64_t STEP = 2 * WIDTH;     // places in a block
constexpr int64_t SPAN = 2048;          // places that are summed in registers
constexpr int TOKENS = 4;               // tokens in a tile
constexpr int AHEAD = 2;                // groups of positions between what `mix` reads and what it asks for

inline Floats even(Words packed) { return (Floats)(packed << 16); }
inline Floats odd(Words packed) { return (Floats)(packed & 0xffff0000u); }

// The two vectors of a block: for bfloat16 its even and its odd places, for float32 its halves.
inline Floats first(const bfloat16 *w) { return even(load<Words>(w)); }
inline Floats second(const bfloat16 *w) { return odd(load<Words>(w)); }
inline Floats first(const float *w) { return load<Floats>(w); }
inline Floats second(const float *w) { return load<Floats>(w + WIDTH); }

// Where place i of a block lies in its two vectors.
template <class W>
inline int64_t place_in_block(int64_t i) {
    return sizeof(W) == sizeof(float) ? i : i / 2 + (i % 2 ? WIDTH : 0);
}

// Where place i of an activation lies in its packed form.
template <class W>
inline int64_t packed_place(int64_t i) {
    return sizeof(W) == sizeof(Packed<W>) ? i : i - i % STEP + place_in_block<W>(i % STEP);
}

// Room for a packed activation of n places. The last block keeps activations that lie one after the other from
// starting in the same set of the cache, which would otherwise happen at every power of two.
inline int64_t room(int64_t n) { return (n + STEP - 1) / STEP * STEP + STEP; }

template <class W>
void pack(const W *x, int64_t n, Packed<W> *packed) {
    for (int64_t block = 0; block < n; block += STEP)
        for (int64_t i = block; i < block + STEP; i++)
            packed[packed_place<W>(i)] = narrow<Packed<W>>(i < n ? widen(x[i]) : 0.0f);
}

// gate[i] = silu(gate[i]) * up[i] for n numbers.
template <class W>
void gate_all(float *gate, const float *up, int64_t n) {
    for (int64_t i = 0; i < n; i += WIDTH) {
        Floats g = {}, u = {};
        const size_t bytes = std::min<int64_t>(n - i, WIDTH) * sizeof(float);
        std::memcpy(&g, gate + i, bytes);
        std::memcpy(&u, up + i, bytes);
        g = gated<W>(g, u);
        std::memcpy(gate + i, &g, bytes);
    }
}

// sums[r * N + n] += w[r] . x[n] over one block, which starts at w[r] and at `place` of x[n], for R rows `stride` apart and
// N packed tokens.
template <class W, int R, int N>
inline void add_block(const W *w, int64_t stride, const Packed<W> *const *x, int64_t place, Floats (&sums)[R * N]) {
    Floats rows[R];
    if constexpr (sizeof(Packed<W>) == sizeof(bfloat16)) {
        for (int r = 0; r < R; r++) rows[r] = load<Floats>(w + r * stride);
        for (int n = 0; n < N; n++) {
            const Floats token = load<Floats>(x[n] + place);
            for (int r = 0; r < R; r++) sums[r * N + n] = add_pairs(sums[r * N + n], rows[r], token);
        }
    } else {
        for (int r = 0; r < R; r++) rows[r] = first(w + r * stride);
        for (int n = 0; n < N; n++) {
            const Floats token = load<Floats>(x[n] + place);
            for (int r = 0; r < R; r++) sums[r * N + n] = FUSED(rows[r], token, sums[r * N + n]);
        }
        for (int r = 0; r < R; r++) rows[r] = second(w + r * stride);
        for (int n = 0; n < N; n++) {
            const Floats token = load<Floats>(x[n] + place + WIDTH);
            for (int r = 0; r < R; r++) sums[r * N + n] = FUSED(rows[r], token, sums[r * N + n]);
        }
    }
}

// out[r * TOKENS + n] += w[r] . x[n] for R rows `stride` apart and N packed tokens, over n_places places. Meanwhile
// ASKED rows from `next` on are asked for, into the L2 cache, in the order in which they lie: as large a part of them
// as of these.
template <class W, int R, int N, int ASKED>
inline void dots(const W *w, int64_t stride, const Packed<W> *const *x, int64_t from, int64_t n_places, const W *next,
                 float *out) {
    constexpr int64_t LINE = 64 / sizeof(W);
    Floats sums[R * N] = {};
    const int64_t whole = n_places / STEP * STEP;
    for (int64_t i = from; i < from + whole; i += STEP) {
        for (int64_t ask = 0; ask < ASKED * STEP; ask += LINE) __builtin_prefetch(next + i * ASKED + ask, 0, 2);
        add_block<W, R, N>(w + i, stride, x, i, sums);
    }
    if (whole < n_places) {
        // The end of a row is copied, for nothing after it may be read.
        W rest[R][STEP] = {};
        for (int r = 0; r < R; r++)
            std::memcpy(rest[r], w + r * stride + from + whole, (n_places - whole) * sizeof(W));
        add_block<W, R, N>(rest[0], STEP, x, from + whole, sums);
    }
    Floats summed[R * N];  // a copy, so that the loop above keeps its sums in registers
#pragma GCC unroll 32
    for (int i = 0; i < R * N; i++) summed[i] = sums[i];
    sum<R * N>(summed);
    float lanes[(R * N + WIDTH - 1) / WIDTH * WIDTH];
    std::memcpy(lanes, summed, sizeof lanes);
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) out[r * TOKENS + n] += lanes[r * N + n];
}

// The part of `tile` that covers the places from `from` on, for some of its rows. R rows at a time ask for ASKED rows.
template <class W, int R, int N, int ASKED>
void strip(const W *w, int64_t rows, int64_t columns, const Packed<W> *const *x, int64_t from, const W *next,
           float *out) {
    const int64_t n = std::min(SPAN, columns - from);
    int64_t row = 0;
    for (; row + R <= rows; row += R, next += ASKED * columns)
        dots<W, R, N, ASKED>(w + row * columns, columns, x, from, n, next, out + row * TOKENS);
    for (; row < rows; row++) dots<W, 1, N, 0>(w + row * columns, columns, x, from, n, nullptr, out + row * TOKENS);
}

// Where a thread reads on after the rows that it has now, or null: right after them, and in its next chunk.
template <class W>
struct Ahead {
    const W *rows, *chunk;
};

// out[r * TOKENS + n] = w[r] . x[n] for all rows of w[rows, columns], which come from memory in their first pass.
template <class W, int R, int N>
void tile(const W *w, int64_t rows, int64_t columns, const Packed<W> *const *x, int64_t pass, Ahead<W> ahead,
          float *out) {
    std::fill(out, out + rows * TOKENS, 0.0f);
    if (pass == 0) {
        // Fresh rows stream from memory, whole, and ask for as many rows after them.
        for (int64_t row = 0; row < rows; row += R) {
            const W *const next = row + 2 * R <= rows ? w + (row + R) * columns : ahead.rows;
            const auto some = next ? strip<W, R, N, R> : strip<W, R, N, 0>;
            for (int64_t from = 0; from < columns; from += SPAN)
                some(w + row * columns, std::min<int64_t>(R, rows - row), columns, x, from, next, out + row * TOKENS);
        }
        return;
    }
    // Later the rows are in the L2 cache and the processor is the limit: time to ask for the next chunk, a part a pass.
    const W *const next = ahead.chunk && pass <= R ? ahead.chunk + (pass - 1) * (rows / R) * columns : nullptr;
    const auto some = next ? strip<W, R, N, 1> : strip<W, R, N, 0>;
    for (int64_t from = 0; from < columns; from += SPAN) some(w, rows, columns, x, from, next, out);
}

// The same for 1 to TOKENS tokens.
template <class W>
void products(const W *w, int64_t rows, int64_t columns, const Packed<W> *const *x, int64_t tokens, int64_t pass,
              Ahead<W> ahead, float *out) {
    switch (tokens) {
        case 1: return tile<W, 4, 1>(w, rows, columns, x, pass, ahead, out);
        case 2: return tile<W, 4, 2>(w, rows, columns, x, pass, ahead, out);
        case 3: return tile<W, ROWS, 3>(w, rows, columns, x, pass, ahead, out);
        default: return tile<W, ROWS, 4>(w, rows, columns, x, pass, ahead, out);
    }
}

template <class W>
void linear_of(const Linear &l, int threads) {
    const int64_t all_rows = std::accumulate(l.B, l.B + l.n, int64_t(0)), width = room(l.A);
    threads = worth(all_rows * l.A * sizeof(W) * l.T, threads);
    const int64_t chunk = chunk_rows(all_rows, l.A, sizeof(W), 4 * threads);
    // Chunks of all weights in one loop; the i-th weight has those from firsts[i] on.
    std::vector<int64_t> firsts(l.n + 1);
    for (int64_t i = 0; i < l.n; i++) firsts[i + 1] = firsts[i] + (l.B[i] + chunk - 1) / chunk;
    const auto weight_of = [&](int64_t item) {
        return std::upper_bound(firsts.begin(), firsts.end(), item) - firsts.begin() - 1;
    };
    const auto rows_from = [&](int64_t item) -> const W * {
        if (item >= firsts[l.n]) return nullptr;
        const int64_t i = weight_of(item);
        return static_cast<const W *>(l.w[i]) + (item - firsts[i]) * chunk * l.A;
    };
    scratch.reserve(l.T * width * sizeof(Packed<W>));
    Packed<W> *const x = scratch.take<Packed<W>>(l.T * width);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t t = 0; t < l.T; t++) pack(static_cast<const W *>(l.x) + t * l.A, l.A, x + t * width);
        std::vector<float> out(chunk * TOKENS);
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < firsts[l.n]; item++) {
            const int64_t i = weight_of(item), B = l.B[i], row = (item - firsts[i]) * chunk;
            const int64_t rows = std::min(chunk, B - row);
            // The thread's next item is likely the one after those that the others have now.
            const W *const w = rows_from(item), *const next = rows_from(item + threads);
            W *const y = static_cast<W *>(l.y[i]) + row;
            for (int64_t t = 0; t < l.T; t += TOKENS) {
                const int64_t tokens = std::min<int64_t>(TOKENS, l.T - t);
                const Packed<W> *places[TOKENS];
                for (int64_t n = 0; n < tokens; n++) places[n] = x + (t + n) * width;
                products(w, rows, l.A, places, tokens, t / TOKENS, Ahead<W>{next, next}, out.data());
                for (int64_t n = 0; n < tokens; n++)
                    for (int64_t r = 0; r < rows; r++) y[(t + n) * B + r] = narrow<W>(out[r * TOKENS + n]);
            }
        }
    }
}

// A token's sum and one more expert's share of it. In float32 a compiler may round once or twice, and not alike in the
// body and at the end of a loop: once, then, everywhere.
template <class W>
inline float with_share(float sum, float out, float weight) {
    if constexpr (sizeof(W) == sizeof(float)) return std::fma(out, weight, sum);
    return sum + rounded<W>(rounded<W>(out) * weight);
}

template <class W>
int64_t experts_of(const Experts &m, int threads) {
    int64_t done = 0;
    const Pairs pairs(m);
    const int64_t P = pairs.tokens.size(), live = pairs.live.size();
    threads = worth(3 * m.I * m.D * sizeof(W) * P, threads);
    const int64_t x_width = room(m.D), h_width = room(m.I);
    scratch.reserve((m.T * x_width + P * h_width) * sizeof(Packed<W>) + m.T * m.D * sizeof(float));
    Packed<W> *const x = scratch.take<Packed<W>>(m.T * x_width);
    Packed<W> *const h = scratch.take<Packed<W>>(P * h_width);
    float *const y = scratch.take<float>(m.T * m.D);
    // Gate and up are read side by side, so each may fill half the cache. A chunk of outputs is read from all experts.
    const int64_t in_chunk = chunk_rows(m.I, 2 * m.D, sizeof(W), (4 * threads + live - 1) / std::max<int64_t>(live, 1));
    const int64_t in_chunks = (m.I + in_chunk - 1) / in_chunk;
    const int64_t out_chunk = chunk_rows(m.D, m.I, sizeof(W), 16 * threads);
    const auto rows_from = [&](const void *const *weights, int64_t item) -> const W * {
        if (item >= live * in_chunks) return nullptr;
        return static_cast<const W *>(weights[pairs.live[item / in_chunks]]) + item % in_chunks * in_chunk * m.D;
    };
#pragma omp parallel num_threads(threads) reduction(+ : done)
    {
        std::vector<float> gate(in_chunk * TOKENS), up(in_chunk * TOKENS), out(out_chunk * TOKENS);
        const Packed<W> *places[TOKENS];
#pragma omp for schedule(static)
        for (int64_t t = 0; t < m.T; t++) pack(static_cast<const W *>(m.x) + t * m.D, m.D, x + t * x_width);
        // Chunks of all live experts in one loop, so that an odd number of experts leaves no thread idle.
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < live * in_chunks; item++) {
            const int64_t e = pairs.live[item / in_chunks], row = item % in_chunks * in_chunk;
            const int64_t rows = std::min(in_chunk, m.I - row);
            const W *const gate_rows = rows_from(m.gate, item), *const up_rows = rows_from(m.up, item);
            const int64_t later = item + threads;
            const W *const next_gate = rows_from(m.gate, later), *const next_up = rows_from(m.up, later);
            for (int64_t p = pairs.offsets[e]; p < pairs.offsets[e + 1]; p += TOKENS) {
                const int64_t tokens = std::min<int64_t>(TOKENS, pairs.offsets[e + 1] - p);
                const int64_t pass = (p - pairs.offsets[e]) / TOKENS;
                for (int64_t n = 0; n < tokens; n++) places[n] = x + pairs.tokens[p + n] * x_width;
                products(gate_rows, rows, m.D, places, tokens, pass, Ahead<W>{up_rows, next_gate}, gate.data());
                products(up_rows, rows, m.D, places, tokens, pass, Ahead<W>{next_gate, next_up}, up.data());
                done += 2 * tokens * rows * m.D;
                gate_all<W>(gate.data(), up.data(), rows * TOKENS);
                for (int64_t n = 0; n < tokens; n++)
                    for (int64_t r = 0; r < rows; r++)
                        h[(p + n) * h_width + packed_place<W>(row + r)] = narrow<Packed<W>>(gate[r * TOKENS + n]);
            }
        }
#pragma omp for schedule(static)
        for (int64_t p = 0; p < P; p++)
            for (int64_t i = m.I; i < h_width; i++) h[p * h_width + packed_place<W>(i)] = {};
        // A chunk of outputs belongs to one thread, which adds the experts to it in ascending order.
#pragma omp for schedule(dynamic)
        for (int64_t row = 0; row < m.D; row += out_chunk) {
            const int64_t rows = std::min(out_chunk, m.D - row);
            for (int64_t t = 0; t < m.T; t++) std::fill_n(y + t * m.D + row, rows, 0.0f);
            const auto down_rows = [&](int64_t j) -> const W * {
                return j < live ? static_cast<const W *>(m.down[pairs.live[j]]) + row * m.I : nullptr;
            };
            for (int64_t j = 0; j < live; j++) {
                const int64_t e = pairs.live[j];
                for (int64_t p = pairs.offsets[e]; p < pairs.offsets[e + 1]; p += TOKENS) {
                    const int64_t tokens = std::min<int64_t>(TOKENS, pairs.offsets[e + 1] - p);
                    for (int64_t n = 0; n < tokens; n++) places[n] = h + (p + n) * h_width;
                    products(down_rows(j), rows, m.I, places, tokens, (p - pairs.offsets[e]) / TOKENS,
                             Ahead<W>{down_rows(j + 1), down_rows(j + 1)}, out.data());
                    done += tokens * rows * m.I;
                    for (int64_t n = 0; n < tokens; n++) {
                        float *const sums = y + pairs.tokens[p + n] * m.D + row;
                        const float weight = rounded<W>(pairs.weights[p + n]);
                        for (int64_t r = 0; r < rows; r++)
                            sums[r] = with_share<W>(sums[r], out[r * TOKENS + n], weight);
                    }
                }
            }
            for (int64_t t = 0; t < m.T; t++)
                for (int64_t r = row; r < row + rows; r++)
                    static_cast<W *>(m.y)[t * m.D + r] = narrow<W>(y[t * m.D + r]);
        }
    }
    return done;
}

template <class W>
float norm_scale(const W *x, int64_t n, float eps) {
    Floats sums = {};
    const int64_t whole = n / STEP * STEP;
    for (int64_t i = 0; i < whole; i += STEP) {
        sums += first(x + i) * first(x + i);
        sums += second(x + i) * second(x + i);
    }
    sum<1>(&sums);
    float squares = sums[0];
    for (int64_t i = whole; i < n; i++) squares += widen(x[i]) * widen(x[i]);
    return 1 / std::sqrt(squares / n + eps);
}

template <class W>
void norm_of(const Norm &n, int threads) {
    threads = worth(n.T * n.D * sizeof(W), threads);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t t = 0; t < n.T; t++) {
        const W *x = static_cast<const W *>(n.x) + t * n.D;
        scaled(x, norm_scale(x, n.D, n.eps), static_cast<const W *>(n.w), n.D, static_cast<W *>(n.y) + t * n.D);
    }
}

// y[i] += sum over R positions of weights[s] * values[s, i], in order, for whole blocks of places; y is packed.
template <class W, int R>
inline void add_positions(const float *weights, const W *values, int64_t d, int64_t whole, float *y) {
    for (int64_t i = 0; i < whole; i += STEP) {
        Floats firsts = load<Floats>(y + i), seconds = load<Floats>(y + i + WIDTH);
        for (int r = 0; r < R; r++) {
            __builtin_prefetch(values + (r + AHEAD * R) * d + i, 0, 0);
            firsts += weights[r] * first(values + r * d + i);
            seconds += weights[r] * second(values + r * d + i);
        }
        std::memcpy(y + i, &firsts, sizeof firsts);
        std::memcpy(y + i + WIDTH, &seconds, sizeof seconds);
    }
}

// y[i] = sum over s of weights[s] * values[s, i] for i < d, in float32. Values are read from front to back.
template <class W>
void mix(const float *weights, const W *values, int64_t positions, int64_t d, float *y) {
    const int64_t whole = d / STEP * STEP;
    std::fill_n(y, d, 0.0f);
    int64_t s = 0;
    for (; s + 4 <= positions; s += 4) add_positions<W, 4>(weights + s, values + s * d, d, whole, y);
    for (; s < positions; s++) add_positions<W, 1>(weights + s, values + s * d, d, whole, y);
    for (int64_t i = 0; i < whole; i += STEP) {
        float packed[STEP];
        std::copy_n(y + i, STEP, packed);
        for (int64_t j = 0; j < STEP; j++) y[i + j] = packed[place_in_block<W>(j)];
    }
    for (int64_t i = whole; i < d; i++)
        for (int64_t s = 0; s < positions; s++) y[i] += weights[s] * widen(values[s * d + i]);
}

template <class W>
void attention_of(const Attention &a, int threads) {
    const int64_t width = room(a.d), longest = *std::max_element(a.lengths, a.lengths + a.T) + 1;
    std::vector<W> queries(a.T * a.H * a.d);
    threads = worth(a.T * longest * 2 * a.G * a.d * sizeof(W), threads);
#pragma omp parallel num_threads(threads)
    {
        std::vector<W> own(std::max(a.H, a.G) * a.d);
        std::vector<float> scores((longest + 3) / 4 * 4 * TOKENS), mixed(a.d);
        std::vector<Packed<W>> query(width);
#pragma omp for schedule(static)
        for (int64_t t = 0; t < a.T; t++) {
            const float q_scale = norm_scale(static_cast<const W *>(a.q) + t * a.H * a.d, a.H * a.d, a.eps);
            const float k_scale = norm_scale(static_cast<const W *>(a.k) + t * a.G * a.d, a.G * a.d, a.eps);
            prepare(a, t, q_scale, k_scale, own.data(), &queries[t * a.H * a.d]);
        }
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < a.T * a.H; item++) {
            const int64_t t = item / a.H, h = item % a.H, g = h / (a.H / a.G), positions = a.lengths[t] + 1;
            pack(&queries[item * a.d], a.d, query.data());
            const Packed<W> *const place = query.data();
            const W *const values = cached<W>(a, a.values, t, g);
            products(cached<W>(a, a.keys, t, g), positions, a.d, &place, 1, 0, Ahead<W>{values, nullptr},
                     scores.data());
            for (int64_t s = 0; s < positions; s++) scores[s] = scores[s * TOKENS] / std::sqrt(float(a.d));
            softmax(scores.data(), positions);
            mix(scores.data(), values, positions, a.d, mixed.data());
            for (int64_t i = 0; i < a.d; i++) static_cast<W *>(a.y)[item * a.d + i] = narrow<W>(mixed[i]);
        }
    }
}

#include "prompt.inl"

void linear(const Linear &l, DType dtype, int threads) {
    dtype == FLOAT32 ? linear_of<float>(l, threads) : linear_of<bfloat16>(l, threads);
}

int64_t experts(const Experts &m, DType dtype, int threads) {
    return dtype == FLOAT32 ? experts_of<float>(m, threads) : experts_of<bfloat16>(m, threads);
}

void norm(const Norm &n, DType dtype, int threads) {
    dtype == FLOAT32 ? norm_of<float>(n, threads) : norm_of<bfloat16>(n, threads);
}

void attention(const Attention &a, DType dtype, int threads) {
    dtype == FLOAT32 ? attention_of<float>(a, threads) : attention_of<bfloat16>(a, threads);
}

void attend(const Attend &a, DType dtype, int threads) {
    dtype == FLOAT32 ? attend_of<float>(a, threads) : attend_of<bfloat16>(a, threads);
}

void rank(const Rank &r, DType dtype, int threads) {
#pragma omp parallel for num_threads(r.T < 64 ? 1 : threads) schedule(static)
    for (int64_t t = 0; t < r.T; t++) dtype == FLOAT32 ? rank_token<float>(r, t) : rank_token<bfloat16>(r, t);
}

bool supported() { return SUPPORTED; }

}  // namespace

const Kernels KERNELS = {supported, linear, experts, norm, attention, attend, rank};

}  // namespace minimoe
