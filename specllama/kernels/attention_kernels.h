// The parts of attention (attention.h) that are computed with vectors. I: see k_quants.h.
#pragma once
#include "attention.h"

#include <algorithm>
#include <cmath>

namespace specllama {

// e to the power of x <= 0; 0 below -87, where it would leave the normal numbers.
template <class I> typename I::Float exp_(typename I::Float x) {
    const auto number = [](float f) { return I::broadcast_float(word_of(f)); };
    const auto n = I::rounded(I::times(x, number(1.44269504f)));
    auto r = I::fnma(n, number(0.693359375f), x);  // ln 2 in two numbers
    r = I::fnma(n, number(-2.12194440e-4f), r);
    auto p = number(1.0f / 720);
    for (float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = I::fma(p, r, number(c));
    return I::above(x, number(-87.0f), I::power(p, n));
}

// 16 lanes, as the vectors of this set.
template <class I> struct Lanes {
    static constexpr int VECTORS = ROWS / I::rows;
    typename I::Float v[VECTORS];
};

template <class I> void halves_(const uint16_t *from, int64_t values, float *to) {
    for (int64_t i = 0; i < values; i += I::rows) I::store(to + i, I::halves(from + i, 0));
}

template <class I, int Q>
inline void scores_of(const float *queries, const float *keys, int cells, int64_t values, float (*scores)[PART]) {
    constexpr int VECTORS = Lanes<I>::VECTORS;
    for (int c = 0; c < cells; c += 4) {
        Lanes<I> sum[Q][4];
        for (int q = 0; q < Q; q++)
            for (int k = 0; k < 4; k++)
                for (int at = 0; at < VECTORS; at++) sum[q][k].v[at] = I::zero_float();
        for (int64_t i = 0; i < values; i += ROWS)
#pragma GCC unroll 4
            for (int at = 0; at < VECTORS; at++) {
                typename I::Float a[Q];
#pragma GCC unroll 2
                for (int q = 0; q < Q; q++) a[q] = I::floats(queries + q * values + i, at);
#pragma GCC unroll 4
                for (int k = 0; k < 4; k++) {
                    const auto b = I::floats(keys + (c + k) * values + i, at);
#pragma GCC unroll 2
                    for (int q = 0; q < Q; q++) sum[q][k].v[at] = I::fma(a[q], b, sum[q][k].v[at]);
                }
            }
#pragma GCC unroll 2
        for (int q = 0; q < Q; q++) I::add_lanes(sum[q], scores[q] + c);
    }
}

template <class I>
void scores_(const float *queries, int64_t n, const float *keys, int cells, int64_t values, float (*scores)[PART]) {
    constexpr int Q = I::registers / Lanes<I>::VECTORS >= 16 ? 2 : 1;
    for (; n >= Q; n -= Q, queries += Q * values, scores += Q) scores_of<I, Q>(queries, keys, cells, values, scores);
    for (; n > 0; n--, queries += values, scores++) scores_of<I, 1>(queries, keys, cells, values, scores);
}

template <class I>
void weigh_(float *scores, int cells, float scale, float softcap, const float *bias, float *most, float *sum) {
    const auto number = [](float f) { return I::broadcast_float(word_of(f)); };
    for (int c = 0; c < cells; c += I::rows) {
        auto s = I::times(I::floats(scores + c, 0), number(scale));
        if (softcap != 0) {  // tanh
            const auto e = exp_<I>(I::times(I::maximum(s, I::times(s, number(-1))), number(-2)));
            const auto t = I::divide(I::add(number(1), I::times(e, number(-1))), I::add(number(1), e));
            s = I::times(number(softcap), I::with_sign(t, s));
        }
        I::store(scores + c, I::add(s, I::floats(bias + c, 0)));
    }
    for (int c = cells; c < (cells + ROWS - 1) / ROWS * ROWS; c++) scores[c] = -INFINITY;
    auto largest = I::floats(scores, 0);
    for (int c = I::rows; c < cells; c += I::rows) largest = I::maximum(largest, I::floats(scores + c, 0));
    float each[ROWS];
    I::store(each, largest);
    const float m = *std::max_element(each, each + I::rows);
    Lanes<I> total[4];
    for (auto &lanes : total)
        for (auto &v : lanes.v) v = I::zero_float();
    for (int c = 0; c < cells; c += ROWS)
        for (int at = 0; at < Lanes<I>::VECTORS; at++) {
            const auto p = exp_<I>(I::add(I::floats(scores + c, at), number(-m)));
            I::store(scores + c + at * I::rows, p);
            total[0].v[at] = I::add(total[0].v[at], p);
        }
    float sums[4];
    I::add_lanes(total, sums);
    *most = m, *sum = sums[0];
}

template <class I, int Q, int D>
inline void mix_of(const float (*p)[PART], const float *cells, int count, int64_t values, int64_t first, float *out) {
    constexpr int VECTORS = Lanes<I>::VECTORS;
    Lanes<I> sum[Q][D];
    for (int q = 0; q < Q; q++)
        for (int d = 0; d < D; d++)
            for (int at = 0; at < VECTORS; at++) sum[q][d].v[at] = I::zero_float();
    for (int c = 0; c < count; c++) {
        typename I::Float w[Q];
#pragma GCC unroll 2
        for (int q = 0; q < Q; q++) w[q] = I::broadcast_float(word_of(p[q][c]));
#pragma GCC unroll 4
        for (int d = 0; d < D; d++)
#pragma GCC unroll 4
            for (int at = 0; at < VECTORS; at++) {
                const auto v = I::floats(cells + c * values + first + d * ROWS, at);
#pragma GCC unroll 2
                for (int q = 0; q < Q; q++) sum[q][d].v[at] = I::fma(w[q], v, sum[q][d].v[at]);
            }
    }
    for (int q = 0; q < Q; q++)
        for (int d = 0; d < D; d++)
            for (int at = 0; at < VECTORS; at++)
                I::store(out + q * values + first + d * ROWS + at * I::rows, sum[q][d].v[at]);
}

template <class I> void mix_(const float (*p)[PART], int64_t n, const float *cells, int count, int64_t values, float *out) {
    constexpr int D = Lanes<I>::VECTORS == 1 ? 4 : 2;
    int64_t first = 0;
    for (; first + D * ROWS <= values; first += D * ROWS)
        for (int64_t q = 0; q < n; q += 2)
            if (q + 1 < n) mix_of<I, 2, D>(p + q, cells, count, values, first, out + q * values);
            else mix_of<I, 1, D>(p + q, cells, count, values, first, out + q * values);
    for (; first < values; first += ROWS)
        for (int64_t q = 0; q < n; q++) mix_of<I, 1, 1>(p + q, cells, count, values, first, out + q * values);
}

template <class I> float exp_of(float x) {
    float all[ROWS];
    I::store(all, exp_<I>(I::broadcast_float(word_of(x))));
    return all[0];
}

template <class I> void join_(float *m, float *s, float *v, float m2, float s2, const float *v2, int64_t values) {
    const float most = std::max(*m, m2);
    const float here = exp_of<I>(*m - most), there = exp_of<I>(m2 - most);
    const auto a = I::broadcast_float(word_of(here)), b = I::broadcast_float(word_of(there));
    for (int64_t i = 0; i < values; i += I::rows) {
        auto sum = I::times(I::floats(v + i, 0), a);
        if (v2) sum = I::fma(I::floats(v2 + i, 0), b, sum);
        I::store(v + i, sum);
    }
    *s = *s * here + s2 * there;
    *m = most;
}

template <class I> constexpr AttentionKernels attention_of() {
    return {halves_<I>, scores_<I>, weigh_<I>, mix_<I>, join_<I>};
}

} // namespace specllama
