// AVX2: a vector holds four values of 8 rows. vpmaddubsw multiplies them with four activations and
// adds neighbours to int16, of which as many are added as cannot overflow; vpmaddwd widens the sum
// and multiplies it with the scale. (With AVX-VNNI vpdpbusd does as in avx512.cpp: avxvnni.cpp.)
#include "tables.h"

#include "half_vectors.h"

namespace specllama {
namespace {

struct Avx2 : HalfVectors {
    static constexpr int widest = 4;  // 16 registers
    static constexpr int signed_shift = 0, signed_offset = 0;
    static constexpr int room(int most) { return 32767 / (2 * 127 * most) < 8 ? 32767 / (2 * 127 * most) : 8; }
    using Sum = __m256i;    // two int16 a row
    using Scale = __m256i;  // the scale twice, as int16

    template <bool> static Bytes ready(Bytes v) { return v; }
    template <bool SIGNED> static Sum dot(Sum s, Bytes v, int32_t four) {
        const __m256i a = _mm256_set1_epi32(four);
        // signed weights: their magnitudes, times activations with their signs
        const __m256i products = SIGNED ? _mm256_maddubs_epi16(_mm256_abs_epi8(v), _mm256_sign_epi8(a, v))
                                        : _mm256_maddubs_epi16(v, a);
        return _mm256_add_epi16(s, products);
    }
    static Sum none() { return _mm256_setzero_si256(); }
    static Sum begin(Int) { return none(); }
    static Int finish(Int sum, Sum s) { return add_scaled<0>(sum, s, _mm256_set1_epi16(1)); }

    static Scale twice(__m256i x) { return _mm256_blend_epi16(x, _mm256_slli_epi32(x, 16), 0xaa); }
    static Scale scale(const uint8_t *s, int at) { return twice(unsigned_scales(s, at)); }
    static Scale scale(const int8_t *s, int at) { return twice(signed_scales(s, at)); }
    template <int> static Int add_scaled(Int sum, Sum s, Scale scale) { return _mm256_add_epi32(sum, _mm256_madd_epi16(s, scale)); }
    static Pair pair(Scale even, Scale odd) { return _mm256_blend_epi16(even, odd, 0xaa); }
};

bool runs_here() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

} // namespace

extern const Kernels avx2_kernels;
constexpr Kernels avx2_kernels = Table<Avx2>("avx2", runs_here).k;

} // namespace specllama
