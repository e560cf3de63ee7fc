// Attention of many tokens of one sequence to it: a part of vector.inl and amx.cpp.
//
// A block of queries lies in the lanes of vectors and goes through the positions block by block. Each query keeps its
// largest score so far, the sum of its weights and the weighted sum of values (the online softmax of Milakov and
// Gimelshein, 2018). Blocks of positions start at multiples of their size whatever the pass, so a token's result does
// not depend on the tokens that are computed beside it, if all values are finite: a position that a query does not see
// has the weight zero. Weights are rounded to bfloat16 with PAIRS.
//
// Both products run in units of 32 bits: pairs of places with PAIRS, else floats. A class of position blocks computes
// them, and decides how its operands lie: PositionBlock does it by vectors, amx.cpp by tiles.

constexpr int VECTORS = 2;                    // of queries in a block
constexpr int64_t QUERIES = VECTORS * WIDTH;  // in a block
constexpr int64_t MOST_BLOCKS = 8;            // of queries that go through the positions side by side

// Places of an operand of dtype W in a unit.
template <class W>
constexpr int64_t UNIT = sizeof(float) / sizeof(Packed<W>);

// One block of queries of one head, as it goes through the positions.
template <class W, class Positions>
class QueryBlock {
   public:
    explicit QueryBlock(int64_t d)
        : d_(d), queries_(Positions::units(d) * QUERIES), scores_(Positions::POSITIONS * QUERIES),
          weights_(Positions::POSITIONS / UNIT<W> * QUERIES), sums_(Positions::places(d) * QUERIES) {}

    // `count` queries, `stride` numbers apart, of positions from `position` on.
    void begin(const W *q, int64_t count, int64_t stride, int64_t position) {
        first_ = position, last_ = position + count - 1;
        const W *rows[QUERIES];
        for (int64_t n = 0; n < QUERIES; n++) {
            const int64_t own = std::min(n, count - 1);  // lanes without a query repeat the last
            rows[n] = q + own * stride;
            position_[n] = float(position + own), most_[n] = -FLT_MAX, total_[n] = 0;
        }
        Positions::pack(rows, d_, queries_.data());
        std::fill_n(sums_.data(), d_ * QUERIES, 0.0f);
    }

    void pass(const Positions &of) {
        if (of.start > last_) return;
        of.scores(queries_.data(), scores_.data());
        const bool hidden = of.start + of.count - 1 > first_;
        for (int v = 0; v < VECTORS; v++)
            hidden ? weigh<true>(v, of.count, of.start) : weigh<false>(v, of.count, of.start);
        of.mix(weights_.data(), sums_.data());
    }

    // Each query's mix of values goes to y, `stride` numbers from one to the next.
    void end(W *y, int64_t stride) {
        for (int64_t i = 0; i < d_; i++)
            for (int v = 0; v < VECTORS; v++) {
                float *const place = &sums_[i * QUERIES + v * WIDTH];
                const Floats mixed = load<Floats>(place) / load<Floats>(total_ + v * WIDTH);
                std::memcpy(place, &mixed, sizeof mixed);
            }
        Positions::put(sums_.data(), d_, last_ - first_ + 1, y, stride);
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
        // Those beyond the last that `mix` reads: zeros, for what was there may have been a NaN.
        for (int64_t u = (positions + UNIT<W> - 1) / UNIT<W>; u < Positions::mixed(positions) / UNIT<W>; u++)
            std::fill_n(&weights_[u * QUERIES + v * WIDTH], WIDTH, 0.0f);
        std::memcpy(most_ + v * WIDTH, &most, sizeof most);
        std::memcpy(total_ + v * WIDTH, &total, sizeof total);
    }

    int64_t d_, first_ = 0, last_ = 0;  // positions of its first and last query
    Room<float> queries_;                 // packed
    Room<float> scores_, weights_, sums_;  // [position, lane], in units [positions' unit, lane], [place, lane]
    float position_[QUERIES] = {}, most_[QUERIES] = {}, total_[QUERIES] = {};  // positions are whole up to 2^24
};

// Blocks of queries of one head, from query `first` on, that go through the positions side by side.
template <class W, class Positions>
void attend_blocks(const Attend &a, int64_t h, int64_t first, std::vector<QueryBlock<W, Positions>> &blocks,
                   Positions &positions) {
    constexpr int64_t POSITIONS = Positions::POSITIONS;
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

template <class W, class Positions>
void attend_of(const Attend &a, int threads) {
    threads = worth(a.N * a.S * a.H * a.d * sizeof(W), threads);
    // As many side by side as leave every thread some items.
    const int64_t side = std::clamp<int64_t>(a.N * a.H / (QUERIES * threads * 8), 1, MOST_BLOCKS);
    const int64_t many = QUERIES * side, items = (a.N + many - 1) / many;
#pragma omp parallel num_threads(threads)
    {
        std::vector<QueryBlock<W, Positions>> blocks;
        for (int64_t b = 0; b < side; b++) blocks.emplace_back(a.d);
        Positions positions(a.d);
        // The last queries see most: they come first, so that no thread ends with a large block alone.
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < items * a.H; item++)
            attend_blocks<W, Positions>(a, item % a.H, (items - 1 - item / a.H) * many, blocks, positions);
    }
}
