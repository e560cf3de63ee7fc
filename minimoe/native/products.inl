// Products with weights: a part of vector.inl.
//
// All are built of one thing: the dot products of a few rows with a few tokens, kept in registers. Each (row, token) has
// one accumulator and the sum always runs in the same order, so a token's result does not depend on how many tokens or
// rows are computed beside it, or by how many threads.
//
// A register of packed bfloat16 holds 2 * WIDTH numbers; shifted left by 16 bits it holds its even ones as floats, and
// with the lower halves masked away its odd ones. Activations are laid out to match: packed once into float32, in
// blocks of 2 * WIDTH with the even places first, and padded with zeros to whole blocks. With PAIRS neither is needed,
// and bfloat16 stays bfloat16; such an instruction takes numbers below 2^-126 for zero.

constexpr int64_t SPAN = 2048;       // places that are summed in registers
constexpr int TOKENS = 4;            // tokens that ROWS rows are multiplied with at a time
// With a roomy L1 cache it is more tokens and fewer rows, for every row comes from the L2 cache once for them all.
constexpr int WIDE_TOKENS = 6, WIDE_ROWS = ROWS * TOKENS / WIDE_TOKENS;
constexpr int64_t MANY = 16;  // tokens that are worth it
// Tokens that a row may have and still be read alone: every one has loads of its own, and floats twice as many.
template <class W>
constexpr int FEW = IN_PAIRS<W> ? 3 : 2;

// Room for a packed activation of n places. The last block keeps activations that lie one after the other from
// starting in the same set of the cache, which would otherwise happen at every power of two.
inline int64_t room(int64_t n) { return (n + STEP - 1) / STEP * STEP + STEP; }

template <class W>
void pack(const W *x, int64_t n, Packed<W> *packed) {
    for (int64_t i = 0; i < n; i += STEP) store(packed + i, STEP, block(x + i, n - i));
}

// sums[n * R + r] += w[r] . x[n] over one block, which starts at w[r] and at `place` of x[n], for R rows `stride` apart and
// N packed tokens.
template <class W, int R, int N>
INLINE void add_block(const W *w, int64_t stride, const Packed<W> *const *x, int64_t place, Floats (&sums)[R * N]) {
    Floats rows[R];
    if constexpr (IN_PAIRS<W>) {
        each<R>([&](auto r) INLINED { rows[r] = load<Floats>(w + r * stride); });
        each<N>([&](auto n) INLINED {
            const Floats token = load<Floats>(x[n] + place);
            each<R>([&](auto r) INLINED { sums[n * R + r] = add_pairs(sums[n * R + r], rows[r], token); });
        });
    } else {
        each<R>([&](auto r) INLINED { rows[r] = first(w + r * stride); });
        each<N>([&](auto n) INLINED {
            const Floats token = load<Floats>(x[n] + place);
            each<R>([&](auto r) INLINED { sums[n * R + r] = FUSED(rows[r], token, sums[n * R + r]); });
        });
        each<R>([&](auto r) INLINED { rows[r] = second(w + r * stride); });
        each<N>([&](auto n) INLINED {
            const Floats token = load<Floats>(x[n] + place + WIDTH);
            each<R>([&](auto r) INLINED { sums[n * R + r] = FUSED(rows[r], token, sums[n * R + r]); });
        });
    }
}

// Where the sums of a tile go: that of row r and token n to out[n * stride + r].
struct Sums {
    float *out;
    int64_t stride;
    Sums from_row(int64_t r) const { return {out + r, stride}; }
};

// sums[r, n] = w[r] . x[n] for R rows `stride` apart and N packed tokens, over n_places places from `from` on, added to
// what is there unless these are the first. Meanwhile ASKED rows from `next` on are asked for, into the L2 cache, in the
// order in which they lie: as large a part of them as of these.
template <class W, int R, int N, int ASKED>
inline void dots(const W *w, int64_t stride, const Packed<W> *const *x, int64_t from, int64_t n_places, const W *next,
                 Sums to) {
    constexpr int64_t LINE = 64 / sizeof(W);
    Floats sums[R * N];
    each<R * N>([&](auto i) INLINED { sums[i] = Floats{}; });
    const int64_t whole = n_places / STEP * STEP;
    // Twice as long a body: how fast a row streams hung by a tenth on where in a cache line the short one began.
#pragma GCC unroll 2
    for (int64_t i = from; i < from + whole; i += STEP) {
        for (int64_t ask = 0; ask < ASKED * STEP; ask += LINE) __builtin_prefetch(next + i * ASKED + ask, 0, 2);
        add_block<W, R, N>(w + i, stride, x, i, sums);
    }
    if (whole < n_places) {
        // The end of a row is copied, for nothing after it may be read.
        W rest[R][STEP] = {};
        for (int r = 0; r < R; r++)
            std::memcpy(rest[r], w + r * stride + from + whole, (n_places - whole) * sizeof(W));
        add_block<W, R, N>(rest[0], STEP, x, from + whole, sums);
    }
    sum<R * N>(sums);
    constexpr int SUMMED = (R * N + WIDTH - 1) / WIDTH;  // vectors
    float lanes[SUMMED * WIDTH];
    each<SUMMED>([&](auto i) INLINED { std::memcpy(lanes + i * WIDTH, &sums[i], sizeof *sums); });
    for (int n = 0; n < N; n++)
        for (int r = 0; r < R; r++) {
            float &out = to.out[n * to.stride + r];
            out = from ? out + lanes[n * R + r] : lanes[n * R + r];
        }
}

