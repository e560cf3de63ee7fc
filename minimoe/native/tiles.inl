// Products of bfloat16 by matrix tiles: a part of amx.cpp.
//
// A tile is 16 rows of 64 bytes. 16 rows of a weight, 32 places wide, are one as they lie in the file. Activations are
// packed to be the other factor: a row for each pair of places, in it that pair of each of 16 tokens. The product of the
// two adds to 16 x 16 sums in float32, [row of the weight, token].
//
// What a product adds to a sum depends on that row and that token alone, and places are added 32 at a time in ascending
// order, so a token's result does not depend on how many tokens or rows are computed beside it, or by how many threads.
// Nor may it depend on whether it comes alone, which is why one token goes through tiles as well: vectors would round
// differently. The processor takes numbers below 2^-126 for zero here.

constexpr int64_t ROWS = 16;    // of a weight in a tile
constexpr int64_t PLACES = 32;  // of a row in a tile
constexpr int64_t TOKENS = 16;  // in a tile
constexpr int64_t TILE = ROWS * PLACES;
constexpr int MOST = 6;  // tiles of tokens that a tile of a weight is multiplied with at a time
constexpr int64_t WIDE = MOST * TOKENS;

// All eight tiles in full size, for as long as a thread works with them.
class Tiles {
   public:
    Tiles() { _tile_loadconfig(&FULL); }
    ~Tiles() { _tile_release(); }
    Tiles(const Tiles &) = delete;

   private:
    struct alignas(64) Layout {
        uint8_t palette, first_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    };
    static constexpr Layout FULL = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
};

inline int64_t tiles(int64_t tokens) { return (tokens + TOKENS - 1) / TOKENS; }

// Numbers in n places of up to 16 packed tokens, and where among them the pair of places that begins with i lies.
inline int64_t packed_size(int64_t n) { return (n + PLACES - 1) / PLACES * TILE; }
inline int64_t packed_place(int64_t i) { return i * TOKENS; }

