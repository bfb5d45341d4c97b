// Types with blocks of 32 values, each with a scale in half precision (MXFP4: a power of two).
// I: see k_quants.h.
#pragma once
#include "layout.h"

namespace specllama {

// offset: is added to each stored value (signed ones: what the instruction set adds)
template <class I> struct Q4_0_Values {
    using Packed = packed::Nibbles32<2>;
    static constexpr int per = 2, most = 15, offset = 8;
    static constexpr bool is_signed = false, has_min = false;
    static auto values(const Packed &b, int i, int t, int at) {
        return half_bytes<I>(b.q[i], t, at);
    }
    static auto scale(const Packed &b, int i, int at) { return I::halves(b.d[i], at); }
};

template <class I> struct IQ4_NL_Values : Q4_0_Values<I> {
    using Packed = packed::Nibbles32<2>;
    static constexpr int most = 127, offset = 0;
    static constexpr bool is_signed = true;
    static auto values(const Packed &b, int i, int t, int at) {
        return I::table(Q4_0_Values<I>::values(b, i, t, at), IQ4_TABLE);
    }
};

template <class I> struct Q4_1_Values {
    using Packed = packed::Q4_1;
    static constexpr int per = 1, most = 15, offset = 0;
    static constexpr bool is_signed = false, has_min = true;
    static auto values(const Packed &b, int, int t, int at) {
        return half_bytes<I>(b.q, t, at);
    }
    static auto scale(const Packed &b, int, int at) { return I::halves(b.d, at); }
};

template <class I> struct Q5_0_Values {
    using Packed = packed::Q5_0;
    static constexpr int per = 2, most = 31, offset = 16;
    static constexpr bool is_signed = false, has_min = false;
    static auto values(const Packed &b, int i, int t, int at) {
        return I::or_(half_bytes<I>(b.q[i], t, at), I::bit(I::load(b.high[i], at), t, 4));
    }
    static auto scale(const Packed &b, int i, int at) { return I::halves(b.d[i], at); }
};

template <class I> struct Q5_1_Values {
    using Packed = packed::Q5_1;
    static constexpr int per = 1, most = 31, offset = 0;
    static constexpr bool is_signed = false, has_min = true;
    static auto values(const Packed &b, int, int t, int at) {
        return I::or_(half_bytes<I>(b.q, t, at), I::bit(I::load(b.high, at), t, 4));
    }
    static auto scale(const Packed &b, int, int at) { return I::halves(b.d, at); }
};

template <class I> struct Q8_0_Values {
    using Packed = packed::Q8_0;
    static constexpr int per = 2, most = 128, offset = 0;
    static constexpr bool is_signed = true, has_min = false;
    static auto values(const Packed &b, int i, int t, int at) { return I::load(b.q[i][t], at); }
    static auto scale(const Packed &b, int i, int at) { return I::halves(b.d[i], at); }
};

template <class I> struct MXFP4_Values {
    using Packed = packed::MXFP4;
    static constexpr int per = 4, most = 24, offset = 12;
    static constexpr bool is_signed = false, has_min = false;
    static auto values(const Packed &b, int i, int t, int at) {
        return I::table(half_bytes<I>(b.q[i], t, at), MXFP4_TABLE);  // 12 added
    }
    static auto scale(const Packed &b, int i, int at) { return I::powers(b.e[i], at); }
};

template <class I, class W> constexpr int offset_of = W::is_signed ? I::signed_offset : W::offset;

template <class I, class W, int N>
void tile32(const void *weights, const int32_t *activations, int64_t blocks, float *const *out) {
    constexpr int WORDS = block_words(Form::blocks32), ROOM = I::room(W::most);
    const auto *w = (const typename W::Packed *)weights;
    for (int at = 0; at < ROWS / I::rows; at++) {
        typename I::Float f[N];
        for (int k = 0; k < N; k++) f[k] = I::zero_float();
        const int32_t *a = activations;
        for (int64_t i = 0; i < blocks; i++, a += WORDS * N) {
            const auto &b = w[i / W::per];
            const int n = (int)(i % W::per);
            if (n == 0) I::fetch((const char *)(&b + (512 + sizeof b - 1) / sizeof b * 4), sizeof b);
            typename I::Int sum[N];
            for (int k = 0; k < N; k++) sum[k] = offset_of<I, W> ? I::broadcast(a[8 * N + k]) : I::zero();
#pragma GCC unroll 8
            for (int g = 0; g < 8; g += ROOM) {
                typename I::Sum s[N];
                for (int k = 0; k < N; k++) s[k] = I::begin(sum[k]);
#pragma GCC unroll 8
                for (int t = g; t < (g + ROOM < 8 ? g + ROOM : 8); t++) {
                    const auto v = I::template ready<W::is_signed>(W::values(b, n, t, at));
#pragma GCC unroll 8
                    for (int k = 0; k < N; k++) s[k] = I::template dot<W::is_signed>(s[k], v, a[t * N + k]);
                }
                for (int k = 0; k < N; k++) sum[k] = I::finish(sum[k], s[k]);
            }
            const auto d = W::scale(b, n, at);
#pragma GCC unroll 8
            for (int k = 0; k < N; k++) {
                const auto dy = I::broadcast_float(a[9 * N + k]);
                f[k] = I::fma(I::to_float(sum[k]), I::times(d, dy), f[k]);
                if constexpr (W::has_min) f[k] = I::fma(I::halves(b.m, at), I::broadcast_float(a[10 * N + k]), f[k]);
            }
        }
        for (int k = 0; k < N; k++) I::store(out[k] + at * I::rows, f[k]);
    }
}

} // namespace specllama
