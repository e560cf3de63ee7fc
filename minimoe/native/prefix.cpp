// Rules that keep a prefix of the ranking: how many experts, and at what weights. What the counts mean stands with the
// rules in minimoe/routers. As there, sums and differences of probabilities are doubles: floats would break ties.
#include <algorithm>
#include <cmath>
#include <vector>

#include "interface.h"

using namespace minimoe;

namespace {

// In the order of Count and Mass in minimoe/prefix_rule.py.
enum Count : int64_t { NUMBER, PROGRAM, PRINTED, MAX_GAP, GAP_RATIO, TOP_P, MIN_P, THRESHOLD, ENTROPY };
enum Mass : int64_t { NONE, KEPT, TOPK };

constexpr double EPSILON = 1e-12;  // as in minimoe/curve.py and minimoe/routers/gap_ratio.py

// The first of n ranks, counted from 1, where a value is largest; 1 if there are none.
template <class Value>
int64_t highest(int64_t n, Value value) {
    int64_t best = 0;
    for (int64_t i = 1; i < n; i++)
        if (value(i) > value(best)) best = i;
    return best + 1;
}

// How many of E sorted probabilities are at least so large.
int64_t at_least(const float *p, int64_t E, float least) {
    return std::count_if(p, p + E, [least](float value) { return value >= least; });
}

// k, before floor and limit.
int64_t counted(const PrefixRule &rule, const float *p, int64_t E) {
    const double first = p[0], last = p[E - 1];
    switch (rule.count) {
        case NUMBER: return int64_t(std::min(rule.number, double(rule.limit)));
        case PROGRAM:
        case PRINTED: {
            const double height = first - last + EPSILON, steps = std::max<int64_t>(E - 1, 1);
            const bool flipped = rule.count == PROGRAM;
            return highest(E, [=](int64_t i) { return (flipped ? first - p[i] : p[i] - last) / height - i / steps; });
        }
        case MAX_GAP: return highest(E - 1, [p](int64_t i) { return double(p[i]) - double(p[i + 1]); });
        case GAP_RATIO:
            return highest(std::min(rule.limit, E - 1), [p](int64_t i) { return p[i] / (p[i + 1] + EPSILON); });
        case TOP_P: {
            double sum = 0;
            for (int64_t i = 0; i < E; i++)
                if ((sum += p[i]) >= rule.number) return i + 1;
            return E;
        }
        case MIN_P: return at_least(p, E, float(rule.number) * p[0]);
        case THRESHOLD: return at_least(p, E, float(rule.number));
        default: {
            double entropy = 0;
            for (int64_t i = 0; i < E; i++) entropy -= p[i] > 0 ? p[i] * std::log(double(p[i])) : 0;
            const double wanted = std::floor(rule.number * std::exp(entropy) + 0.5);
            return wanted < double(E) ? int64_t(wanted) : E;
        }
    }
}

// What k weights are multiplied by, to sum to what the rule says. A token without experts has nothing to share out.
float factor(const PrefixRule &rule, const float *p, int64_t E, int64_t k) {
    const auto sum = [p](int64_t n) {
        double total = 0;
        for (int64_t i = 0; i < n; i++) total += p[i];
        return total;
    };
    const double kept = sum(k);
    return kept > 0 ? float((rule.mass == KEPT ? 1.0 : sum(std::min(rule.top_k, E))) / kept) : 1.0f;
}

}  // namespace

extern "C" {

// The first k[t] of token t's E ranked experts in K slots: weight 0 and the id E in the slots after them.
void minimoe_keep(int64_t T, int64_t E, int64_t K, const float *sorted, const int64_t *ranked, const int64_t *k,
                  int64_t *experts, float *weights) {
    for (int64_t t = 0; t < T; t++)
        for (int64_t j = 0; j < K; j++) {
            const bool live = j < k[t];
            experts[t * K + j] = live ? ranked[t * E + j] : E;
            weights[t * K + j] = live ? sorted[t * E + j] : 0.0f;
        }
}

// Rank, count, cut and weigh at once, in rule->limit slots a token.
int minimoe_prefix(int set, int dtype, int threads, int64_t T, int64_t E, const PrefixRule *rule, const void *logits,
                    int64_t *experts, float *weights, int64_t *k) {
    return guarded([&] {
        const int64_t K = rule->limit;
        std::vector<float> sorted(T * E);
        std::vector<int64_t> ranked(T * E);
        if (const int refused = minimoe_rank(set, dtype, threads, T, E, logits, sorted.data(), ranked.data()))
            return refused;
#pragma omp parallel for num_threads(T < 64 ? 1 : threads) schedule(static)
        for (int64_t t = 0; t < T; t++) k[t] = std::clamp(counted(*rule, &sorted[t * E], E), rule->floor, K);
        minimoe_keep(T, E, K, sorted.data(), ranked.data(), k, experts, weights);
        if (rule->mass == NONE) return 0;
        for (int64_t t = 0; t < T; t++) {
            const float times = factor(*rule, &sorted[t * E], E, k[t]);
            for (int64_t j = 0; j < k[t]; j++) weights[t * K + j] *= times;
        }
        return 0;
    });
}
}
