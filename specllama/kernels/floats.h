// Weights that are floats: one chain of products over the values, in order. I: see k_quants.h.
#pragma once
#include "layout.h"

namespace specllama {

template <class I, int TYPE, int N>
void float_tile(const void *weights, const int32_t *activations, int64_t values, float *const *out) {
    for (int at = 0; at < ROWS / I::rows; at++) {
        typename I::Float f[N];
        for (int k = 0; k < N; k++) f[k] = I::zero_float();
        const int32_t *a = activations;
        for (int64_t i = 0; i < values; i++, a += N) {
            typename I::Float w;
            if constexpr (TYPE == F32) w = I::floats((const float *)weights + i * ROWS, at);
            else if constexpr (TYPE == F16) w = I::halves((const uint16_t *)weights + i * ROWS, at);
            else w = I::brains((const uint16_t *)weights + i * ROWS, at);
#pragma GCC unroll 8
            for (int k = 0; k < N; k++) f[k] = I::fma(w, I::broadcast_float(a[k]), f[k]);
        }
        for (int k = 0; k < N; k++) I::store(out[k] + at * I::rows, f[k]);
    }
}

} // namespace specllama
