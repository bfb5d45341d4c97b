// Vectors of 32 bytes: half of a packed vector, eight rows. AVX2 and AVX-VNNI share them.
#pragma once
#include <immintrin.h>

namespace specllama {
namespace {

struct HalfVectors {
    static constexpr int rows = 8, registers = 16;
    using Bytes = __m256i;
    using Int = __m256i;
    using Pair = __m256i;
    using Float = __m256;

    static Bytes load(const uint8_t *v, int at) { return _mm256_load_si256((const __m256i *)(v + 32 * at)); }
    static Bytes low(Bytes v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
    static Bytes high(Bytes v) { return low(_mm256_srli_epi16(v, 4)); }
    static Bytes or_(Bytes a, Bytes b) { return _mm256_or_si256(a, b); }
    static Bytes moved(Bytes v, int left) { return left < 0 ? _mm256_srli_epi16(v, -left) : _mm256_slli_epi16(v, left); }
    static Bytes bit(Bytes v, int from, int to) { return _mm256_and_si256(moved(v, to - from), _mm256_set1_epi8((char)(1 << to))); }
    static Bytes two_bits(Bytes v, int from, int to) { return _mm256_and_si256(moved(v, to - from), _mm256_set1_epi8((char)(3 << to))); }
    static Bytes table(Bytes v, const int8_t *t) {
        return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *)t)), v);
    }

    static Int zero() { return _mm256_setzero_si256(); }
    static Int broadcast(int32_t x) { return _mm256_set1_epi32(x); }
    static Int unsigned_scales(const uint8_t *s, int at) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(s + 8 * at))); }
    static Int signed_scales(const int8_t *s, int at) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(s + 8 * at))); }
    static Pair pairs(const uint8_t *p, int at) { return _mm256_cvtepu8_epi16(_mm_load_si128((const __m128i *)(p + 16 * at))); }
    static Int add_pairs(Int sum, Pair p, int32_t two) { return _mm256_add_epi32(sum, _mm256_madd_epi16(p, _mm256_set1_epi32(two))); }
    static Int shift_left(Int x, int n) { return _mm256_slli_epi32(x, n); }
    static Int subtract(Int a, Int b) { return _mm256_sub_epi32(a, b); }

    static Float zero_float() { return _mm256_setzero_ps(); }
    static Float broadcast_float(int32_t word) { return _mm256_castsi256_ps(_mm256_set1_epi32(word)); }
    static Float to_float(Int x) { return _mm256_cvtepi32_ps(x); }
    static Float floats(const float *p, int at) { return _mm256_loadu_ps(p + 8 * at); }
    static Float halves(const uint16_t *p, int at) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8 * at))); }
    static Float brains(const uint16_t *p, int at) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p + 8 * at))), 16));
    }
    static Float powers(const uint8_t *e, int at) {  // half of 2^(e - 127); the two smallest are denormal
        const __m256i x = unsigned_scales(e, at);
        const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(x, _mm256_set1_epi32(1)), 23);
        const __m256i tiny = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), x);
        return _mm256_castsi256_ps(_mm256_blendv_epi8(normal, tiny, _mm256_cmpgt_epi32(_mm256_set1_epi32(2), x)));
    }
    static Float times(Float a, Float b) { return _mm256_mul_ps(a, b); }
    static Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
    static Float fnma(Float a, Float b, Float c) { return _mm256_fnmadd_ps(a, b, c); }
    static void store(float *p, Float x) { _mm256_storeu_ps(p, x); }
    // of attention (attention_kernels.h)
    static Float add(Float a, Float b) { return _mm256_add_ps(a, b); }
    static Float divide(Float a, Float b) { return _mm256_div_ps(a, b); }
    static Float maximum(Float a, Float b) { return _mm256_max_ps(a, b); }
    static Float rounded(Float x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static Float power(Float f, Float n) {  // f times 2^n
        return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(f), _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23)));
    }
    static Float above(Float x, Float least, Float f) { return _mm256_and_ps(_mm256_cmp_ps(x, least, _CMP_GE_OQ), f); }
    static Float with_sign(Float f, Float of) { return _mm256_or_ps(f, _mm256_and_ps(of, _mm256_set1_ps(-0.0f))); }
    // Lanes 0 to 7 of four vectors, each added up: neighbours, and neighbours of these.
    static void add_eight(__m256 a, __m256 b, __m256 c, __m256 d, float *to) {
        const __m256 sum = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
        _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1)));
    }
    template <class L> static void add_lanes(const L *sum, float *to) {
        const auto folded = [&](int i) { return add(sum[i].v[0], sum[i].v[1]); };
        add_eight(folded(0), folded(1), folded(2), folded(3), to);
    }
    static void fetch(const char *p, size_t bytes) {
        for (size_t i = 0; i < bytes; i += 64) _mm_prefetch(p + i, _MM_HINT_T0);
    }
};

} // namespace
} // namespace specllama
