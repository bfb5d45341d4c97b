// NEON with dot products: a vector holds four values of 4 rows, and sdot adds their products with
// four activations to four sums of 32 bits.
#include "tables.h"

#include <arm_neon.h>
#ifdef __linux__
#include <sys/auxv.h>
#endif

namespace specllama {
namespace {

struct Neon {
    static constexpr int rows = 4, widest = 8, registers = 32;
    static constexpr int signed_shift = 0, signed_offset = 0;
    static constexpr int room(int) { return 8; }
    using Bytes = int8x16_t;
    using Sum = int32x4_t;
    using Int = int32x4_t;
    using Scale = int32x4_t;
    using Pair = int16x8_t;
    using Float = float32x4_t;

    static Bytes load(const uint8_t *v, int at) { return vreinterpretq_s8_u8(vld1q_u8(v + 16 * at)); }
    static Bytes masked(Bytes v, int mask) { return vandq_s8(v, vdupq_n_s8((int8_t)mask)); }
    static Bytes low(Bytes v) { return masked(v, 15); }
    static Bytes high(Bytes v) { return vreinterpretq_s8_u8(vshrq_n_u8(vreinterpretq_u8_s8(v), 4)); }
    static Bytes or_(Bytes a, Bytes b) { return vorrq_s8(a, b); }
    static Bytes moved(Bytes v, int left) {
        return vreinterpretq_s8_u8(vshlq_u8(vreinterpretq_u8_s8(v), vdupq_n_s8((int8_t)left)));
    }
    static Bytes bit(Bytes v, int from, int to) { return masked(moved(v, to - from), 1 << to); }
    static Bytes two_bits(Bytes v, int from, int to) { return masked(moved(v, to - from), 3 << to); }
    static Bytes table(Bytes v, const int8_t *t) { return vqtbl1q_s8(vld1q_s8(t), vreinterpretq_u8_s8(v)); }
    template <bool> static Bytes ready(Bytes v) { return v; }
    template <bool> static Sum dot(Sum s, Bytes v, int32_t four) {
        return vdotq_s32(s, v, vreinterpretq_s8_s32(vdupq_n_s32(four)));
    }
    static Sum none() { return vdupq_n_s32(0); }
    static Sum begin(Int sum) { return sum; }
    static Int finish(Int, Sum s) { return s; }

    static Int zero() { return vdupq_n_s32(0); }
    static Int broadcast(int32_t x) { return vdupq_n_s32(x); }
    static uint32x4_t widened(const uint8_t *s, int at) {
        uint32_t four;
        memcpy(&four, s + 4 * at, 4);
        return vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
    }
    static Scale scale(const uint8_t *s, int at) { return vreinterpretq_s32_u32(widened(s, at)); }
    static Scale scale(const int8_t *s, int at) {
        return vshrq_n_s32(vshlq_n_s32(scale((const uint8_t *)s, at), 24), 24);
    }
    template <int> static Int add_scaled(Int sum, Sum s, Scale scale) { return vmlaq_s32(sum, s, scale); }
    static Pair pairs(const uint8_t *p, int at) { return vreinterpretq_s16_u16(vmovl_u8(vld1_u8(p + 8 * at))); }
    static Pair pair(Scale even, Scale odd) {
        return vtrn1q_s16(vreinterpretq_s16_s32(even), vreinterpretq_s16_s32(odd));
    }
    static Int add_pairs(Int sum, Pair p, int32_t two) {
        const int16x8_t a = vreinterpretq_s16_s32(vdupq_n_s32(two));
        return vaddq_s32(sum, vpaddq_s32(vmull_s16(vget_low_s16(p), vget_low_s16(a)), vmull_high_s16(p, a)));
    }
    static Int shift_left(Int x, int n) { return vshlq_s32(x, vdupq_n_s32(n)); }
    static Int subtract(Int a, Int b) { return vsubq_s32(a, b); }

    static Float zero_float() { return vdupq_n_f32(0); }
    static Float broadcast_float(int32_t word) { return vreinterpretq_f32_s32(vdupq_n_s32(word)); }
    static Float to_float(Int x) { return vcvtq_f32_s32(x); }
    static Float floats(const float *p, int at) { return vld1q_f32(p + 4 * at); }
    static Float halves(const uint16_t *p, int at) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * at))); }
    static Float brains(const uint16_t *p, int at) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * at), 16)); }
    static Float powers(const uint8_t *e, int at) {  // half of 2^(e - 127); the two smallest are denormal
        const uint32x4_t x = widened(e, at);
        const uint32x4_t normal = vshlq_n_u32(vsubq_u32(x, vdupq_n_u32(1)), 23);
        const uint32x4_t tiny = vshlq_u32(vdupq_n_u32(0x00200000), vreinterpretq_s32_u32(x));
        return vreinterpretq_f32_u32(vbslq_u32(vcltq_u32(x, vdupq_n_u32(2)), tiny, normal));
    }
    static Float times(Float a, Float b) { return vmulq_f32(a, b); }
    static Float fma(Float a, Float b, Float c) { return vfmaq_f32(c, a, b); }
    static Float fnma(Float a, Float b, Float c) { return vfmsq_f32(c, a, b); }
    static void store(float *p, Float x) { vst1q_f32(p, x); }
    static Float add(Float a, Float b) { return vaddq_f32(a, b); }
    static Float divide(Float a, Float b) { return vdivq_f32(a, b); }
    static Float maximum(Float a, Float b) { return vmaxq_f32(a, b); }
    static Float rounded(Float x) { return vrndnq_f32(x); }
    static Float power(Float f, Float n) {  // f times 2^n
        return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(f), vshlq_n_s32(vcvtnq_s32_f32(n), 23)));
    }
    static Float above(Float x, Float least, Float f) {
        return vreinterpretq_f32_u32(vandq_u32(vcgeq_f32(x, least), vreinterpretq_u32_f32(f)));
    }
    static Float with_sign(Float f, Float of) { return vbslq_f32(vdupq_n_u32(0x80000000), of, f); }
    template <class L> static void add_lanes(const L *sum, float *to) {
        const auto folded = [&](int i) {
            return vpaddq_f32(add(sum[i].v[0], sum[i].v[2]), add(sum[i].v[1], sum[i].v[3]));
        };
        vst1q_f32(to, vpaddq_f32(vpaddq_f32(folded(0), folded(1)), vpaddq_f32(folded(2), folded(3))));
    }
    static void fetch(const char *p, size_t bytes) {
        for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i);
    }
};

bool runs_here() {
#ifdef __linux__
    return getauxval(AT_HWCAP) & (1UL << 20);  // HWCAP_ASIMDDP
#else
    return true;  // every Mac with an ARM processor has them
#endif
}

} // namespace

extern const Kernels neon_kernels;
constexpr Kernels neon_kernels = Table<Neon>("neon-dotprod", runs_here).k;

} // namespace specllama
