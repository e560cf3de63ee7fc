// Every instruction set that this processor has against plain loops, without Python or torch: `make test-kernels`, or,
// linked statically, under an emulator of a processor that is not at hand (arguments: rounds, and one set's name).
// The shapes are random; each tensor ends at a page that may not be touched, results begin as NaN, and a token alone
// must give the same bits as among others.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "../minimoe/native/bfloat16.h"
#include "../minimoe/native/interface.h"

namespace {

using minimoe::bfloat16;
std::mt19937 generator(1);

int64_t any(int64_t least, int64_t most) { return std::uniform_int_distribution<int64_t>(least, most)(generator); }

// n numbers that end where memory ends; before them is at least one page that is watched.
template <class W>
class Tensor {
   public:
    explicit Tensor(int64_t n, float fill = NAN) : n_(n) {
        const size_t page = sysconf(_SC_PAGESIZE), bytes = n * sizeof(W);
        size_ = (bytes + page - 1) / page * page + 2 * page;
        base_ = static_cast<char *>(mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        if (base_ == MAP_FAILED || mprotect(base_ + size_ - page, page, PROT_NONE)) std::abort();
        std::memset(base_, 0x5a, size_ - page);
        data_ = reinterpret_cast<W *>(base_ + size_ - page - bytes);
        for (int64_t i = 0; i < n; i++) data_[i] = minimoe::narrow<W>(fill);
    }
    Tensor(Tensor &&other) : n_(other.n_), base_(other.base_), size_(other.size_), data_(other.data_) {
        other.base_ = nullptr;
    }
    ~Tensor() {
        if (base_) munmap(base_, size_);
    }
    static Tensor random(int64_t n, float scale = 1) {
        Tensor tensor(n);
        std::normal_distribution<float> normal(0, scale);
        for (int64_t i = 0; i < n; i++) tensor.data_[i] = minimoe::narrow<W>(normal(generator));
        return tensor;
    }
    W *data(int64_t i = 0) const { return data_ + i; }
    float operator[](int64_t i) const { return minimoe::widen(data_[i]); }
    bool clean() const {
        return std::all_of(base_, reinterpret_cast<char *>(data_), [](char byte) { return byte == 0x5a; });
    }
    bool same(const Tensor &other, int64_t from = 0) const {
        return std::memcmp(data_ + from, other.data_, other.n_ * sizeof(W)) == 0;
    }
    int64_t size() const { return n_; }

   private:
    int64_t n_;
    char *base_;
    size_t size_;
    W *data_;
};

struct Score {
    int cases = 0, failed = 0;
    double worst = 0;  // error relative to what is allowed

