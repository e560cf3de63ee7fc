// A token's weighted sum of its experts.
namespace minimoe {
namespace {

// A token's sum and one more expert's share of it. In float32 a compiler may round once or twice, and not alike in the
// body and at the end of a loop: once, then, everywhere.
template <class W>
inline Floats with_share(Floats sum, Floats out, float weight) {
    if constexpr (sizeof(W) == sizeof(float)) return FUSED(out, Floats{} + weight, sum);
    return sum + rounded<W>(out * weight);
}

// y[i] = the sum over pairs, in order, of weights[p] * outs[p, i] for i < n.
template <class W>
void add_shares(const int64_t *pairs, int64_t count, const float *weights, const W *outs, int64_t n, W *y) {
    for (int64_t i = 0; i < n; i += STEP) {
        Block sums = {};
        for (int64_t j = 0; j < count; j++) {
            const Block out = block(outs + pairs[j] * n + i, n - i);
            const float weight = rounded<W>(weights[pairs[j]]);
            sums = {with_share<W>(sums.firsts, out.firsts, weight), with_share<W>(sums.seconds, out.seconds, weight)};
        }
        store(y + i, n - i, sums);
    }
}

}  // namespace
}  // namespace minimoe
