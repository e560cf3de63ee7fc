// Attention of many tokens of one sequence to it: a part of vector.inl.
//
// A block of queries lies in the lanes of vectors and goes through the positions block by block. Each query keeps its
// largest score so far, the sum of its weights and the weighted sum of values (the online softmax of Milakov and
// Gimelshein, 2018). Blocks of positions start at multiples of POSITIONS whatever the pass, so a token's result does not
// depend on the tokens that are computed beside it, if all values are finite: a position that a query does not see has
// the weight zero. Weights are rounded to bfloat16 with PAIRS.
//
// Both products run in units of 32 bits: pairs of places with PAIRS, else floats.

constexpr int VECTORS = 2;                    // of queries in a block
constexpr int64_t QUERIES = VECTORS * WIDTH;  // in a block
constexpr int64_t POSITIONS = 64;             // in a block

// Places of an operand of dtype W in a unit.
template <class W>
constexpr int64_t UNIT = sizeof(float) / sizeof(Packed<W>);

template <class W>
inline Floats add_unit(Floats sum, Floats a, Floats b) {
    if constexpr (UNIT<W> == 2) return add_pairs(sum, a, b);
    return FUSED(a, b, sum);
}

// n places of a row in units; the last is filled up with zero.
template <class W>
inline void units_along(const W *row, int64_t n, float *units) {
    if constexpr (UNIT<W> == 2) {
        if (n % 2) units[n / 2] = 0;
        std::memcpy(units, row, n * sizeof *row);
    } else {
        for (int64_t i = 0; i < n; i++) units[i] = widen(row[i]);
    }
}

// n units across rows: one each, of the same place of a pair of rows, or of one row.
template <class W>
inline void units_across(const W *row, const W *other, int64_t n, float *units) {
    if constexpr (UNIT<W> == 2) {
        for (int64_t i = 0; i < n; i++) {
            const uint32_t pair = row[i].bits | uint32_t(other ? other[i].bits : 0) << 16;
            std::memcpy(units + i, &pair, sizeof pair);
        }
    } else {
        for (int64_t i = 0; i < n; i++) units[i] = widen(row[i]);
    }
}

