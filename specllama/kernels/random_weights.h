// Random weights as files hold them, for checks and tests.
#pragma once
#include "layout.h"

#include <cstring>
#include <vector>

namespace specllama {

struct Random {
    uint64_t state = 1;
    uint32_t draw() {
        state = state * 6364136223846793005u + 1442695040888963407u;
        return (uint32_t)(state >> 33);
    }
    float real() { return (float)(draw() % 20001) / 10000.0f - 1.0f; }

    // Blocks of any bits; scales in half precision are small and finite. One row of the matrix has
    // the largest values that its type can hold.
    std::vector<char> weights(int type, int64_t values, int64_t rows) {
        const TypeFacts &f = *facts(type);
        std::vector<char> w((size_t)(values / f.stored_values * rows) * f.stored_bytes);
        for (char &c : w) c = (char)draw();
        memset(w.data(), 0xff, w.size() / (size_t)rows);
        const auto half = [&](size_t at) {
            const uint16_t h = (uint16_t)((draw() & 0x83ff) | (8 + draw() % 6) << 10);
            memcpy(&w[at], &h, 2);
        };
        for (size_t at = 0; at < w.size(); at += f.stored_bytes) switch (type) {
            case F32: { const float x = real(); memcpy(&w[at], &x, 4); break; }
            case BF16: w[at + 1] = (char)((w[at + 1] & 0x80) | 0x3d); break;
            case Q4_1: case Q5_1: case Q4_K: case Q5_K: half(at), half(at + 2); break;
            case Q6_K: half(at + 208); break;
            case Q2_K: half(at + 80), half(at + 82); break;
            case Q3_K: half(at + 108); break;
            case MXFP4: w[at] = (char)(at == 0 ? 0 : at == 17 ? 1 : 120 + draw() % 12); break;
            default: half(at);
            }
        return w;
    }
};

constexpr int ALL_TYPES[] = {F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, MXFP4, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS};

} // namespace specllama
