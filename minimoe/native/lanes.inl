// WIDTH floats at a time, whatever the instruction set: blocks of numbers, rounding, the exponential function, SiLU and
// sums of lanes.
namespace minimoe {
namespace {

typedef float Floats __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t Words __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Signed __attribute__((vector_size(4 * WIDTH)));

// Calls that go before anything else is decided, so that an array of vectors is a set of registers from the beginning.
#define INLINED __attribute__((always_inline))
#define INLINE inline INLINED

// f(0), f(1) to f(n - 1), each number known to the compiler: places of an array that are known stay in registers.
template <class F, int... I>
INLINE void each(F f, std::integer_sequence<int, I...>) {
    (f(std::integral_constant<int, I>()), ...);
}
template <int n, class F>
INLINE void each(F f) {
    each(f, std::make_integer_sequence<int, n>());
}

template <class V>
INLINE V load(const void *place) {
    V value;
    std::memcpy(&value, place, sizeof value);
    return value;
}

#if defined(__clang__)
#define SHUFFLED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLED(a, b, ...) __builtin_shuffle(a, b, Words{__VA_ARGS__})
#endif

// Of each 2 * HALF lanes of a, and then of b, the first HALF and the second HALF added.
template <int HALF, size_t... I>
INLINE Floats halved(Floats a, Floats b, std::index_sequence<I...>) {
    return SHUFFLED(a, b, (I / HALF * 2 * HALF + I % HALF)...) +
           SHUFFLED(a, b, (I / HALF * 2 * HALF + I % HALF + HALF)...);
}

// The sum of each of n vectors' lanes, in the first lanes of the vectors, in order. Each is summed in the same order:
// halves, quarters and so on, whatever n is.
template <int n, int HALF = WIDTH / 2>
INLINE void sum(Floats *v) {
    each<(n + 1) / 2>([&](auto i) INLINED {
        v[i] = halved<HALF>(v[2 * i], v[2 * i + 1 < n ? 2 * i + 1 : 2 * i], std::make_index_sequence<WIDTH>());
    });
    if constexpr (HALF > 1) sum<(n + 1) / 2, HALF / 2>(v);
}

// What a tensor of dtype W would hold.
template <class W>
inline Floats rounded(Floats x) {
    if (sizeof(W) == sizeof(float)) return x;
    const Words bits = (Words)x, nearest = bits + 0x7fff + ((bits >> 16) & 1);
    return (Floats)((x == x ? nearest : bits | 0x400000) & 0xffff0000u);  // a NaN stays one without its lower half
}

// e^x = 2^n e^r with |r| <= ln 2 / 2, by the first terms of the series of e^r, which miss 5e-9 of it at most.
inline Floats exponential(Floats x) {
    constexpr float MOST = 104, ROUND = 0x1.8p23f;  // e^104 is infinite and e^-104 zero; a float above 2^23 is whole
    x = x > MOST ? Floats{} + MOST : x;  // a NaN stays one
    x = x < -MOST ? Floats{} - MOST : x;
    const Floats shifted = x * 1.44269504f + ROUND, n = shifted - ROUND;
    // ln 2, in a part whose products are exact and the rest of it.
    const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    Floats series = Floats{} + 1.0f / 5040;
    for (const float factorial : {720, 120, 24, 6, 2, 1, 1}) series = series * r + 1 / factorial;
    // 2^n in two factors, for one alone may be out of range.
    const Signed whole = (Signed)shifted - (Signed)(Floats{} + ROUND), half = whole >> 1;
    return series * (Floats)((half + 127) << 23) * (Floats)((whole - half + 127) << 23);
}

// e^x for x of at most 0, where what is below e^-87 is 0.
inline Floats decaying(Floats x) {
    constexpr float LEAST = -87, ROUND = 0x1.8p23f;
    const Floats shifted = x * 1.44269504f + ROUND, n = shifted - ROUND;
    const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    Floats series = Floats{} + 1.0f / 5040;
    for (const float factorial : {720, 120, 24, 6, 2, 1, 1}) series = series * r + 1 / factorial;
    const Signed whole = (Signed)shifted - (Signed)(Floats{} + ROUND);
    return x < LEAST ? Floats{} : series * (Floats)((whole + 127) << 23);
}

// What products take of dtype W.
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

// Numbers of dtype W come in blocks of STEP: two vectors of floats.
constexpr int64_t STEP = 2 * WIDTH;

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

// silu(gate) * up, rounded after each of its two steps.
template <class W>
inline Floats gated(Floats gate, Floats up) {
    gate = rounded<W>(gate);
    return rounded<W>(rounded<W>(gate / (1 + exponential(-gate))) * rounded<W>(up));
}

}  // namespace
}  // namespace minimoe
