// AVX-512 with VNNI: a vector holds four values of 16 rows, and vpdpbusd adds their products with
// four activations to 16 sums of 32 bits.
#include "tables.h"

#include "half_vectors.h"

namespace specllama {
namespace {

struct Avx512 {
    static constexpr int rows = 16, widest = 8, registers = 32;
    static constexpr int signed_shift = 7, signed_offset = 128;  // vpdpbusd wants unsigned weights
    // four groups fit int16 where values are small: vpdpwssd then multiplies and adds at once
    static constexpr bool is_short(int most) { return 16 * 127 * most <= 32767; }
    static constexpr int room(int most) { return is_short(most) ? 4 : 8; }
    using Bytes = __m512i;
    using Sum = __m512i;
    using Int = __m512i;
    using Scale = __m512i;
    using Pair = __m512i;
    using Float = __m512;

    static Bytes load(const uint8_t *v, int) { return _mm512_load_si512(v); }
    static Bytes low(Bytes v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
    static Bytes high(Bytes v) { return low(_mm512_srli_epi16(v, 4)); }
    static Bytes or_(Bytes a, Bytes b) { return _mm512_or_si512(a, b); }
    static Bytes moved(Bytes v, int left) { return left < 0 ? _mm512_srli_epi16(v, -left) : _mm512_slli_epi16(v, left); }
    static Bytes bit(Bytes v, int from, int to) { return _mm512_and_si512(moved(v, to - from), _mm512_set1_epi8((char)(1 << to))); }
    static Bytes two_bits(Bytes v, int from, int to) { return _mm512_and_si512(moved(v, to - from), _mm512_set1_epi8((char)(3 << to))); }
    static Bytes table(Bytes v, const int8_t *t) {
        return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128((const __m128i *)t)), v);
    }
    template <bool SIGNED> static Bytes ready(Bytes v) {
        return SIGNED ? _mm512_xor_si512(v, _mm512_set1_epi8((char)0x80)) : v;
    }
    template <bool> static Sum dot(Sum s, Bytes v, const int32_t &four) {  // one instruction, broadcast and all
        __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(s) : "v"(v), "m"(four));
        return s;
    }
    static Sum none() { return _mm512_setzero_si512(); }
    static Sum begin(Int sum) { return sum; }
    static Int finish(Int, Sum s) { return s; }

    static Int zero() { return _mm512_setzero_si512(); }
    static Int broadcast(int32_t x) { return _mm512_set1_epi32(x); }
    static Scale scale(const uint8_t *s, int) { return _mm512_cvtepu8_epi32(_mm_load_si128((const __m128i *)s)); }
    static Scale scale(const int8_t *s, int) { return _mm512_cvtepi8_epi32(_mm_load_si128((const __m128i *)s)); }
    template <int MOST> static Int add_scaled(Int sum, Sum s, Scale scale) {
        if (is_short(MOST)) return _mm512_dpwssd_epi32(sum, s, _mm512_and_si512(scale, _mm512_set1_epi32(0xffff)));
        return _mm512_add_epi32(sum, _mm512_mullo_epi32(s, scale));
    }
    static Pair pairs(const uint8_t *p, int) { return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)p)); }
    static Pair pair(Scale even, Scale odd) { return _mm512_mask_blend_epi16(0xaaaaaaaa, even, _mm512_slli_epi32(odd, 16)); }
    static Int add_pairs(Int sum, Pair p, int32_t two) { return _mm512_dpwssd_epi32(sum, p, _mm512_set1_epi32(two)); }
    static Int shift_left(Int x, int n) { return _mm512_slli_epi32(x, n); }
    static Int subtract(Int a, Int b) { return _mm512_sub_epi32(a, b); }

    static Float zero_float() { return _mm512_setzero_ps(); }
    static Float broadcast_float(int32_t word) { return _mm512_castsi512_ps(_mm512_set1_epi32(word)); }
    static Float to_float(Int x) { return _mm512_cvtepi32_ps(x); }
    static Float floats(const float *p, int) { return _mm512_loadu_ps(p); }
    static Float halves(const uint16_t *p, int) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
    static Float brains(const uint16_t *p, int) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
    }
    static Float powers(const uint8_t *e, int) {  // half of 2^(e - 127); the two smallest are denormal
        const __m512i x = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)e));
        const __m512i normal = _mm512_slli_epi32(_mm512_sub_epi32(x, _mm512_set1_epi32(1)), 23);
        const __m512i tiny = _mm512_sllv_epi32(_mm512_set1_epi32(0x00200000), x);
        return _mm512_castsi512_ps(_mm512_mask_blend_epi32(_mm512_cmplt_epu32_mask(x, _mm512_set1_epi32(2)), normal, tiny));
    }
    static Float times(Float a, Float b) { return _mm512_mul_ps(a, b); }
    static Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
    static Float fnma(Float a, Float b, Float c) { return _mm512_fnmadd_ps(a, b, c); }
    static void store(float *p, Float x) { _mm512_storeu_ps(p, x); }
    static Float add(Float a, Float b) { return _mm512_add_ps(a, b); }
    static Float divide(Float a, Float b) { return _mm512_div_ps(a, b); }
    static Float maximum(Float a, Float b) { return _mm512_max_ps(a, b); }
    static Float rounded(Float x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static Float power(Float f, Float n) {  // f times 2^n
        return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(f), _mm512_slli_epi32(_mm512_cvtps_epi32(n), 23)));
    }
    static Float above(Float x, Float least, Float f) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, least, _CMP_GE_OQ), f); }
    static Float with_sign(Float f, Float of) {
        return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(_mm512_castps_si512(f), _mm512_castps_si512(of), _mm512_set1_epi32((int)0x80000000), 0xf8));
    }
    template <class L> static void add_lanes(const L *sum, float *to) {
        const auto folded = [&](int i) {
            const __m512d x = _mm512_castps_pd(sum[i].v[0]);
            return _mm256_add_ps(_mm256_castpd_ps(_mm512_castpd512_pd256(x)), _mm256_castpd_ps(_mm512_extractf64x4_pd(x, 1)));
        };
        HalfVectors::add_eight(folded(0), folded(1), folded(2), folded(3), to);
    }
    static void fetch(const char *p, size_t bytes) {
        for (size_t i = 0; i < bytes; i += 64) _mm_prefetch(p + i, _MM_HINT_T0);
    }
};

bool runs_here() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
}

} // namespace

extern const Kernels avx512_kernels;
constexpr Kernels avx512_kernels = Table<Avx512>("avx512vnni", runs_here).k;

} // namespace specllama