// The transpose of 16 x 16 units of 32 bits, in place.
inline void transpose(__m512i (&v)[16]) {
    __m512i w[16];
    for (int i = 0; i < 16; i += 2) {
        w[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
        w[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            v[i + 2 * j] = _mm512_unpacklo_epi64(w[i + j], w[i + 2 + j]);
            v[i + 2 * j + 1] = _mm512_unpackhi_epi64(w[i + j], w[i + 2 + j]);
        }
    for (int i = 0; i < 16; i += 8)
        for (int j = 0; j < 4; j++) {
            w[i + j] = _mm512_shuffle_i32x4(v[i + j], v[i + 4 + j], 0x88);
            w[i + 4 + j] = _mm512_shuffle_i32x4(v[i + j], v[i + 4 + j], 0xdd);
        }
    for (int j = 0; j < 8; j++) {
        v[j] = _mm512_shuffle_i32x4(w[j], w[8 + j], 0x88);
        v[8 + j] = _mm512_shuffle_i32x4(w[j], w[8 + j], 0xdd);
    }
}

// Packs n places of up to 16 tokens. What no place of a weight will be multiplied with may be anything: a token's sums
// are its own. Places after the last are zeros.
inline void pack(const bfloat16 *const *x, int64_t tokens, int64_t n, bfloat16 *packed) {
    for (int64_t i = 0; i < n; i += PLACES) {
        __m512i units[16] = {};
        for (int64_t t = 0; t < tokens; t++)
            if (n - i >= PLACES)
                units[t] = _mm512_loadu_si512(x[t] + i);
            else
                std::memcpy(&units[t], x[t] + i, (n - i) * sizeof(bfloat16));
        transpose(units);
        for (int u = 0; u < 16; u++) _mm512_store_si512(packed + packed_place(i + 2 * u), units[u]);
    }
}

// Where a tile's rows of a weight start, and how many bytes apart.
struct Place {
    const bfloat16 *start;
    int64_t stride;
};

// To GCC, loading a tile reads no memory: what was written before is to be there, and what is written later not yet.
inline void written() { __asm__ volatile("" ::: "memory"); }

// The tile of a weight at w, of which so many rows and places are left: where it lies, or, if it is not whole, a copy
// filled up with zeros, for nothing beyond a weight may be read.
inline Place weight_tile(const bfloat16 *w, int64_t columns, int64_t rows, int64_t places, bfloat16 *copy) {
    if (rows >= ROWS && places >= PLACES) return {w, columns * int64_t(sizeof *w)};
    written();
    std::fill_n(copy, TILE, bfloat16{});
    for (int64_t r = 0; r < std::min(rows, ROWS); r++)
        std::memcpy(copy + r * PLACES, w + r * columns, std::min(places, PLACES) * sizeof *w);
    written();
    return {copy, PLACES * sizeof *w};
}

// out[r * WIDE + t] = w[r] . x[t] for up to 16 rows and N tiles of packed tokens, x_width apart. A weight is loaded once
// for them all. FRESH rows come from memory, and those from `next` on after them.
template <int N, bool FRESH>
void products(const bfloat16 *w, int64_t rows, int64_t columns, const bfloat16 *x, int64_t x_width,
              const bfloat16 *next, float *out) {
    static_assert(0 < N && N <= MOST, "tiles 6 and 7 hold the factors");
    // With a lone tile of tokens there is nothing to wait for but rows, which the processor then foresees best unaided,
    // as soon as it has seen where they begin.
    constexpr bool LONE = N == 1;
    constexpr int64_t AHEAD = (LONE ? 4 : 8) * PLACES;
    alignas(64) bfloat16 copy[TILE];
    if (N > 0) _tile_zero(0);
    if (N > 1) _tile_zero(1);
    if (N > 2) _tile_zero(2);
    if (N > 3) _tile_zero(3);
    if (N > 4) _tile_zero(4);
    if (N > 5) _tile_zero(5);
    for (int64_t i = 0; i < columns; i += PLACES) {
        const bool ends = i + AHEAD >= columns;
        if (FRESH && (ends || !LONE)) {
            const bfloat16 *const later = ends ? next + i + AHEAD - columns : w + i + AHEAD;
            for (int64_t r = 0; r < ROWS; r++) __builtin_prefetch(later + r * columns, 0, 2);
        }
        const Place some = weight_tile(w + i, columns, rows, columns - i, copy);
        _tile_loadd(6, some.start, some.stride);
        const bfloat16 *const tokens = x + i * TOKENS;
        // The number of a tile is part of an instruction.
#define ADD(n)                                                    \
    if (N > n) {                                                  \
        _tile_loadd(7, tokens + n * x_width, PLACES * sizeof *x); \
        _tile_dpbf16ps(n, 6, 7);                                  \
    }
        ADD(0) ADD(1) ADD(2) ADD(3) ADD(4) ADD(5)
#undef ADD
    }
#define PUT(n) \
    if (N > n) _tile_stored(n, out + n * TOKENS, WIDE * sizeof *out);
    PUT(0) PUT(1) PUT(2) PUT(3) PUT(4) PUT(5)
#undef PUT
}

template <bool FRESH, int... N>
constexpr std::array<decltype(&products<1, FRESH>), MOST> by_tiles(std::integer_sequence<int, N...>) {
    return {products<N + 1, FRESH>...};
}

// The same for 1 to WIDE tokens.
template <bool FRESH>
inline void products(const bfloat16 *w, int64_t rows, int64_t columns, const bfloat16 *x, int64_t x_width,
                     int64_t tokens, const bfloat16 *next, float *out) {
    static constexpr auto BY_TILES = by_tiles<FRESH>(std::make_integer_sequence<int, MOST>());
    BY_TILES[tiles(tokens) - 1](w, rows, columns, x, x_width, next, out);
}

// y[t * stride + r] = out[r * width + t], for up to 32 rows of so many tokens, of which there is room for whole tiles.
// PAST the caches, if what is written will have left them before it is read: then its lines need not be read first.
template <bool PAST>
void scatter(const float *out, int64_t width, int64_t rows, int64_t tokens, bfloat16 *y, int64_t stride) {
    for (int64_t t = 0; t < tokens; t += TOKENS) {
        __m512i pairs[16];
        for (int i = 0; i < 16; i++) {
            const Words even = (Words)rounded<bfloat16>(load<Floats>(out + 2 * i * width + t));
            const Words odd = (Words)rounded<bfloat16>(load<Floats>(out + (2 * i + 1) * width + t));
            pairs[i] = (__m512i)(even >> 16 | odd);
        }
        transpose(pairs);
        for (int64_t n = 0; n < std::min(TOKENS, tokens - t); n++) {
            bfloat16 *const to = y + (t + n) * stride;
            if (rows < 2 * ROWS)
                std::memcpy(to, &pairs[n], rows * sizeof *to);
            else if (PAST && reinterpret_cast<uintptr_t>(to) % sizeof *pairs == 0)
                _mm512_stream_si512(reinterpret_cast<__m512i *>(to), pairs[n]);
            else
                _mm512_storeu_si512(to, pairs[n]);
        }
    }
}