// The part of `tile` that covers the places from `from` on, for some of its rows. R rows at a time ask for ASKED rows.
template <class W, int R, int N, int ASKED>
void strip(const W *w, int64_t rows, int64_t columns, const Packed<W> *const *x, int64_t from, const W *next, Sums to) {
    const int64_t n = std::min(SPAN, columns - from);
    int64_t row = 0;
    for (; row + R <= rows; row += R, next += ASKED * columns)
        dots<W, R, N, ASKED>(w + row * columns, columns, x, from, n, next, to.from_row(row));
    for (; row < rows; row++)
        dots<W, 1, N, 0>(w + row * columns, columns, x, from, n, nullptr, to.from_row(row));
}

// sums[r, n] = w[r] . x[n] for all rows of w[rows, columns], which come from memory in their first pass; what lies from
// `next` on, if it is not null, is read after them.
template <class W, int R, int N>
void tile(const W *w, int64_t rows, int64_t columns, const Packed<W> *const *x, int64_t pass, const W *next, Sums to) {
    if (pass == 0) {
        constexpr int FRESH = N <= FEW<W> ? SINGLE : R;
        for (int64_t row = 0; row < rows; row += FRESH) {
            // Rows one after the other are one stream, which the processor foresees better than it can be told.
            const W *const after = FRESH == 1                 ? nullptr
                                   : row + 2 * FRESH <= rows ? w + (row + FRESH) * columns
                                                              : next;
            const auto some = after ? strip<W, FRESH, N, FRESH> : strip<W, FRESH, N, 0>;
            for (int64_t from = 0; from < columns; from += SPAN)
                some(w + row * columns, std::min<int64_t>(FRESH, rows - row), columns, x, from, after,
                     to.from_row(row));
        }
        return;
    }
    // Later the rows are in the L2 cache and the processor is the limit: time to ask for what comes next, a part a pass.
    const W *const part = next && pass <= R ? next + (pass - 1) * (rows / R) * columns : nullptr;
    const auto some = part ? strip<W, R, N, 1> : strip<W, R, N, 0>;
    for (int64_t from = 0; from < columns; from += SPAN) some(w, rows, columns, x, from, part, to);
}

// One matrix, the tokens that it is multiplied with, and where that goes.
template <class W>
struct Product {
    const W *w;                 // [rows, columns]
    int64_t rows, tokens;
    const Packed<W> *const *x;  // of each token
    W *y;                       // [tokens, rows]
};

// Some products of as many columns, shared among threads.
template <class W>
class Products {
   public:
    Products(std::vector<Product<W>> all, int64_t columns, int threads)
        : columns_(columns), rows_(rows(all, columns, threads)), chunks_(std::move(all), rows_, threads) {}

    // What is left of a share, and then of others; returns the multiply-adds.
    int64_t run(int share) {
        int64_t done = 0;
        std::vector<float> sums(rows_ * WIDE_TOKENS);
        const Sums to = {sums.data(), rows_};
        chunks_.run(share, [&](const auto &chunk, const auto &after) {
            const Product<W> &of = *chunk.of;
            const W *const w = of.w + chunk.row * columns_;
            const W *const next = after.of ? after.of->w + after.row * columns_ : nullptr;
            for (int64_t t = 0, tokens, pass = 0; t < of.tokens; t += tokens, pass++) {
                tokens = at_a_time(of.tokens, of.tokens - t);
                some(w, chunk.rows, of.x + t, tokens, pass, next, to);
                for (int64_t n = 0; n < tokens; n++) {
                    W *const y = of.y + (t + n) * of.rows + chunk.row;
                    for (int64_t r = 0; r < chunk.rows; r++) y[r] = narrow<W>(sums[n * rows_ + r]);
                }
            }
            done += of.tokens * chunk.rows * columns_;
        });
        return done;
    }

   private:
    // Of `left` tokens of a row that has `all`. Wide tiles are for rows that come from the L2 cache.
    static int64_t at_a_time(int64_t all, int64_t left) {
        if constexpr (IN_PAIRS<W>)
            if (all >= MANY && left >= WIDE_TOKENS && wide()) return WIDE_TOKENS;
        return std::min<int64_t>(left, TOKENS);
    }

    // Whether the tokens and rows of a wide tile lie in the L1 cache together.
    static bool wide() {
        static const bool fits = l1_bytes() >= (WIDE_TOKENS + WIDE_ROWS) * SPAN * int64_t(sizeof(Packed<W>));
        return fits;
    }

    void some(const W *w, int64_t rows, const Packed<W> *const *x, int64_t tokens, int64_t pass, const W *next,
              Sums to) const {
        switch (tokens) {
            case 1: return tile<W, 4, 1>(w, rows, columns_, x, pass, next, to);
            case 2: return tile<W, 4, 2>(w, rows, columns_, x, pass, next, to);
            case 3: return tile<W, ROWS, 3>(w, rows, columns_, x, pass, next, to);
            case 4: return tile<W, ROWS, 4>(w, rows, columns_, x, pass, next, to);
            default:
                if constexpr (IN_PAIRS<W>) tile<W, WIDE_ROWS, WIDE_TOKENS>(w, rows, columns_, x, pass, next, to);
        }
    }

    // In a chunk. Rows that are passed once may come in small ones, so that threads end together.
    static int64_t rows(const std::vector<Product<W>> &all, int64_t columns, int threads) {
        int64_t rows = 0, most = 0;
        for (const Product<W> &of : all) rows += of.rows, most = std::max(most, of.tokens);
        return chunk_rows(rows, columns, sizeof(W), (most <= TOKENS ? 128 : 8) * threads);
    }

    int64_t columns_, rows_;
    Chunks<Product<W>> chunks_;
};
