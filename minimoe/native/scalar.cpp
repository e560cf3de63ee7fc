// Every kernel as a plain loop: what the fast ones are compared with. It runs anywhere, and slowly.
#include <vector>

#include "bfloat16.h"
#include "kernels.h"

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
    const W *w = static_cast<const W *>(l.w);
    for (int64_t t = 0; t < l.T; t++)
        for (int64_t b = 0; b < l.B; b++)
            static_cast<W *>(l.y)[t * l.B + b] = narrow<W>(dot(w + b * l.A, &x[t * l.A], l.A));
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

void linear(const Linear &l, DType dtype, int) {
    dtype == FLOAT32 ? linear_of<float>(l) : linear_of<bfloat16>(l);
}

int64_t experts(const Experts &m, DType dtype, int) {
    return dtype == FLOAT32 ? experts_of<float>(m) : experts_of<bfloat16>(m);
}

bool supported() { return true; }

}  // namespace

const Kernels scalar_kernels = {supported, linear, experts};

}  // namespace minimoe
