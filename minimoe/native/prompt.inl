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
constexpr int64_t MOST_BLOCKS = 8;            // of queries that go through the positions side by side

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

// sums[r, lane] = sum over units u of a[r * row + u * step] * b[u, lane], for R rows; with ADDED, to what is there.
template <class W, int R, bool ADDED>
inline void outer(const float *a, int64_t row, int64_t step, const float *b, int64_t units, float *sums) {
    Floats kept[R * VECTORS];
    each<R>([&](auto r) INLINED {
        each<VECTORS>([&](auto v) INLINED {
            kept[r * VECTORS + v] = ADDED ? load<Floats>(sums + r * QUERIES + v * WIDTH) : Floats{};
        });
    });
    for (int64_t u = 0; u < units; u++) {
        Floats lanes[VECTORS];
        each<VECTORS>([&](auto v) INLINED { lanes[v] = load<Floats>(b + u * QUERIES + v * WIDTH); });
        each<R>([&](auto r) INLINED {
            const Floats spread = (Floats)(Words{} + load<uint32_t>(a + r * row + u * step));  // as bits
            each<VECTORS>([&](auto v) INLINED {
                kept[r * VECTORS + v] = add_unit<W>(kept[r * VECTORS + v], spread, lanes[v]);
            });
        });
    }
    each<R * VECTORS>([&](auto i) INLINED { std::memcpy(sums + i * WIDTH, &kept[i], sizeof *kept); });
}

// The same for any number of rows.
template <class W, bool ADDED>
void outers(const float *a, int64_t rows, int64_t row, int64_t step, const float *b, int64_t units, float *sums) {
    constexpr int R = 2 * ROWS;
    int64_t r = 0;
    for (; r + R <= rows; r += R) outer<W, R, ADDED>(a + r * row, row, step, b, units, sums + r * QUERIES);
    for (; r + 4 <= rows; r += 4) outer<W, 4, ADDED>(a + r * row, row, step, b, units, sums + r * QUERIES);
    for (; r < rows; r++) outer<W, 1, ADDED>(a + r * row, row, step, b, units, sums + r * QUERIES);
}

// One block of positions of one head in units, for every block of queries that sees some of them.
template <class W>
class PositionBlock {
   public:
    explicit PositionBlock(int64_t d)
        : d_(d), units_((d + UNIT<W> - 1) / UNIT<W>), copies_(POSITIONS * units_), values_(POSITIONS / UNIT<W> * d) {}

    // `count` positions from `start` on, whose keys and values are `stride` numbers apart.
    void fill(const W *k, const W *v, int64_t count, int64_t stride, int64_t start) {
        this->start = start, this->count = count, groups = (count + UNIT<W> - 1) / UNIT<W>;
        // Keys as they lie, unless their units are of another kind.
        keys = reinterpret_cast<const float *>(k), row = stride / UNIT<W>;
        if (sizeof(W) != sizeof(Packed<W>) || d_ % UNIT<W> || stride % UNIT<W>) {
            for (int64_t s = 0; s < count; s++) units_along(k + s * stride, d_, &copies_[s * units_]);
            keys = copies_.data(), row = units_;
        }
        for (int64_t g = 0; g < groups; g++) {
            const int64_t s = g * UNIT<W>;
            units_across(v + s * stride, s + 1 < count ? v + (s + 1) * stride : nullptr, d_, &values_[g * d_]);
        }
        values = values_.data();
    }

    int64_t start = 0, count = 0, groups = 0;  // groups: of positions that make one unit
    const float *keys = nullptr;               // [count, unit], `row` from one to the next
    int64_t row = 0;
    const float *values = nullptr;             // [groups, place]

   private:
    int64_t d_, units_;
    std::vector<float> copies_, values_;
};

// One block of queries of one head, as it goes through the positions.
template <class W>
class QueryBlock {
   public:
    explicit QueryBlock(int64_t d)
        : d_(d), units_((d + UNIT<W> - 1) / UNIT<W>), row_(units_), queries_(units_ * QUERIES),
          scores_(POSITIONS * QUERIES), weights_(POSITIONS / UNIT<W> * QUERIES), sums_(d * QUERIES) {}

    // `count` queries, `stride` numbers apart, of positions from `position` on.
    void begin(const W *q, int64_t count, int64_t stride, int64_t position) {
        first_ = position, last_ = position + count - 1;
        for (int64_t n = 0; n < QUERIES; n++) {
            const int64_t own = std::min(n, count - 1);  // lanes without a query repeat the last
            units_along(q + own * stride, d_, row_.data());
            for (int64_t u = 0; u < units_; u++) queries_[u * QUERIES + n] = row_[u];
            position_[n] = float(position + own), most_[n] = -FLT_MAX, total_[n] = 0;
        }
        std::fill(sums_.begin(), sums_.end(), 0.0f);
    }

    void pass(const PositionBlock<W> &of) {
        if (of.start > last_) return;
        outers<W, false>(of.keys, of.count, of.row, 1, queries_.data(), units_, scores_.data());
        const bool hidden = of.start + of.count - 1 > first_;
        for (int v = 0; v < VECTORS; v++)
            hidden ? weigh<true>(v, of.count, of.start) : weigh<false>(v, of.count, of.start);
        outers<W, true>(of.values, d_, 1, d_, weights_.data(), of.groups, sums_.data());
    }

