// The library's plain C interface, which minimoe/native/kernels.py calls through ctypes: each kernel with the
// instruction set to use, as its number. Shape letters as in kernels.h; what the functions do stands in interface.cpp,
// prefix.cpp and decode.cpp.
#pragma once

#include <cstdint>
#include <new>

namespace minimoe {

constexpr int NO_MEMORY = -9;  // what a call returns that found none: nothing that it writes is to be used

// What work() returns; no exception may leave a function that C calls. What grows with a call is reserved before its
// threads start, where this catches it; the little that each of them keeps for itself is not.
template <class F>
auto guarded(F work) -> decltype(work()) {
    try {
        return work();
    } catch (const std::bad_alloc &) {
        return NO_MEMORY;
    }
}

// What lies in one place over many calls, as minimoe/native/places.py writes it down.
struct ExpertPlaces {
    int64_t dtype, D, I, E;
    const void *const *gate, *const *up, *const *down;
};

struct AttentionPlaces {
    int64_t dtype, D, H, G, d, layer;
    float eps, clip;
    const void *const *weights;  // norm, query, key, value, query norm, key norm, output
};

struct GatePlaces {
    int64_t dtype, D, E;
    float eps;
    const void *norm, *gate;
};

struct StepPlaces {
    int64_t T;
    const void *cos, *sin;
    void *const *keys, *const *values;
    const int64_t *lengths, *rooms;
};

struct ModelPlaces {
    int64_t dtype, layers, D, V, E;
    float eps;
    const void *embed, *norm, *head;
    const AttentionPlaces *const *attention;
    const GatePlaces *const *gates;
    const ExpertPlaces *const *experts;
};

// A rule that keeps a prefix of the ranking, see minimoe/prefix_rule.py.
struct PrefixRule {
    int64_t count;
    double number;
    int64_t floor, limit, mass, top_k;
};

// What a rule decided about T tokens, as minimoe_experts reads it.
struct Decision {
    int64_t K;
    const int64_t *experts;  // [T, K]
    const float *weights;    // [T, K]
    const int64_t *k;        // [T]
};

// What a decode step of T sequences leaves behind, or keeps until it goes on.
struct StepResults {
    void *hidden;         // [3, T, D]
    int64_t *experts;     // [layers, T, K]; this and the next two are not written where somebody else decides
    float *weights;       // [layers, T, K]
    int64_t *k;           // [layers, T]
    void *router_logits;  // [layers, T, E]
    void *logits;         // [T, V]
    double *seconds;      // of attention, gate, rule and experts [layers, 4], then of embedding, last norm and head
};

}  // namespace minimoe

// Those that return int return 0, or what is refused.
extern "C" {
int minimoe_sets();
const char *minimoe_set_name(int set);
int minimoe_set_supported(int set);
int minimoe_linear(int set, int dtype, int threads, int64_t T, int64_t A, int64_t n, const int64_t *B, const void *x,
                    const void *const *w, void *const *y);
int minimoe_rank(int set, int dtype, int threads, int64_t T, int64_t E, const void *logits, float *sorted,
                  int64_t *experts);
void minimoe_keep(int64_t T, int64_t E, int64_t K, const float *sorted, const int64_t *ranked, const int64_t *k,
                  int64_t *experts, float *weights);
int minimoe_prefix(int set, int dtype, int threads, int64_t T, int64_t E, const minimoe::PrefixRule *rule,
                    const void *logits, int64_t *experts, float *weights, int64_t *k);
int64_t minimoe_experts(int set, int threads, const minimoe::ExpertPlaces *of, int64_t T, int64_t K, const void *x,
                        const int64_t *experts, const float *weights, const int64_t *k, void *y);
int minimoe_norm(int set, int dtype, int threads, int64_t T, int64_t D, float eps, const void *x, const void *w,
                  void *y);
int minimoe_turn(int set, int dtype, int threads, int64_t T, int64_t H, int64_t d, float eps, float clip, const void *x,
                  const void *w, const void *cos, const void *sin, void *y);
int minimoe_finite(int dtype, int64_t n, const void *x);
int minimoe_gate(int set, int threads, const minimoe::GatePlaces *of, int64_t T, const void *x, void *normed,
                  void *logits);
int minimoe_attend(int set, int dtype, int threads, int64_t N, int64_t S, int64_t H, int64_t G, int64_t d,
                    int64_t position, int64_t head, const void *q, const void *k, const void *v, void *y);
int minimoe_attention(int set, int threads, const minimoe::AttentionPlaces *of, const minimoe::StepPlaces *at,
                      const void *x, void *y);
int64_t minimoe_decode(int set, int threads, const minimoe::ModelPlaces *of, const minimoe::StepPlaces *at,
                       const minimoe::PrefixRule *rules, const int64_t *ids, const minimoe::StepResults *into,
                       int64_t layer, const minimoe::Decision *decided);
}
