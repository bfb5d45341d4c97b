// AVX-VNNI: vpdpbusd on vectors of eight rows, as AVX-512 has it on 16.
#include "tables.h"

#include "half_vectors.h"

namespace specllama {
namespace {

struct AvxVnni : HalfVectors {
    static constexpr int widest = 4;
    static constexpr int signed_shift = 7, signed_offset = 128;
    static constexpr bool is_short(int most) { return 16 * 127 * most <= 32767; }  // see avx512.cpp
    static constexpr int room(int most) { return is_short(most) ? 4 : 8; }
    using Sum = __m256i;
    using Scale = __m256i;

    template <bool SIGNED> static Bytes ready(Bytes v) {
        return SIGNED ? _mm256_xor_si256(v, _mm256_set1_epi8((char)0x80)) : v;
    }
    template <bool> static Sum dot(Sum s, Bytes v, int32_t four) { return _mm256_dpbusd_avx_epi32(s, v, _mm256_set1_epi32(four)); }
    static Sum none() { return _mm256_setzero_si256(); }
    static Sum begin(Int sum) { return sum; }
    static Int finish(Int, Sum s) { return s; }

    static Scale scale(const uint8_t *s, int at) { return unsigned_scales(s, at); }
    static Scale scale(const int8_t *s, int at) { return signed_scales(s, at); }
    template <int MOST> static Int add_scaled(Int sum, Sum s, Scale scale) {
        if (is_short(MOST)) return _mm256_dpwssd_avx_epi32(sum, s, _mm256_and_si256(scale, _mm256_set1_epi32(0xffff)));
        return _mm256_add_epi32(sum, _mm256_mullo_epi32(s, scale));
    }
    static Pair pair(Scale even, Scale odd) { return _mm256_blend_epi16(even, _mm256_slli_epi32(odd, 16), 0xaa); }
};

bool runs_here() {  // leaf 7.1, eax bit 4; older compilers do not know the name
    unsigned a, b, c, d;
    __asm__("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(7), "c"(1));
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && (a >> 4 & 1);
}

} // namespace

extern const Kernels avxvnni_kernels;
constexpr Kernels avxvnni_kernels = Table<AvxVnni>("avxvnni", runs_here).k;

} // namespace specllama