    // Each query's mix of values goes to y, `stride` numbers from one to the next.
    void end(W *y, int64_t stride) {
        for (int64_t i = 0; i < d_; i++)
            for (int v = 0; v < VECTORS; v++) {
                float *const place = &sums_[i * QUERIES + v * WIDTH];
                const Floats mixed = rounded<W>(load<Floats>(place) / load<Floats>(total_ + v * WIDTH));
                std::memcpy(place, &mixed, sizeof mixed);
            }
        for (int64_t n = 0; n <= last_ - first_; n++)
            for (int64_t i = 0; i < d_; i++) y[n * stride + i] = narrow<W>(sums_[i * QUERIES + n]);
    }

   private:
    // Scores to weights for one vector of queries; what was summed before is scaled to their new largest score. Some
    // positions may be hidden from some queries.
    template <bool HIDDEN>
    void weigh(int v, int64_t positions, int64_t start) {
        const float scale = 1 / std::sqrt(float(d_));
        float *const scores = &scores_[v * WIDTH];
        const Floats own = load<Floats>(position_ + v * WIDTH), before = load<Floats>(most_ + v * WIDTH);
        Floats most = before, total = load<Floats>(total_ + v * WIDTH);
        for (int64_t s = 0; s < positions; s++) {
            Floats score = load<Floats>(scores + s * QUERIES) * scale;
            if (HIDDEN) score = own < float(start + s) ? Floats{} - INFINITY : score;
            most = score > most ? score : most;
            std::memcpy(scores + s * QUERIES, &score, sizeof score);
        }
        const Floats shrink = decaying(before - most);
        total *= shrink;
        for (int64_t i = 0; i < d_; i++) {
            const Floats sum = load<Floats>(&sums_[i * QUERIES + v * WIDTH]) * shrink;
            std::memcpy(&sums_[i * QUERIES + v * WIDTH], &sum, sizeof sum);
        }
        for (int64_t s = 0; s < positions; s += UNIT<W>) {
            Floats unit = decaying(load<Floats>(scores + s * QUERIES) - most);
            total += unit;
            if constexpr (UNIT<W> == 2) {
                Floats second = {};
                if (s + 1 < positions) second = decaying(load<Floats>(scores + (s + 1) * QUERIES) - most);
                total += second;
                unit = (Floats)((Words)rounded<W>(unit) >> 16 | (Words)rounded<W>(second));
            }
            std::memcpy(&weights_[s / UNIT<W> * QUERIES + v * WIDTH], &unit, sizeof unit);
        }
        std::memcpy(most_ + v * WIDTH, &most, sizeof most);
        std::memcpy(total_ + v * WIDTH, &total, sizeof total);
    }

    int64_t d_, units_, first_ = 0, last_ = 0;  // positions of its first and last query
    std::vector<float> row_, queries_;           // in units: a query's, and [unit, lane]
    std::vector<float> scores_, weights_, sums_;  // [position, lane], in units [positions' unit, lane], [place, lane]
    float position_[QUERIES] = {}, most_[QUERIES] = {}, total_[QUERIES] = {};  // positions are whole up to 2^24
};

// Blocks of queries of one head, from query `first` on, that go through the positions side by side.
template <class W>
void attend_blocks(const Attend &a, int64_t h, int64_t first, std::vector<QueryBlock<W>> &blocks,
                   PositionBlock<W> &positions) {
    const int64_t count = std::min<int64_t>(QUERIES * blocks.size(), a.N - first), before = a.S - a.N + first;
    const int64_t g = h / (a.H / a.G), used = (count + QUERIES - 1) / QUERIES;
    const W *const q = static_cast<const W *>(a.q) + (first * a.H + h) * a.d;
    const W *const k = static_cast<const W *>(a.k) + g * a.head, *const v = static_cast<const W *>(a.v) + g * a.head;
    for (int64_t b = 0; b < used; b++)
        blocks[b].begin(q + b * QUERIES * a.H * a.d, std::min(QUERIES, count - b * QUERIES), a.H * a.d,
                        before + b * QUERIES);
    for (int64_t start = 0; start < before + count; start += POSITIONS) {
        positions.fill(k + start * a.position, v + start * a.position, std::min(POSITIONS, before + count - start),
                       a.position, start);
        for (int64_t b = 0; b < used; b++) blocks[b].pass(positions);
    }
    for (int64_t b = 0; b < used; b++)
        blocks[b].end(static_cast<W *>(a.y) + ((first + b * QUERIES) * a.H + h) * a.d, a.H * a.d);
}

template <class W>
void attend_of(const Attend &a, int threads) {
    threads = worth(a.N * a.S * a.H * a.d * sizeof(W), threads);
    // As many side by side as leave every thread some items.
    const int64_t side = std::clamp<int64_t>(a.N * a.H / (QUERIES * threads * 8), 1, MOST_BLOCKS);
    const int64_t many = QUERIES * side, items = (a.N + many - 1) / many;
#pragma omp parallel num_threads(threads)
    {
        std::vector<QueryBlock<W>> blocks(side, QueryBlock<W>(a.d));
        PositionBlock<W> positions(a.d);
        // The last queries see most: they come first, so that no thread ends with a large block alone.
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < items * a.H; item++)
            attend_blocks<W>(a, item % a.H, (items - 1 - item / a.H) * many, blocks, positions);
    }
}