// sums[r, lane] += sum over units u of a[r * row + u * step] * b[u, lane], for R rows.
template <class W, int R>
inline void outer(const float *a, int64_t row, int64_t step, const float *b, int64_t units, float *sums) {
    Floats kept[R][VECTORS];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++) kept[r][v] = load<Floats>(sums + r * QUERIES + v * WIDTH);
    for (int64_t u = 0; u < units; u++) {
        Floats lanes[VECTORS];
        for (int v = 0; v < VECTORS; v++) lanes[v] = load<Floats>(b + u * QUERIES + v * WIDTH);
        for (int r = 0; r < R; r++) {
            const Floats spread = (Floats)(Words{} + load<uint32_t>(a + r * row + u * step));  // as bits
            for (int v = 0; v < VECTORS; v++) kept[r][v] = add_unit<W>(kept[r][v], spread, lanes[v]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++) std::memcpy(sums + r * QUERIES + v * WIDTH, &kept[r][v], sizeof(Floats));
}

// The same for any number of rows.
template <class W>
void outers(const float *a, int64_t rows, int64_t row, int64_t step, const float *b, int64_t units, float *sums) {
    constexpr int R = 2 * ROWS;
    int64_t r = 0;
    for (; r + R <= rows; r += R) outer<W, R>(a + r * row, row, step, b, units, sums + r * QUERIES);
    for (; r + 4 <= rows; r += 4) outer<W, 4>(a + r * row, row, step, b, units, sums + r * QUERIES);
    for (; r < rows; r++) outer<W, 1>(a + r * row, row, step, b, units, sums + r * QUERIES);
}

// One block of queries of one head, as it goes through the positions.
template <class W>
class QueryBlock {
   public:
    explicit QueryBlock(int64_t d)
        : d_(d), units_((d + UNIT<W> - 1) / UNIT<W>), queries_(units_ * QUERIES), keys_(POSITIONS * units_),
          values_(POSITIONS / UNIT<W> * d), scores_(POSITIONS * QUERIES), weights_(POSITIONS / UNIT<W> * QUERIES),
          sums_(d * QUERIES) {}

    // `count` queries, `stride` numbers apart, of positions from `position` on.
    void begin(const W *q, int64_t count, int64_t stride, int64_t position) {
        for (int64_t n = 0; n < QUERIES; n++) {
            const int64_t own = std::min(n, count - 1);  // lanes without a query repeat the last
            units_along(q + own * stride, d_, keys_.data());
            for (int64_t u = 0; u < units_; u++) queries_[u * QUERIES + n] = keys_[u];
            position_[n / WIDTH][n % WIDTH] = float(position + own);
        }
        for (int v = 0; v < VECTORS; v++) most_[v] = Floats{} - FLT_MAX, total_[v] = Floats{};
        std::fill(sums_.begin(), sums_.end(), 0.0f);
    }

    // Goes through `positions` positions from `start` on, whose keys and values are `stride` numbers apart.
    void pass(const W *k, const W *v, int64_t positions, int64_t stride, int64_t start) {
        const int64_t groups = (positions + UNIT<W> - 1) / UNIT<W>;
        for (int64_t s = 0; s < positions; s++) units_along(k + s * stride, d_, &keys_[s * units_]);
        for (int64_t g = 0; g < groups; g++) {
            const int64_t s = g * UNIT<W>;
            units_across(v + s * stride, s + 1 < positions ? v + (s + 1) * stride : nullptr, d_, &values_[g * d_]);
        }
        std::fill(scores_.begin(), scores_.end(), 0.0f);
        outers<W>(keys_.data(), positions, units_, 1, queries_.data(), units_, scores_.data());
        for (int v = 0; v < VECTORS; v++) weigh(v, positions, start);
        outers<W>(values_.data(), d_, 1, d_, weights_.data(), groups, sums_.data());
    }

    // The n-th query's mix of values.
    void end(int64_t n, W *y) const {
        for (int64_t i = 0; i < d_; i++) y[i] = narrow<W>(sums_[i * QUERIES + n] / total_[n / WIDTH][n % WIDTH]);
    }

   private:
    // Scores to weights for one vector of queries; what was summed before is scaled to their new largest score.
    void weigh(int v, int64_t positions, int64_t start) {
        const float scale = 1 / std::sqrt(float(d_));
        float *const scores = &scores_[v * WIDTH];
        Floats most = most_[v];
        for (int64_t s = 0; s < positions; s++) {
            Floats score = load<Floats>(scores + s * QUERIES) * scale;
            score = position_[v] < float(start + s) ? Floats{} - INFINITY : score;
            most = score > most ? score : most;
            std::memcpy(scores + s * QUERIES, &score, sizeof score);
        }
        const Floats shrink = exponential(most_[v] - most);
        most_[v] = most;
        total_[v] *= shrink;
        for (int64_t i = 0; i < d_; i++) {
            const Floats sum = load<Floats>(&sums_[i * QUERIES + v * WIDTH]) * shrink;
            std::memcpy(&sums_[i * QUERIES + v * WIDTH], &sum, sizeof sum);
        }
        for (int64_t s = 0; s < positions; s += UNIT<W>) {
            Floats unit = exponential(load<Floats>(scores + s * QUERIES) - most);
            total_[v] += unit;
            if constexpr (UNIT<W> == 2) {
                Floats second = {};
                if (s + 1 < positions) second = exponential(load<Floats>(scores + (s + 1) * QUERIES) - most);
                total_[v] += second;
                unit = (Floats)((Words)rounded<W>(unit) >> 16 | (Words)rounded<W>(second));
            }
            std::memcpy(&weights_[s / UNIT<W> * QUERIES + v * WIDTH], &unit, sizeof unit);
        }
    }

    int64_t d_, units_;
    std::vector<float> queries_, keys_, values_;  // in units: [unit, lane], [position, unit], [positions' unit, place]
    std::vector<float> scores_, weights_, sums_;  // [position, lane], in units [positions' unit, lane], [place, lane]
    Floats position_[VECTORS], most_[VECTORS], total_[VECTORS];  // positions are whole up to 2^24
};

template <class W>
void attend_block(const Attend &a, int64_t h, int64_t first, QueryBlock<W> &block) {
    const int64_t count = std::min(QUERIES, a.N - first), before = a.S - a.N + first, g = h / (a.H / a.G);
    const W *const k = static_cast<const W *>(a.k) + g * a.head, *const v = static_cast<const W *>(a.v) + g * a.head;
    block.begin(static_cast<const W *>(a.q) + (first * a.H + h) * a.d, count, a.H * a.d, before);
    for (int64_t start = 0; start < before + count; start += POSITIONS)
        block.pass(k + start * a.position, v + start * a.position, std::min(POSITIONS, before + count - start),
                   a.position, start);
    for (int64_t n = 0; n < count; n++) block.end(n, static_cast<W *>(a.y) + ((first + n) * a.H + h) * a.d);
}

template <class W>
void attend_of(const Attend &a, int threads) {
    const int64_t blocks = (a.N + QUERIES - 1) / QUERIES;
    threads = worth(a.N * a.S * a.H * a.d * sizeof(W), threads);
#pragma omp parallel num_threads(threads)
    {
        QueryBlock<W> block(a.d);
        // The last queries see most: they come first, so that no thread ends with a large block alone.
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < blocks * a.H; item++)
            attend_block<W>(a, item % a.H, (blocks - 1 - item / a.H) * QUERIES, block);
    }
}