    // Equal but for a rounding of the dtype of relative size eps, and an error of the sums.
    template <class W>
    void compare(const Tensor<W> &got, const Tensor<W> &expected, double eps, double sums) {
        bool good = got.clean();
        for (int64_t i = 0; i < expected.size(); i++) {
            const double error = std::abs(got[i] - expected[i]) / (eps * std::abs(expected[i]) + sums);
            good = good && error <= 1;  // not so for NaN
            worst = std::max(worst, error);
        }
        require(good);
    }
    void require(bool good) { cases++, failed += !good; }
};

template <class W>
double eps() {
    return sizeof(W) == sizeof(float) ? 0x1p-20 : 0x1p-7;
}

template <class W>
constexpr int dtype = sizeof(W) == sizeof(float) ? 0 : 1;

template <class W>
void linear(int set, int scalar, Score &score) {
    const int64_t T = any(0, 9) ? any(0, 70) : any(80, 700), A = any(0, 9) ? any(1, 200) : any(2000, 2200);
    const int64_t n = any(1, 3);
    const auto x = Tensor<W>::random(T * A);
    std::vector<Tensor<W>> w, y, expected, alone;
    std::vector<int64_t> B;
    std::vector<const void *> ws;
    std::vector<void *> ys, expecteds, alones;
    for (int64_t i = 0; i < n; i++) {
        B.push_back(any(1, 90));
        w.push_back(Tensor<W>::random(B[i] * A));
        y.emplace_back(T * B[i]), expected.emplace_back(T * B[i]), alone.emplace_back(B[i]);
    }
    for (int64_t i = 0; i < n; i++) {
        ws.push_back(w[i].data()), ys.push_back(y[i].data());
        expecteds.push_back(expected[i].data()), alones.push_back(alone[i].data());
    }
    minimoe_linear(set, dtype<W>, int(any(1, 2)), T, A, n, B.data(), x.data(), ws.data(), ys.data());
    minimoe_linear(scalar, dtype<W>, 1, T, A, n, B.data(), x.data(), ws.data(), expecteds.data());
    for (int64_t i = 0; i < n; i++) score.compare(y[i], expected[i], eps<W>(), 1e-5 * std::sqrt(A));
    if (!T) return;
    const int64_t t = any(0, T - 1);
    minimoe_linear(set, dtype<W>, 1, 1, A, n, B.data(), x.data(t * A), ws.data(), alones.data());
    for (int64_t i = 0; i < n; i++) score.require(y[i].same(alone[i], t * B[i]));
}

template <class W>
void experts(int set, int scalar, Score &score) {
    const int64_t T = any(0, 9) ? any(0, 60) : any(80, 700), D = any(0, 9) ? any(1, 130) : any(2000, 2200);
    const int64_t I = any(1, 130);
    const int64_t E = any(1, 6), K = any(1, E);
    const auto x = Tensor<W>::random(T * D);
    std::vector<Tensor<W>> matrices;
    for (int64_t i = 0; i < 3 * E; i++) matrices.push_back(Tensor<W>::random(D * I, 1 / std::sqrt(i < 2 * E ? D : I)));
    std::vector<const void *> places;
    for (const auto &matrix : matrices) places.push_back(matrix.data());
    std::vector<int64_t> ids(T * K, E), k(T), order(E);  // dead slots hold E
    std::vector<float> weights(T * K, NAN);
    int64_t live = 0;
    for (int64_t e = 0; e < E; e++) order[e] = e;
    for (int64_t t = 0; t < T; t++) {
        std::shuffle(order.begin(), order.end(), generator);
        live += k[t] = any(0, K);
        for (int64_t j = 0; j < k[t]; j++) ids[t * K + j] = order[j], weights[t * K + j] = any(1, 100) / 100.0f;
    }
    const Tensor<W> y(T * D), expected(T * D), alone(D);
    const minimoe::ExpertPlaces of = {dtype<W>, D, I, E, &places[0], &places[E], &places[2 * E]};
    const auto run = [&](int which, int threads, int64_t t, int64_t count, const Tensor<W> &result) {
        return minimoe_experts(which, threads, &of, count, K, x.data(t * D), &ids[t * K], &weights[t * K], &k[t],
                               result.data());
    };
    score.require(run(set, int(any(1, 2)), 0, T, y) == 3 * D * I * live);
    run(scalar, 1, 0, T, expected);
    score.compare(y, expected, 2 * eps<W>(), 2 * eps<W>() + 2e-7 * std::sqrt(D));  // a plain sum strays itself
    if (!T) return;
    const int64_t t = any(0, T - 1);
    run(set, 1, t, 1, alone);
    score.require(y.same(alone, t * D));
}

template <class W>
void norm(int set, int scalar, Score &score) {
    const int64_t T = any(0, 9), D = any(1, 300);
    const auto x = Tensor<W>::random(T * D, 3), w = Tensor<W>::random(D);
    const Tensor<W> y(T * D), expected(T * D);
    minimoe_norm(set, dtype<W>, 1, T, D, 1e-5f, x.data(), w.data(), y.data());
    minimoe_norm(scalar, dtype<W>, 1, T, D, 1e-5f, x.data(), w.data(), expected.data());
    score.compare(y, expected, 2 * eps<W>(), 1e-6);
}

template <class W>
void turn(int set, int scalar, Score &score) {
    const int64_t T = any(0, 9), H = any(1, 4), d = 2 * any(1, 70);
    const float clip = any(0, 1) ? INFINITY : 1.0f;
    const auto x = Tensor<W>::random(T * H * d, 3), w = Tensor<W>::random(H * d);
    const auto cos = Tensor<W>::random(T * d), sin = Tensor<W>::random(T * d);
    const Tensor<W> y(T * H * d), expected(T * H * d);
    for (int i : {0, 1})
        minimoe_turn(i ? scalar : set, dtype<W>, int(any(1, 2)), T, H, d, 1e-5f, clip, x.data(), w.data(), cos.data(),
                     sin.data(), (i ? expected : y).data());
    score.compare(y, expected, 4 * eps<W>(), 4 * eps<W>());
}

template <class W>
void attention(int set, int scalar, Score &score) {
    const int64_t T = any(1, 5), G = any(1, 3), H = G * any(1, 3), d = 2 * any(1, 64), layer = any(0, 1);
    const int64_t D = H * d;
    const auto x = Tensor<W>::random(T * D);
    const float small = 1 / std::sqrt(float(D));
    std::vector<Tensor<W>> weights;  // norm, query, key, value, query norm, key norm, output
    weights.push_back(Tensor<W>::random(D));
    for (const int64_t heads : {H, G, G}) weights.push_back(Tensor<W>::random(heads * d * D, small));
    for (const int64_t heads : {H, G}) weights.push_back(Tensor<W>::random(heads * d));
    weights.push_back(Tensor<W>::random(D * D, small));
    std::vector<const void *> at;
    for (const auto &weight : weights) at.push_back(weight.data());
    const auto cos = Tensor<W>::random(T * d, 0.5f), sin = Tensor<W>::random(T * d, 0.5f);
    std::vector<int64_t> lengths, capacities;
    std::vector<Tensor<W>> caches[2];
    std::vector<void *> places[2][2];
    for (int64_t t = 0; t < 2 * T; t++) {  // keys, then values
        if (t < T) lengths.push_back(any(0, 40)), capacities.push_back(lengths[t] + any(1, 3));
        const int64_t size = 2 * G * capacities[t % T] * d;
        caches[0].push_back(Tensor<W>::random(size)), caches[1].emplace_back(size);
        std::memcpy(caches[1][t].data(), caches[0][t].data(), size * sizeof(W));
        for (int i : {0, 1}) places[i][t / T].push_back(caches[i][t].data());
    }
    const Tensor<W> y(T * D), expected(T * D);
    const minimoe::AttentionPlaces of = {dtype<W>, D, H, G, d, layer, 1e-5f, INFINITY, at.data()};
    for (int i : {0, 1}) {
        const minimoe::StepPlaces steps = {T, cos.data(), sin.data(), places[i][0].data(), places[i][1].data(),
                                           lengths.data(), capacities.data()};
        minimoe_attention(i ? scalar : set, 1, &of, &steps, x.data(), (i ? expected : y).data());
    }
    score.compare(y, expected, 8 * eps<W>(), 8 * eps<W>());
    for (int64_t t = 0; t < 2 * T; t++) score.compare(caches[0][t], caches[1][t], 8 * eps<W>(), 8 * eps<W>());
}

template <class W>
void attend(int set, int scalar, Score &score) {
    const int64_t N = any(0, 9) ? any(1, 80) : any(1, 400), S = N + any(0, 100), G = any(1, 3), H = G * any(1, 3), d = any(1, 140);
    const bool side_by_side = any(0, 1);  // heads of a position, as projections have them, or positions of a head
    const int64_t position = side_by_side ? G * d : d, head = side_by_side ? d : S * d;
    const auto q = Tensor<W>::random(N * H * d), k = Tensor<W>::random(S * G * d), v = Tensor<W>::random(S * G * d);
    const Tensor<W> y(N * H * d), expected(N * H * d), alone(H * d);
    for (int i : {0, 1})
        minimoe_attend(i ? scalar : set, dtype<W>, int(any(1, 2)), N, S, H, G, d, position, head, q.data(), k.data(),
                       v.data(), (i ? expected : y).data());
    score.compare(y, expected, 4 * eps<W>(), 4 * eps<W>());
    const int64_t n = any(0, N - 1);
    minimoe_attend(set, dtype<W>, 1, 1, S - N + n + 1, H, G, d, position, head, q.data(n * H * d), k.data(), v.data(),
                   alone.data());
    score.require(y.same(alone, n * H * d));
}

template <class W>
void rank(int set, int scalar, Score &score) {
    const int64_t T = any(0, 70), E = any(1, 70);
    const Tensor<W> logits(T * E);
    const Tensor<float> sorted(T * E), expected(T * E);
    std::vector<int64_t> ids(T * E), expected_ids(T * E);
    for (int64_t i = 0; i < T * E; i++) *logits.data(i) = minimoe::narrow<W>(any(0, 20) / 4.0f);
    minimoe_rank(set, dtype<W>, 1, T, E, logits.data(), sorted.data(), ids.data());
    minimoe_rank(scalar, dtype<W>, 1, T, E, logits.data(), expected.data(), expected_ids.data());
    score.compare(sorted, expected, 0x1p-20, 1e-7);
    score.require(ids == expected_ids);
}

bool report(const char *set, const char *kernel, const char *type, int rounds, int index, int scalar,
            void (*check)(int, int, Score &)) {
    Score score;
    for (int i = 0; i < rounds; i++) check(index, scalar, score);
    std::printf("%-12s %-10s %-9s %s: %d of %d checks, largest error %.2f of what is allowed\n", set, kernel, type,
                score.failed ? "FAILED" : "passed", score.cases - score.failed, score.cases, score.worst);
    std::fflush(stdout);
    return !score.failed;
}

}  // namespace

int main(int count, char **arguments) {
    const int rounds = count > 1 ? std::atoi(arguments[1]) : 100, scalar = minimoe_sets() - 1;
    const std::string only = count > 2 ? arguments[2] : "";
    bool good = true;
    for (int i = 0; i < scalar; i++) {
        const char *const name = minimoe_set_name(i);
        if (!only.empty() && name != only) continue;
        if (!minimoe_set_supported(i)) {
            std::printf("%-12s not on this processor\n", name);
            continue;
        }
        good &= report(name, "linear", "float32", rounds, i, scalar, linear<float>);
        good &= report(name, "linear", "bfloat16", rounds, i, scalar, linear<bfloat16>);
        good &= report(name, "experts", "float32", rounds, i, scalar, experts<float>);
        good &= report(name, "experts", "bfloat16", rounds, i, scalar, experts<bfloat16>);
        good &= report(name, "norm", "float32", rounds, i, scalar, norm<float>);
        good &= report(name, "norm", "bfloat16", rounds, i, scalar, norm<bfloat16>);
        good &= report(name, "attention", "float32", rounds, i, scalar, attention<float>);
        good &= report(name, "attention", "bfloat16", rounds, i, scalar, attention<bfloat16>);
        good &= report(name, "turn", "float32", rounds, i, scalar, turn<float>);
        good &= report(name, "turn", "bfloat16", rounds, i, scalar, turn<bfloat16>);
        good &= report(name, "attend", "float32", rounds, i, scalar, attend<float>);
        good &= report(name, "attend", "bfloat16", rounds, i, scalar, attend<bfloat16>);
        good &= report(name, "rank", "float32", rounds, i, scalar, rank<float>);
        good &= report(name, "rank", "bfloat16", rounds, i, scalar, rank<bfloat16>);
    }
    std::puts(good ? "all passed" : "FAILED");
    return good ? 0 : 1;
}
