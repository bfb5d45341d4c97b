// Activations: rounded to whole numbers, and laid out for a tile (layout.h).
#pragma once
#include "layout.h"

#include <cmath>
#include <cstring>

namespace specllama {

inline int32_t word_of(float x) {
    int32_t w;
    memcpy(&w, &x, 4);
    return w;
}

// Round blocks [from, to) of the row x and put them where tile points: word 0 of this row. Each
// block has a scale of its own: its largest magnitude becomes 127. I only names the instruction
// set that this is compiled for; every one gives the same bits.
template <class I, Form F>
void quantize(const float *x, int64_t from, int64_t to, int32_t *tile, int n, int offset) {
    constexpr int VALUES = block_values(F), WORDS = block_words(F);
    for (int64_t block = from; block < to; block++) {
        const float *v = x + block * VALUES;
        int32_t *out = tile + block * WORDS * n;
        if constexpr (F == Form::floats) {
            *out = word_of(*v);
            continue;
        }
        // magnitudes compare as whole numbers do, and one that is not finite is the largest
        int32_t most = 0, bits[VALUES];
        memcpy(bits, v, sizeof bits);
        for (int i = 0; i < VALUES; i++) {
            const int32_t magnitude = bits[i] & 0x7fffffff;
            most = magnitude > most ? magnitude : most;
        }
        float largest;
        memcpy(&largest, &most, 4);
        const bool usable = largest >= 1e-30f && most < 0x7f800000;
        const float back = usable ? 127.0f / largest : 0;
        const float scale = most >= 0x7f800000 ? NAN : usable ? largest / 127.0f : 0;
        int8_t q[VALUES];
        for (int i = 0; i < VALUES; i++) q[i] = usable ? (int8_t)(int32_t)rintf(v[i] * back) : 0;
        for (int w = 0; w < VALUES / 4; w++) memcpy(out + w * n, q + 4 * w, 4);
        out += VALUES / 4 * n;
        if constexpr (F == Form::blocks32) {
            int32_t sum = 0;
            for (int i = 0; i < VALUES; i++) sum += q[i];
            out[0] = -offset * sum;
            out[n] = word_of(scale);
            out[2 * n] = word_of(scale * (float)sum);
        } else {
            constexpr int PART = F == Form::parts16 ? 16 : 32;
            for (int p = 0; p < VALUES / PART / 2; p++, out += n) {
                int32_t a = 0, b = 0;
                for (int i = 0; i < PART; i++) a += q[2 * p * PART + i], b += q[(2 * p + 1) * PART + i];
                *out = (int32_t)((uint32_t)b << 16 | ((uint32_t)a & 0xffff));
            }
            *out = word_of(scale);
        }
    }
}

} // namespace specllama
