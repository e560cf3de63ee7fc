// Norms, and the attention of a decode step: a part of vector.inl.

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

// Scores, TOKENS numbers apart, to `n` weights side by side that sum to 1: the softmax of their products with `scale`.
inline void softmax(float *scores, int64_t n, float scale) {
    for (int64_t s = 0; s < n; s++) scores[s] = scores[s * TOKENS] * scale;
    const int64_t whole = (n + WIDTH - 1) / WIDTH * WIDTH;
    std::fill(scores + n, scores + whole, -INFINITY);
    Floats most = load<Floats>(scores), total = {};
    for (int64_t s = WIDTH; s < whole; s += WIDTH) {
        const Floats some = load<Floats>(scores + s);
        most = some > most ? some : most;
    }
    float lanes[WIDTH];
    std::memcpy(lanes, &most, sizeof most);
    const float highest = *std::max_element(lanes, lanes + WIDTH);
    for (int64_t s = 0; s < whole; s += WIDTH) {
        const Floats some = exponential(load<Floats>(scores + s) - highest);
        total += some;
        std::memcpy(scores + s, &some, sizeof some);
    }
    sum<1>(&total);
    const float share = 1 / total[0];
    for (int64_t s = 0; s < n; s++) scores[s] *= share;
}

// sums += the sum over R positions of weights[s] * values[s, i], in order, for all blocks of places. As many places from
// `next` on, if it is not null, are asked for.
template <class W, int R>
inline void add_positions(const float *weights, const W *values, int64_t d, const W *next, float *sums) {
    for (int64_t i = 0; i < d; i += STEP) {
        Block sum = block(sums + i, STEP);
        for (int r = 0; r < R; r++) {
            if (next) __builtin_prefetch(next + r * d + i, 0, 2);
            const Block value = block(values + r * d + i, d - i);
            sum = {sum.firsts + weights[r] * value.firsts, sum.seconds + weights[r] * value.seconds};
        }
        store(sums + i, STEP, sum);
    }
}

// y[i] = sum over s of weights[s] * values[s, i] for i < d. Values are read from front to back, and as many places from
// `next` on, if it is not null, are asked for. `sums` has room for whole blocks of d places.
template <class W>
void mix(const float *weights, const W *values, int64_t positions, int64_t d, const W *next, float *sums, W *y) {
    std::fill_n(sums, room(d), 0.0f);
    const auto from = [&](int64_t s) { return next ? next + s * d : nullptr; };
    int64_t s = 0;
    for (; s + 4 <= positions; s += 4) add_positions<W, 4>(weights + s, values + s * d, d, from(s), sums);
    for (; s < positions; s++) add_positions<W, 1>(weights + s, values + s * d, d, from(s), sums);
    for (int64_t i = 0; i < d; i += STEP) store(y + i, d - i, block(sums + i, STEP));
}

// Keys and values come from memory, a head's after the other's: the values are asked for while its keys are multiplied,
// and the next head's keys while the values are mixed.
template <class W>
void attention_of(const Attention &a, int threads) {
    const int64_t width = room(a.d), longest = *std::max_element(a.lengths, a.lengths + a.T) + 1;
    std::vector<W> queries(a.T * a.H * a.d);
    threads = worth(a.T * longest * 2 * a.G * a.d * sizeof(W), threads);
    const auto head_of = [&](void *const *caches, int64_t item) -> const W * {
        return item < a.T * a.H ? cached<W>(a, caches, item / a.H, item % a.H / (a.H / a.G)) : nullptr;
    };
#pragma omp parallel num_threads(threads)
    {
        std::vector<W> own(std::max(a.H, a.G) * a.d);
        std::vector<float> scores((longest + WIDTH) * TOKENS), sums(width);
        std::vector<Packed<W>> query(width);
#pragma omp for schedule(static)
        for (int64_t t = 0; t < a.T; t++) {
            const float q_scale = norm_scale(static_cast<const W *>(a.q) + t * a.H * a.d, a.H * a.d, a.eps);
            const float k_scale = norm_scale(static_cast<const W *>(a.k) + t * a.G * a.d, a.G * a.d, a.eps);
            prepare(a, t, q_scale, k_scale, own.data(), &queries[t * a.H * a.d]);
        }
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < a.T * a.H; item++) {
            const int64_t positions = a.lengths[item / a.H] + 1;
            pack(&queries[item * a.d], a.d, query.data());
            const Packed<W> *const place = query.data();
            const W *const keys = head_of(a.keys, item), *const values = head_of(a.values, item);
            std::fill_n(scores.data(), positions * TOKENS, 0.0f);
            for (int64_t from = 0; from < a.d; from += SPAN)
                strip<W, 4, 1, 4>(keys, positions, a.d, &place, from, values, scores.data());
            softmax(scores.data(), positions, 1 / std::sqrt(float(a.d)));
            mix(scores.data(), values, positions, a.d, head_of(a.keys, item + threads), sums.data(),
                static_cast<W *>(a.y) + item * a.d);
        }
    }
}
