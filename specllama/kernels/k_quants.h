// Types with blocks of 256: 8 or 16 parts, each with a whole number as its scale.
//
// I is an instruction set (avx2.cpp and its neighbours): I::rows rows of weights fit a vector.
//   Bytes  four values of each row        Int    one whole number a row
//   Sum    products of bytes, as the set adds them up: Int, or int16 with little room (AVX2)
//   Scale  the scale of a part a row      Pair   two int16 a row       Float  one float a row
#pragma once
#include "layout.h"

namespace specllama {

// Each type: how group t of part j is read from the packed block, and what it is.
//   most: the largest magnitude of a value   is_signed: values are int8, else uint8
//   shift: 2^shift is added to each stored value (0: nothing is)
template <class I> struct Q4_K_Values {
    using Packed = packed::Q4_K;
    static constexpr Form form = Form::parts32;
    static constexpr int parts = 8, most = 15, shift = 0;
    static constexpr bool is_signed = false, has_min = true;
    static auto values(const Packed &b, int j, int t, int at) {
        return half_bytes<I>(b.q[j], t, at);
    }
    static auto scale(const Packed &b, int j, int at) { return I::scale(b.scale[j], at); }
    static auto minima(const Packed &b, int p, int at) { return I::pairs(&b.min[p][0][0], at); }
};

template <class I> struct Q5_K_Values {
    using Packed = packed::Q5_K;
    static constexpr Form form = Form::parts32;
    static constexpr int parts = 8, most = 31, shift = 0;
    static constexpr bool is_signed = false, has_min = true;
    static auto values(const Packed &b, int j, int t, int at) {
        return I::or_(half_bytes<I>(b.q[j], t, at), I::bit(I::load(b.high[j], at), t, 4));
    }
    static auto scale(const Packed &b, int j, int at) { return I::scale(b.scale[j], at); }
    static auto minima(const Packed &b, int p, int at) { return I::pairs(&b.min[p][0][0], at); }
};

template <class I> struct Q6_K_Values {
    using Packed = packed::Q6_K;
    static constexpr Form form = Form::parts16;
    static constexpr int parts = 16, most = 63, shift = 5;
    static constexpr bool is_signed = false, has_min = false;
    static auto values(const Packed &b, int j, int t, int at) {
        auto v = I::load(b.low[j][t / 2], at);
        return I::or_(t % 2 ? I::high(v) : I::low(v), I::two_bits(I::load(b.high[j], at), 2 * t, 4));
    }
    static auto scale(const Packed &b, int j, int at) { return I::scale(b.scale[j], at); }
};

template <class I> struct Q2_K_Values {
    using Packed = packed::Q2_K;
    static constexpr Form form = Form::parts16;
    static constexpr int parts = 16, most = 3, shift = 0;
    static constexpr bool is_signed = false, has_min = true;
    static auto values(const Packed &b, int j, int t, int at) { return I::two_bits(I::load(b.q[j], at), 2 * t, 0); }
    static auto scale(const Packed &b, int j, int at) { return I::scale(b.scale[j], at); }
    static auto minima(const Packed &b, int p, int at) { return I::pairs(&b.min[p][0][0], at); }
};

template <class I> struct Q3_K_Values {
    using Packed = packed::Q3_K;
    static constexpr Form form = Form::parts16;
    static constexpr int parts = 16, most = 7, shift = 2;
    static constexpr bool is_signed = false, has_min = false;
    static auto values(const Packed &b, int j, int t, int at) {
        return I::or_(I::two_bits(I::load(b.low[j], at), 2 * t, 0), I::bit(I::load(b.high[j / 2], at), j % 2 * 4 + t, 2));
    }
    static auto scale(const Packed &b, int j, int at) { return I::scale(b.scale[j], at); }
};

template <class I> struct IQ4_XS_Values {
    using Packed = packed::IQ4_XS;
    static constexpr Form form = Form::parts32;
    static constexpr int parts = 8, most = 127, shift = 0;
    static constexpr bool is_signed = true, has_min = false;
    static auto values(const Packed &b, int j, int t, int at) {
        return I::table(half_bytes<I>(b.q[j], t, at), IQ4_TABLE);
    }
    static auto scale(const Packed &b, int j, int at) { return I::scale(b.scale[j], at); }
};

template <class I, class W, int N>
void k_tile(const void *weights, const int32_t *activations, int64_t blocks, float *const *out) {
    constexpr int GROUPS = 64 / W::parts, PAIRS = W::parts / 2, WORDS = block_words(W::form);
    constexpr int ROOM = I::room(W::most);       // groups that a Sum holds
    constexpr int SHIFT = W::is_signed ? I::signed_shift : W::shift;
    for (int at = 0; at < ROWS / I::rows; at++) {
        typename I::Float f[N];
        for (int k = 0; k < N; k++) f[k] = I::zero_float();
        const auto *w = (const typename W::Packed *)weights;
        const int32_t *a = activations;
        for (int64_t i = 0; i < blocks; i++, w++, a += WORDS * N) {
            typename I::Int sum[N], less[N];
            for (int k = 0; k < N; k++) sum[k] = less[k] = I::zero();
            for (int j = 0; j < W::parts; j++) {
                I::fetch((const char *)(w + 2) + j * (sizeof *w / W::parts), sizeof *w / W::parts);
                const auto scale = W::scale(*w, j, at);
#pragma GCC unroll 8
                for (int g = 0; g < GROUPS; g += ROOM) {
                    typename I::Sum s[N];
                    for (int k = 0; k < N; k++) s[k] = I::none();
#pragma GCC unroll 8
                    for (int t = g; t < (g + ROOM < GROUPS ? g + ROOM : GROUPS); t++) {
                        const auto v = I::template ready<W::is_signed>(W::values(*w, j, t, at));
#pragma GCC unroll 8
                        for (int k = 0; k < N; k++)
                            s[k] = I::template dot<W::is_signed>(s[k], v, a[(j * GROUPS + t) * N + k]);
                    }
#pragma GCC unroll 8
                    for (int k = 0; k < N; k++) sum[k] = I::template add_scaled<W::most>(sum[k], s[k], scale);
                }
            }
            // minima, or what was added to the values: a whole number a part, times its activations
            if constexpr (W::has_min || SHIFT > 0) {
#pragma GCC unroll 8
                for (int p = 0; p < PAIRS; p++) {
                    typename I::Pair pair;
                    if constexpr (W::has_min) pair = W::minima(*w, p, at);
                    else pair = I::pair(W::scale(*w, 2 * p, at), W::scale(*w, 2 * p + 1, at));
#pragma GCC unroll 8
                    for (int k = 0; k < N; k++) less[k] = I::add_pairs(less[k], pair, a[(64 + p) * N + k]);
                }
            }
            const auto d = I::halves(w->d, at);
#pragma GCC unroll 8
            for (int k = 0; k < N; k++) {
                const auto dy = I::broadcast_float(a[(64 + PAIRS) * N + k]);
                if constexpr (SHIFT > 0) sum[k] = I::subtract(sum[k], I::shift_left(less[k], SHIFT));
                f[k] = I::fma(I::to_float(sum[k]), I::times(d, dy), f[k]);
                if constexpr (W::has_min)
                    f[k] = I::fnma(I::to_float(less[k]), I::times(I::halves(w->dmin, at), dy), f[k]);
            }
        }
        for (int k = 0; k < N; k++) I::store(out[k] + at * I::rows, f[k]);
    }
}

} // namespace specllama
