// A block of positions of a prompt (see prompt.inl) by tiles: a part of amx.cpp.

// Rows of keys are tiles as they lie. Values are transposed, so that positions lie along rows.
class TiledPositions {
   public:
    static constexpr int64_t POSITIONS = 128;
    static int64_t units(int64_t d) { return (d + PLACES - 1) / PLACES * TOKENS; }
    static int64_t places(int64_t d) { return (d + 2 * ROWS - 1) / (2 * ROWS) * 2 * ROWS; }
    static int64_t mixed(int64_t positions) { return (positions + PLACES - 1) / PLACES * PLACES; }

    explicit TiledPositions(int64_t d)
        : d_(d), copies_(POSITIONS * 2 * units(d)), values_(places(d) * POSITIONS) {
        std::fill_n(values_.data(), places(d) * POSITIONS, bfloat16{});
    }

    void fill(const bfloat16 *k, const bfloat16 *v, int64_t count, int64_t stride, int64_t start) {
        this->start = start, this->count = count;
        keys_ = k, row_ = stride;
        if (count % ROWS || d_ % PLACES) {
            keys_ = copies_.data(), row_ = 2 * units(d_);
            for (int64_t s = 0; s < count; s++) {
                std::memcpy(&copies_[s * row_], k + s * stride, d_ * sizeof *k);
                std::fill(&copies_[s * row_ + d_], &copies_[(s + 1) * row_], bfloat16{});
            }
        }
        // Tiles of 16 places by 32 positions. What is beyond the last position is zero.
        for (int64_t s = 0; s < count; s += PLACES)
            for (int64_t i = 0; i < d_; i += ROWS) {
                __m512i units[16];
                for (int64_t u = 0; u < 16; u++)
                    units[u] = _mm512_or_si512(
                        some(v + (s + 2 * u) * stride + i, s + 2 * u < count, d_ - i),
                        _mm512_slli_epi32(some(v + (s + 2 * u + 1) * stride + i, s + 2 * u + 1 < count, d_ - i), 16));
                transpose(units);
                for (int64_t r = 0; r < ROWS; r++) _mm512_store_si512(&values_[(i + r) * POSITIONS + s], units[r]);
            }
    }

    static void pack(const bfloat16 *const *rows, int64_t d, float *queries) {
        for (int64_t n = 0; n < QUERIES; n += TOKENS)
            minimoe::pack(rows + n, TOKENS, d, reinterpret_cast<bfloat16 *>(queries + n * units(d)));
    }

    void scores(const float *queries, float *scores) const {
        written();
        for (int64_t s = 0; s < count; s += 2 * ROWS) {
            const bfloat16 *const above = keys_ + s * row_, *const below = s + ROWS < count ? above + ROWS * row_ : above;
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int64_t u = 0; u < units(d_); u += TOKENS)
                add(above + 2 * u, below + 2 * u, row_ * sizeof *above, queries + u * TOKENS,
                    queries + (units(d_) + u) * TOKENS, TOKENS * sizeof *queries);
            put(scores + s * QUERIES);
        }
    }

    void mix(const float *weights, float *sums) const {
        written();
        for (int64_t i = 0; i < d_; i += 2 * ROWS) {
            const bfloat16 *const above = &values_[i * POSITIONS], *const below = above + ROWS * POSITIONS;
            float *const to = sums + i * QUERIES;
            _tile_loadd(0, to, QUERIES * sizeof *to);
            _tile_loadd(1, to + ROWS * QUERIES, QUERIES * sizeof *to);
            _tile_loadd(2, to + TOKENS, QUERIES * sizeof *to);
            _tile_loadd(3, to + ROWS * QUERIES + TOKENS, QUERIES * sizeof *to);
            for (int64_t s = 0; s < count; s += PLACES)
                add(above + s, below + s, POSITIONS * sizeof *above, weights + s / 2 * QUERIES,
                    weights + s / 2 * QUERIES + TOKENS, QUERIES * sizeof *weights);
            put(to);
        }
    }

    static void put(const float *sums, int64_t d, int64_t queries, bfloat16 *y, int64_t stride) {
        for (int64_t i = 0; i < d; i += 2 * ROWS)
            scatter<false>(sums + i * QUERIES, QUERIES, std::min(2 * ROWS, d - i), queries, y + i, stride);
    }

    int64_t start = 0, count = 0;

   private:
    // 16 places of a row, of which `left` are there, each in the lower half of 32 bits.
    static __m512i some(const bfloat16 *row, bool there, int64_t left) {
        if (!there) return _mm512_setzero_si512();
        __m256i places = {};
        if (left >= ROWS)
            places = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(row));
        else
            std::memcpy(&places, row, left * sizeof *row);
        return _mm512_cvtepu16_epi32(places);
    }

    // Two tiles of rows by two of queries.
    static void add(const bfloat16 *above, const bfloat16 *below, int64_t stride, const float *left, const float *right,
                    int64_t step) {
        _tile_loadd(6, left, step);
        _tile_loadd(4, above, stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, right, step);
        _tile_dpbf16ps(2, 4, 7);
        _tile_loadd(5, below, stride);
        _tile_dpbf16ps(1, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }

    static void put(float *to) {
        _tile_stored(0, to, QUERIES * sizeof *to);
        _tile_stored(1, to + ROWS * QUERIES, QUERIES * sizeof *to);
        _tile_stored(2, to + TOKENS, QUERIES * sizeof *to);
        _tile_stored(3, to + ROWS * QUERIES + TOKENS, QUERIES * sizeof *to);
    }

    const Tiles configured_;
    int64_t d_, row_ = 0;
    const bfloat16 *keys_ = nullptr;
    Room<bfloat16> copies_, values_;
};
