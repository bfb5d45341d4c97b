// All kernels of an instruction set, in the form that layout.h describes.
#pragma once
#include "layout.h"

namespace specllama {
// the values that four bits stand for (ggml-common.h: kvalues_iq4nl; kvalues_mxfp4, 12 added)
alignas(16) constexpr int8_t IQ4_TABLE[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
alignas(16) constexpr int8_t MXFP4_TABLE[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// Group t of eight, of which t and t + 4 share the bytes of a vector (layout.h).
template <class I> auto half_bytes(const packed::Vector (&q)[4], int t, int at) {
    const auto v = I::load(q[t % 4], at);
    return t < 4 ? I::low(v) : I::high(v);
}
} // namespace specllama

#include "activations.h"
#include "attention_kernels.h"
#include "blocks32.h"
#include "floats.h"
#include "k_quants.h"

namespace specllama {

template <class I> struct Table {
    static constexpr AttentionKernels attention = attention_of<I>();
    Kernels k{};
    template <template <class> class V> constexpr void add_k(int type) {
        using W = V<I>;
        Tile t[] = {nullptr, k_tile<I, W, 1>, k_tile<I, W, 2>, k_tile<I, W, 3>, k_tile<I, W, 4>,
                    k_tile<I, W, 5>, k_tile<I, W, 6>, k_tile<I, W, 7>, k_tile<I, W, 8>};
        for (int n = 1; n <= I::widest; n++) k.tile[type][n] = t[n];
    }
    template <template <class> class V> constexpr void add_32(int type) {
        using W = V<I>;
        Tile t[] = {nullptr, tile32<I, W, 1>, tile32<I, W, 2>, tile32<I, W, 3>, tile32<I, W, 4>,
                    tile32<I, W, 5>, tile32<I, W, 6>, tile32<I, W, 7>, tile32<I, W, 8>};
        for (int n = 1; n <= I::widest; n++) k.tile[type][n] = t[n];
        k.offset[type] = offset_of<I, W>;
    }
    template <int T> constexpr void add_floats() {
        Tile t[] = {nullptr, float_tile<I, T, 1>, float_tile<I, T, 2>, float_tile<I, T, 3>, float_tile<I, T, 4>,
                    float_tile<I, T, 5>, float_tile<I, T, 6>, float_tile<I, T, 7>, float_tile<I, T, 8>};
        for (int n = 1; n <= I::widest; n++) k.tile[T][n] = t[n];
    }
    constexpr explicit Table(const char *name, bool (*runs_here)()) {
        k.name = name, k.runs_here = runs_here, k.widest = I::widest;
        k.attention = &attention;
        add_floats<F32>(), add_floats<F16>(), add_floats<BF16>();
        add_32<Q4_0_Values>(Q4_0), add_32<Q4_1_Values>(Q4_1), add_32<Q5_0_Values>(Q5_0), add_32<Q5_1_Values>(Q5_1);
        add_32<Q8_0_Values>(Q8_0), add_32<IQ4_NL_Values>(IQ4_NL), add_32<MXFP4_Values>(MXFP4);
        add_k<Q2_K_Values>(Q2_K), add_k<Q3_K_Values>(Q3_K), add_k<Q4_K_Values>(Q4_K), add_k<Q5_K_Values>(Q5_K);
        add_k<Q6_K_Values>(Q6_K), add_k<IQ4_XS_Values>(IQ4_XS);
        k.quantize[(int)Form::parts16] = quantize<I, Form::parts16>;
        k.quantize[(int)Form::parts32] = quantize<I, Form::parts32>;
        k.quantize[(int)Form::blocks32] = quantize<I, Form::blocks32>;
        k.quantize[(int)Form::floats] = quantize<I, Form::floats>;
    }
};

} // namespace specllama
