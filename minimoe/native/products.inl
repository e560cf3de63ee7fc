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

// What a packed activation of dtype W is made of.
#if defined(PAIRS)
template <class W>
using Packed = W;
inline Floats add_pairs(Floats sums, Floats a, Floats b) { return PAIRS(sums, a, b); }
#else
template <class W>
using Packed = float;
inline Floats add_pairs(Floats sums, Floats, Floats) { return sums; }  // never called
#endif

template <class W>
constexpr bool IN_PAIRS = sizeof(Packed<W>) == sizeof(bfloat16);

constexpr int64_t STEP = 2 * WIDTH;  // places in a block
constexpr int64_t SPAN = 2048;       // places that are summed in registers
constexpr int TOKENS = 4;            // tokens that ROWS rows are multiplied with at a time
// With a roomy L1 cache it is more tokens and fewer rows, for every row comes from the L2 cache once for them all.
constexpr int WIDE_TOKENS = 6, WIDE_ROWS = ROWS * TOKENS / WIDE_TOKENS;
constexpr int64_t MANY = 16;  // tokens that are worth it
// Tokens that a row may have and still be read alone: every one has loads of its own, and floats twice as many.
template <class W>
constexpr int FEW = IN_PAIRS<W> ? 3 : 2;

inline Floats even(Words packed) { return (Floats)(packed << 16); }
inline Floats odd(Words packed) { return (Floats)(packed & 0xffff0000u); }

// The two vectors of a block: for bfloat16 its even and its odd places, for float32 its halves.
inline Floats first(const bfloat16 *w) { return even(load<Words>(w)); }
inline Floats second(const bfloat16 *w) { return odd(load<Words>(w)); }
inline Floats first(const float *w) { return load<Floats>(w); }
inline Floats second(const float *w) { return load<Floats>(w + WIDTH); }

// A block as floats.
struct Block {
    Floats firsts, seconds;
};

// The block at x, of which `left` places are there; zeros stand for the others.
template <class W>
inline Block block(const W *x, int64_t left) {
    if (left >= STEP) return {first(x), second(x)};
    W rest[STEP] = {};
    std::copy_n(x, left, rest);
    return {first(rest), second(rest)};
}

// Rounded to the dtype of y, which has `left` places.
inline void store(float *y, int64_t left, Block block) {
    std::memcpy(y, &block, std::min<int64_t>(left, STEP) * sizeof *y);
}
inline void store(bfloat16 *y, int64_t left, Block block) {
    const Words words = (Words)rounded<bfloat16>(block.firsts) >> 16 | (Words)rounded<bfloat16>(block.seconds);
    std::memcpy(y, &words, std::min<int64_t>(left, STEP) * sizeof *y);
}

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

// Some products of as many columns, shared among threads in chunks of rows. A thread goes through what is its share in
// the order of memory, for only a long stream is read at full speed.
template <class W>
class Products {
   public:
    Products(std::vector<Product<W>> all, int64_t columns, int threads)
        : all_(std::move(all)), columns_(columns), chunk_(chunk(threads)), firsts_(all_.size() + 1),
          shares_(number(), threads) {}

    // What is left of a share, and then of others; returns the multiply-adds.
    int64_t run(int share) {
        int64_t done = 0;
        std::vector<float> sums(chunk_ * WIDE_TOKENS);
        const Sums to = {sums.data(), chunk_};
        for (int64_t item = shares_.take(share); item >= 0; item = shares_.take(share)) {
            const auto [of, row] = place(item);
            const int64_t rows = std::min(chunk_, of.rows - row);
            const W *const w = of.w + row * columns_, *const next = after(item + 1);
            for (int64_t t = 0, tokens, pass = 0; t < of.tokens; t += tokens, pass++) {
                tokens = at_a_time(of.tokens, of.tokens - t);
                some(w, rows, of.x + t, tokens, pass, next, to);
                for (int64_t n = 0; n < tokens; n++) {
                    W *const y = of.y + (t + n) * of.rows + row;
                    for (int64_t r = 0; r < rows; r++) y[r] = narrow<W>(sums[n * chunk_ + r]);
                }
            }
            done += of.tokens * rows * columns_;
        }
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

    // Rows that are passed once may come in small chunks, so that threads end together.
    int64_t chunk(int threads) const {
        int64_t rows = 0, most = 0;
        for (const Product<W> &of : all_) rows += of.rows, most = std::max(most, of.tokens);
        return chunk_rows(rows, columns_, sizeof(W), (most <= TOKENS ? 128 : 8) * threads);
    }

    // Of all chunks. The i-th product has those from firsts_[i] on, which this fills in.
    int64_t number() {
        for (size_t i = 0; i < all_.size(); i++) firsts_[i + 1] = firsts_[i] + (all_[i].rows + chunk_ - 1) / chunk_;
        return firsts_.back();
    }

    std::pair<const Product<W> &, int64_t> place(int64_t item) const {
        const int64_t i = std::upper_bound(firsts_.begin(), firsts_.end(), item) - firsts_.begin() - 1;
        return {all_[i], (item - firsts_[i]) * chunk_};
    }

    const W *after(int64_t item) const {
        if (item >= firsts_.back()) return nullptr;
        const auto [of, row] = place(item);
        return of.w + row * columns_;
    }

    std::vector<Product<W>> all_;
    int64_t columns_, chunk_;
    std::vector<int64_t> firsts_;
    Shares shares_;
};
