// What lies in one place over many calls, as minimoe/native/places.py writes it down. Shape letters as in kernels.h.
#pragma once

#include <cstdint>

namespace minimoe {

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

}  // namespace minimoe
