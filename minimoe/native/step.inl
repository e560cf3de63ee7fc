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

template <class W>
void turn_of(const Turn &of, int threads) {
    const int64_t width = of.H * of.d;
    threads = worth(of.T * width * sizeof(W), threads);
#pragma omp parallel num_threads(threads)
    {
        std::vector<W> room(width);
#pragma omp for schedule(static)
        for (int64_t t = 0; t < of.T; t++) {
            const W *const x = static_cast<const W *>(of.x) + t * width;
            W *const y = static_cast<W *>(of.y) + t * width;
            turned(x, norm_scale(x, width, of.eps), static_cast<const W *>(of.w), of.clip,
                   static_cast<const W *>(of.cos) + t * of.d, static_cast<const W *>(of.sin) + t * of.d, of.H, of.d,
                   room.data(), [&](int64_t h) { return y + h * of.d; });
        }
    }
}

constexpr int64_t AHEAD = 4096;  // bytes between what is read of keys and values and what is asked for

// The keys or the values of one head: rows of d places that are read in order, and those that are read after them.
template <class W>
struct Cached {
    const W *rows;
    int64_t positions, d;
    const W *next;  // or null

    // Asks for the row that comes AHEAD after row s; where `next` has fewer rows, for what lies after them.
    void ask(int64_t s) const {
        const int64_t later = s + AHEAD / (d * int64_t(sizeof(W))) + 1 - positions;
        const W *const row = later < 0 ? rows + (positions + later) * d : next ? next + later * d : nullptr;
        if (row)
            for (int64_t i = 0; i < d; i += 64 / sizeof(W)) __builtin_prefetch(row + i, 0, 2);
    }
};

// scores[r] = keys.rows[s + r] . query for R rows.
template <class W, int R>
inline void score(const Cached<W> &keys, int64_t s, const Packed<W> *query, float *scores) {
    const int64_t whole = keys.d / STEP * STEP;
    Floats sums[R][1] = {};
    for (int r = 0; r < R; r++) {
        keys.ask(s + r);
        const W *const row = keys.rows + (s + r) * keys.d;
        for (int64_t i = 0; i < whole; i += STEP) add_block<W, 1, 1>(row + i, 0, &query, i, sums[r]);
        if (whole == keys.d) continue;
        W rest[STEP] = {};
        std::copy_n(row + whole, keys.d - whole, rest);
        add_block<W, 1, 1>(rest, 0, &query, whole, sums[r]);
    }
    Floats summed[R];
    for (int r = 0; r < R; r++) summed[r] = sums[r][0];
    sum<R>(summed);
    std::memcpy(scores, summed, R * sizeof *scores);
}

// Scores to weights that sum to 1: the softmax of their products with `scale`. There is room for whole vectors.
inline void softmax(float *scores, int64_t n, float scale) {
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
        const Floats some = exponential((load<Floats>(scores + s) - highest) * scale);
        total += some;
        std::memcpy(scores + s, &some, sizeof some);
    }
    sum<1>(&total);
    const float share = 1 / total[0];
    for (int64_t s = 0; s < whole; s += WIDTH) {
        const Floats weight = load<Floats>(scores + s) * share;
        std::memcpy(scores + s, &weight, sizeof weight);
    }
}

// y[i] = sum over s of weights[s] * values.rows[s, i], in order, for the BLOCKS blocks of places from `from` on.
template <class W, int BLOCKS>
inline void mix(const float *weights, const Cached<W> &values, int64_t from, W *y) {
    Block sums[BLOCKS] = {};
    for (int64_t s = 0; s < values.positions; s++) {
        if (from == 0) values.ask(s);
        for (int b = 0; b < BLOCKS; b++) {
            const int64_t i = from + b * STEP;
            const Block value = block(values.rows + s * values.d + i, values.d - i);
            sums[b].firsts += weights[s] * value.firsts;
            sums[b].seconds += weights[s] * value.seconds;
        }
    }
    for (int b = 0; b < BLOCKS; b++) store(y + from + b * STEP, values.d - from - b * STEP, sums[b]);
}

template <class W>
void attention_of(const Attention &a, int threads) {
    const int64_t width = room(a.d), longest = *std::max_element(a.lengths, a.lengths + a.T) + 1;
    std::vector<W> queries(a.T * a.H * a.d);
    threads = worth(a.T * longest * 2 * a.G * a.d * sizeof(W), threads);
    const auto head_of = [&](void *const *caches, int64_t item) -> const W * {
        return item < a.T * a.H ? cached<W>(a, caches, item / a.H, item % a.H / (a.H / a.G)) : nullptr;
    };
    Shares heads(a.T * a.H, threads);
#pragma omp parallel num_threads(threads)
    {
        std::vector<W> own(std::max(a.H, a.G) * a.d);
        std::vector<float> scores(longest + WIDTH);
        std::vector<Packed<W>> query(width);
#pragma omp for schedule(static)
        for (int64_t t = 0; t < a.T; t++) {
            const float q_scale = norm_scale(static_cast<const W *>(a.q) + t * a.H * a.d, a.H * a.d, a.eps);
            const float k_scale = norm_scale(static_cast<const W *>(a.k) + t * a.G * a.d, a.G * a.d, a.eps);
            prepare(a, t, q_scale, k_scale, own.data(), &queries[t * a.H * a.d]);
        }
#pragma omp for schedule(static)
        for (int share = 0; share < threads; share++)
            for (int64_t item = heads.take(share); item >= 0; item = heads.take(share)) {
                const int64_t positions = a.lengths[item / a.H] + 1;
                const Cached<W> values{head_of(a.values, item), positions, a.d, head_of(a.keys, item + 1)};
                const Cached<W> keys{head_of(a.keys, item), positions, a.d, values.rows};
                pack(&queries[item * a.d], a.d, query.data());
                int64_t s = 0, i = 0;
                for (; s + 4 <= positions; s += 4) score<W, 4>(keys, s, query.data(), &scores[s]);
                for (; s < positions; s++) score<W, 1>(keys, s, query.data(), &scores[s]);
                softmax(scores.data(), positions, 1 / std::sqrt(float(a.d)));
                W *const y = static_cast<W *>(a.y) + item * a.d;
                for (; i + 4 * STEP <= a.d; i += 4 * STEP) mix<W, 4>(scores.data(), values, i, y);
                for (; i < a.d; i += STEP) mix<W, 1>(scores.data(), values, i, y);
            }
    }
}
