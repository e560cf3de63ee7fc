// A block of positions of a prompt by vectors (see prompt.inl): a part of vector.inl.

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

// One block of positions of one head, for every block of queries that sees some of them.
template <class W>
class PositionBlock {
   public:
    static constexpr int64_t POSITIONS = 64;  // in a block
    // Units of a query, and places of a sum, that a block of queries has room for.
    static int64_t units(int64_t d) { return (d + UNIT<W> - 1) / UNIT<W>; }
    static int64_t places(int64_t d) { return d; }
    // Positions whose weights are read where there are so many.
    static int64_t mixed(int64_t positions) { return positions; }

    explicit PositionBlock(int64_t d) : d_(d), copies_(POSITIONS * units(d)), values_(POSITIONS / UNIT<W> * d) {}

    // `count` positions from `start` on, whose keys and values are `stride` numbers apart.
    void fill(const W *k, const W *v, int64_t count, int64_t stride, int64_t start) {
        this->start = start, this->count = count, groups_ = (count + UNIT<W> - 1) / UNIT<W>;
        // Keys as they lie, unless their units are of another kind.
        keys_ = reinterpret_cast<const float *>(k), row_ = stride / UNIT<W>;
        const bool apart = reinterpret_cast<uintptr_t>(k) % sizeof(float) || stride % UNIT<W> || d_ % UNIT<W>;
        if (sizeof(W) != sizeof(Packed<W>) || apart) {
            keys_ = copies_.data(), row_ = units(d_);
            for (int64_t s = 0; s < count; s++) units_along(k + s * stride, d_, &copies_[s * row_]);
        }
        for (int64_t g = 0; g < groups_; g++) {
            const int64_t s = g * UNIT<W>;
            units_across(v + s * stride, s + 1 < count ? v + (s + 1) * stride : nullptr, d_, &values_[g * d_]);
        }
    }

    // Queries as `scores` takes them: QUERIES rows of d places.
    static void pack(const W *const *rows, int64_t d, float *queries) {
        std::vector<float> row(units(d));
        for (int64_t n = 0; n < QUERIES; n++) {
            units_along(rows[n], d, row.data());
            for (int64_t u = 0; u < units(d); u++) queries[u * QUERIES + n] = row[u];
        }
    }

    // scores[s, lane] = key s . query.
    void scores(const float *queries, float *scores) const {
        outers<W, false>(keys_, count, row_, 1, queries, units(d_), scores);
    }

    // sums[i, lane] += the sum over positions of weights * place i of their values; weights in units of positions.
    void mix(const float *weights, float *sums) const {
        outers<W, true>(values_.data(), d_, 1, d_, weights, groups_, sums);
    }

    // y[n * stride + i] = sums[i, n], rounded, for n < `queries`.
    static void put(const float *sums, int64_t d, int64_t queries, W *y, int64_t stride) {
        for (int64_t n = 0; n < queries; n++)
            for (int64_t i = 0; i < d; i++) y[n * stride + i] = narrow<W>(sums[i * QUERIES + n]);
    }

    int64_t start = 0, count = 0;

   private:
    int64_t d_, row_ = 0, groups_ = 0;  // from one key to the next; units of positions
    const float *keys_ = nullptr;       // [count, unit]
    std::vector<float> copies_, values_;  // values: [group, place]
};
