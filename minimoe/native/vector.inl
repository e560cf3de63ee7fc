// The kernels for one instruction set. The including file defines
// - KERNELS, the table's name, and SUPPORTED,
// - WIDTH, floats in a vector,
// - ROWS, rows of a weight that are multiplied with four tokens at a time,
// - SINGLE, rows that are read from memory at a time for few tokens: one by one they stream best, but a row alone
//   waits for its own sum, which only PAIRS keep short,
// - FUSED: a * b + sum, rounded once. Left to a compiler, products would be fused for some shapes of a tile and not for
//   others,
// - and, if the set has it, PAIRS: adds to each float of a vector the products of two pairs of bfloat16.
#include "attention.h"
#include "bfloat16.h"
#include "kernels.h"
#include "lanes.inl"
#include "mixture.inl"
#include "rank.h"
#include "work.h"

namespace minimoe {
namespace {

#include "products.inl"
#include "step.inl"
#include "prompt.inl"
#include "positions.inl"

template <class W>
void linear_of(const Linear &l, int threads) {
    const int64_t all_rows = std::accumulate(l.B, l.B + l.n, int64_t(0)), width = room(l.A);
    threads = worth(all_rows * l.A * sizeof(W) * l.T, threads);
    scratch.reserve(l.T * width * sizeof(Packed<W>));
    Packed<W> *const x = scratch.take<Packed<W>>(l.T * width);
    std::vector<const Packed<W> *> tokens(l.T);
    for (int64_t t = 0; t < l.T; t++) tokens[t] = x + t * width;
    std::vector<Product<W>> all;
    for (int64_t i = 0; i < l.n; i++)
        all.push_back({static_cast<const W *>(l.w[i]), l.B[i], l.T, tokens.data(), static_cast<W *>(l.y[i])});
    Products<W> products(std::move(all), l.A, threads);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t t = 0; t < l.T; t++) pack(static_cast<const W *>(l.x) + t * l.A, l.A, x + t * width);
#pragma omp for schedule(static)
        for (int share = 0; share < threads; share++) products.run(share);
    }
}

// What an expert packs for its second layer: silu(gate) * up.
template <class W>
void pack_gated(const W *gate, const W *up, int64_t n, Packed<W> *packed) {
    for (int64_t i = 0; i < n; i += STEP) {
        const Block g = block(gate + i, n - i), u = block(up + i, n - i);
        store(packed + i, STEP, {gated<W>(g.firsts, u.firsts), gated<W>(g.seconds, u.seconds)});
    }
}

template <class W>
int64_t experts_of(const Experts &m, int threads) {
    int64_t done = 0;
    const Pairs pairs(m);
    const int64_t P = pairs.tokens.size();
    threads = worth(3 * m.I * m.D * sizeof(W) * P, threads);
    const int64_t x_width = room(m.D), h_width = room(m.I);
    // What experts put out takes the place of their gates and ups, which are done with by then.
    const int64_t width = std::max(2 * m.I, m.D);
    scratch.reserve((m.T * x_width + P * h_width) * sizeof(Packed<W>) + P * width * sizeof(W));
    Packed<W> *const x = scratch.take<Packed<W>>(m.T * x_width);
    Packed<W> *const h = scratch.take<Packed<W>>(P * h_width);
    W *const outs = scratch.take<W>(P * width), *const gates = outs, *const ups = gates + P * m.I;
    std::vector<const Packed<W> *> inputs(P), hidden(P);
    for (int64_t p = 0; p < P; p++) inputs[p] = x + pairs.tokens[p] * x_width, hidden[p] = h + p * h_width;
    std::vector<Product<W>> in, out;
    for (const int64_t e : pairs.live) {
        const int64_t p = pairs.offsets[e], tokens = pairs.offsets[e + 1] - p;
        in.push_back({static_cast<const W *>(m.gate[e]), m.I, tokens, &inputs[p], gates + p * m.I});
        in.push_back({static_cast<const W *>(m.up[e]), m.I, tokens, &inputs[p], ups + p * m.I});
        out.push_back({static_cast<const W *>(m.down[e]), m.D, tokens, &hidden[p], outs + p * m.D});
    }
    // Rows of all live experts are shared, so that an odd number of experts leaves no thread idle.
    Products<W> first_layer(std::move(in), m.D, threads), second_layer(std::move(out), m.I, threads);
#pragma omp parallel num_threads(threads) reduction(+ : done)
    {
#pragma omp for schedule(static)
        for (int64_t t = 0; t < m.T; t++) pack(static_cast<const W *>(m.x) + t * m.D, m.D, x + t * x_width);
#pragma omp for schedule(static)
        for (int share = 0; share < threads; share++) done += first_layer.run(share);
#pragma omp for schedule(static)
        for (int64_t p = 0; p < P; p++) pack_gated(gates + p * m.I, ups + p * m.I, m.I, h + p * h_width);
#pragma omp for schedule(static)
        for (int share = 0; share < threads; share++) done += second_layer.run(share);
        // A token's experts are added in ascending order.
#pragma omp for schedule(static)
        for (int64_t t = 0; t < m.T; t++)
            add_shares(pairs.own.data() + pairs.firsts[t], m.k[t], pairs.weights.data(), outs, m.D,
                       static_cast<W *>(m.y) + t * m.D);
    }
    return done;
}

void linear(const Linear &l, DType dtype, int threads) {
    dtype == FLOAT32 ? linear_of<float>(l, threads) : linear_of<bfloat16>(l, threads);
}

int64_t experts(const Experts &m, DType dtype, int threads) {
    return dtype == FLOAT32 ? experts_of<float>(m, threads) : experts_of<bfloat16>(m, threads);
}

void norm(const Norm &n, DType dtype, int threads) {
    dtype == FLOAT32 ? norm_of<float>(n, threads) : norm_of<bfloat16>(n, threads);
}

void turn(const Turn &of, DType dtype, int threads) {
    dtype == FLOAT32 ? turn_of<float>(of, threads) : turn_of<bfloat16>(of, threads);
}

void attention(const Attention &a, DType dtype, int threads) {
    dtype == FLOAT32 ? attention_of<float>(a, threads) : attention_of<bfloat16>(a, threads);
}

void attend(const Attend &a, DType dtype, int threads) {
    dtype == FLOAT32 ? attend_of<float, PositionBlock<float>>(a, threads)
                     : attend_of<bfloat16, PositionBlock<bfloat16>>(a, threads);
}

void rank(const Rank &r, DType dtype, int threads) {
#pragma omp parallel for num_threads(r.T < 64 ? 1 : threads) schedule(static)
    for (int64_t t = 0; t < r.T; t++) dtype == FLOAT32 ? rank_token<float>(r, t) : rank_token<bfloat16>(r, t);
}

bool supported() { return SUPPORTED; }

}  // namespace

const Kernels KERNELS = {supported, linear, experts, norm, turn, attention, attend, rank};

}  // namespace minimoe
