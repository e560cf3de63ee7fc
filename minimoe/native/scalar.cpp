// Every kernel as a plain loop: what the fast ones are compared with. It runs anywhere, and slowly.
#include <vector>

#include "attention.h"
#include "bfloat16.h"
#include "kernels.h"
#include "rank.h"

namespace minimoe {
namespace {

template <class W>
float dot(const W *w, const float *x, int64_t n) {
    float sum = 0;
    for (int64_t i = 0; i < n; i++) sum += widen(w[i]) * x[i];
    return sum;
}

template <class W>
std::vector<float> widened(const void *x, int64_t n) {
    std::vector<float> wide(n);
    for (int64_t i = 0; i < n; i++) wide[i] = widen(static_cast<const W *>(x)[i]);
    return wide;
}

template <class W>
void linear_of(const Linear &l) {
    const std::vector<float> x = widened<W>(l.x, l.T * l.A);
    for (int64_t i = 0; i < l.n; i++)
        for (int64_t t = 0; t < l.T; t++)
            for (int64_t b = 0; b < l.B[i]; b++)
                static_cast<W *>(l.y[i])[t * l.B[i] + b] =
                    narrow<W>(dot(static_cast<const W *>(l.w[i]) + b * l.A, x.data() + t * l.A, l.A));
}

template <class W>
int64_t experts_of(const Experts &m) {
    int64_t done = 0;
    const std::vector<float> x = widened<W>(m.x, m.T * m.D);
    std::vector<float> h(m.I), y(m.D);
    for (int64_t t = 0; t < m.T; t++) {
        y.assign(m.D, 0);
        for (int64_t j = 0; j < m.k[t]; j++) {
            const int64_t e = m.experts[t * m.K + j];
            const W *gate = static_cast<const W *>(m.gate[e]), *up = static_cast<const W *>(m.up[e]);
            const W *down = static_cast<const W *>(m.down[e]);
            const float weight = rounded<W>(m.weights[t * m.K + j]);
            for (int64_t i = 0; i < m.I; i++)
                h[i] = gated<W>(dot(gate + i * m.D, &x[t * m.D], m.D), dot(up + i * m.D, &x[t * m.D], m.D));
            for (int64_t d = 0; d < m.D; d++)
                y[d] += rounded<W>(rounded<W>(dot(down + d * m.I, h.data(), m.I)) * weight);
            done += 2 * m.I * m.D + m.D * m.I;
        }
        for (int64_t d = 0; d < m.D; d++) static_cast<W *>(m.y)[t * m.D + d] = narrow<W>(y[d]);
    }
    return done;
}

template <class W>
float norm_scale(const W *x, int64_t n, float eps) {
    const std::vector<float> wide = widened<W>(x, n);
    return 1 / std::sqrt(dot(wide.data(), wide.data(), n) / n + eps);
}

template <class W>
void norm_of(const Norm &n) {
    for (int64_t t = 0; t < n.T; t++) {
        const W *x = static_cast<const W *>(n.x) + t * n.D;
        scaled(x, norm_scale(x, n.D, n.eps), static_cast<const W *>(n.w), n.D, static_cast<W *>(n.y) + t * n.D);
    }
}

template <class W>
void turn_of(const Turn &of) {
    const int64_t width = of.H * of.d;
    std::vector<W> room(width);
    for (int64_t t = 0; t < of.T; t++) {
        const W *const x = static_cast<const W *>(of.x) + t * width;
        W *const y = static_cast<W *>(of.y) + t * width;
        turned(x, norm_scale(x, width, of.eps), static_cast<const W *>(of.w), of.clip,
               static_cast<const W *>(of.cos) + t * of.d, static_cast<const W *>(of.sin) + t * of.d, of.H, of.d,
               room.data(), [&](int64_t h) { return y + h * of.d; });
    }
}

template <class W>
void attention_of(const Attention &a) {
    std::vector<W> room(std::max(a.H, a.G) * a.d), query(a.H * a.d);
    for (int64_t t = 0; t < a.T; t++) {
        const float q_scale = norm_scale(static_cast<const W *>(a.q) + t * a.H * a.d, a.H * a.d, a.eps);
        const float k_scale = norm_scale(static_cast<const W *>(a.k) + t * a.G * a.d, a.G * a.d, a.eps);
        prepare(a, t, q_scale, k_scale, room.data(), query.data());
        const int64_t positions = a.lengths[t] + 1;
        std::vector<float> scores(positions);
        for (int64_t h = 0; h < a.H; h++) {
            const int64_t g = h / (a.H / a.G);
            const W *keys = cached<W>(a, a.keys, t, g), *values = cached<W>(a, a.values, t, g);
            const std::vector<float> wide = widened<W>(&query[h * a.d], a.d);
            for (int64_t s = 0; s < positions; s++)
                scores[s] = dot(keys + s * a.d, wide.data(), a.d) / std::sqrt(float(a.d));
            softmax(scores.data(), positions);
            for (int64_t i = 0; i < a.d; i++) {
                float sum = 0;
                for (int64_t s = 0; s < positions; s++) sum += scores[s] * widen(values[s * a.d + i]);
                static_cast<W *>(a.y)[(t * a.H + h) * a.d + i] = narrow<W>(sum);
            }
        }
    }
}

template <class W>
void attend_of(const Attend &a) {
    for (int64_t n = 0; n < a.N; n++)
        for (int64_t h = 0; h < a.H; h++) {
            const W *keys = static_cast<const W *>(a.k) + h / (a.H / a.G) * a.head;
            const W *values = static_cast<const W *>(a.v) + h / (a.H / a.G) * a.head;
            const std::vector<float> query = widened<W>(static_cast<const W *>(a.q) + (n * a.H + h) * a.d, a.d);
            std::vector<float> scores(a.S - a.N + n + 1);
            for (size_t s = 0; s < scores.size(); s++)
                scores[s] = dot(keys + s * a.position, query.data(), a.d) / std::sqrt(float(a.d));
            softmax(scores.data(), scores.size());
            for (int64_t i = 0; i < a.d; i++) {
                float sum = 0;
                for (size_t s = 0; s < scores.size(); s++) sum += scores[s] * widen(values[s * a.position + i]);
                static_cast<W *>(a.y)[(n * a.H + h) * a.d + i] = narrow<W>(sum);
            }
        }
}

void linear(const Linear &l, DType dtype, int) {
    dtype == FLOAT32 ? linear_of<float>(l) : linear_of<bfloat16>(l);
}

int64_t experts(const Experts &m, DType dtype, int) {
    return dtype == FLOAT32 ? experts_of<float>(m) : experts_of<bfloat16>(m);
}

void norm(const Norm &n, DType dtype, int) { dtype == FLOAT32 ? norm_of<float>(n) : norm_of<bfloat16>(n); }

void turn(const Turn &of, DType dtype, int) { dtype == FLOAT32 ? turn_of<float>(of) : turn_of<bfloat16>(of); }

void attention(const Attention &a, DType dtype, int) {
    dtype == FLOAT32 ? attention_of<float>(a) : attention_of<bfloat16>(a);
}

void attend(const Attend &a, DType dtype, int) {
    dtype == FLOAT32 ? attend_of<float>(a) : attend_of<bfloat16>(a);
}

void rank(const Rank &r, DType dtype, int) {
    for (int64_t t = 0; t < r.T; t++) dtype == FLOAT32 ? rank_token<float>(r, t) : rank_token<bfloat16>(r, t);
}

bool supported() { return true; }

}  // namespace

const Kernels scalar_kernels = {supported, linear, experts, norm, turn, attention, attend, rank};

}  // namespace minimoe
