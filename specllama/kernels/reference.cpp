// The scalar reference: products as plain loops over blocks as files hold them. Every kernel gives
// the same bits. It shares nothing with them but the rounding of activations.
#include "reference.h"

#include "activations.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace specllama {
namespace {

struct Scalar {};

float half(uint16_t h) {
    const uint32_t sign = (uint32_t)(h >> 15) << 31, exponent = h >> 10 & 31, fraction = h & 1023;
    uint32_t w;
    if (exponent == 31) w = sign | 0x7f800000 | fraction << 13;
    else if (exponent) w = sign | (exponent + 112) << 23 | fraction << 13;
    else {
        const float small = (float)fraction * 0x1p-24f;
        return sign ? -small : small;
    }
    float f;
    memcpy(&f, &w, 4);
    return f;
}

float power(uint8_t e) { return ldexpf(1, (int)e - 128); }

float float_of(int32_t w) {
    float f;
    memcpy(&f, &w, 4);
    return f;
}

// One block of a row, value by value.
struct Block {
    int q[256], scale[16] = {}, min[16] = {};
    float d, m = 0;
    bool has_min = false;
};

constexpr int IQ4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int E2M1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // doubled

int six_bits(const uint8_t *s, int j, bool minimum) {
    if (j < 4) return s[minimum ? j + 4 : j] & 63;
    return (minimum ? s[j + 4] >> 4 : s[j + 4] & 15) | (s[minimum ? j : j - 4] >> 6) << 4;
}

void read(Block &o, const stored::Q4_0 &b) {
    o.d = half(b.d);
    for (int i = 0; i < 32; i++) o.q[i] = (i < 16 ? b.q[i] & 15 : b.q[i - 16] >> 4) - 8;
}
void read_iq4(Block &o, const stored::Q4_0 &b) {
    read(o, b);
    for (int i = 0; i < 32; i++) o.q[i] = IQ4[o.q[i] + 8];
}
void read(Block &o, const stored::Q4_1 &b) {
    o.d = half(b.d), o.m = half(b.m), o.has_min = true;
    for (int i = 0; i < 32; i++) o.q[i] = i < 16 ? b.q[i] & 15 : b.q[i - 16] >> 4;
}
template <class B> void read_five(Block &o, const B &b) {
    o.d = half(b.d);
    for (int i = 0; i < 32; i++) o.q[i] = (i < 16 ? b.q[i] & 15 : b.q[i - 16] >> 4) | (b.high[i / 8] >> i % 8 & 1) << 4;
}
void read(Block &o, const stored::Q5_0 &b) {
    read_five(o, b);
    for (int i = 0; i < 32; i++) o.q[i] -= 16;
}
void read(Block &o, const stored::Q5_1 &b) {
    read_five(o, b);
    o.m = half(b.m), o.has_min = true;
}
void read(Block &o, const stored::Q8_0 &b) {
    o.d = half(b.d);
    for (int i = 0; i < 32; i++) o.q[i] = b.q[i];
}
void read(Block &o, const stored::MXFP4 &b) {
    o.d = power(b.e);
    for (int i = 0; i < 32; i++) o.q[i] = E2M1[i < 16 ? b.q[i] & 15 : b.q[i - 16] >> 4];
}
template <class B> void read_k(Block &o, const B &b) {
    o.d = half(b.d), o.m = half(b.dmin), o.has_min = true;
    for (int j = 0; j < 8; j++) o.scale[j] = six_bits(b.scale, j, false), o.min[j] = six_bits(b.scale, j, true);
    for (int i = 0; i < 256; i++) o.q[i] = b.q[i / 64 * 32 + i % 32] >> (i % 64 < 32 ? 0 : 4) & 15;
}
void read(Block &o, const stored::Q4_K &b) { read_k(o, b); }
void read(Block &o, const stored::Q5_K &b) {
    read_k(o, b);
    for (int i = 0; i < 256; i++) o.q[i] |= (b.high[i % 32] >> i / 32 & 1) << 4;
}
void read(Block &o, const stored::Q6_K &b) {
    o.d = half(b.d);
    for (int j = 0; j < 16; j++) o.scale[j] = b.scale[j];
    for (int i = 0; i < 256; i++) {
        const int h = i / 128, g = i % 128 / 32, e = i % 32;
        const int low = b.low[64 * h + 32 * (g % 2) + e] >> (g < 2 ? 0 : 4) & 15;
        o.q[i] = (low | (b.high[32 * h + e] >> 2 * g & 3) << 4) - 32;
    }
}
void read(Block &o, const stored::Q2_K &b) {
    o.d = half(b.d), o.m = half(b.dmin), o.has_min = true;
    for (int j = 0; j < 16; j++) o.scale[j] = b.scale[j] & 15, o.min[j] = b.scale[j] >> 4;
    for (int i = 0; i < 256; i++) o.q[i] = b.q[i / 128 * 32 + i % 32] >> 2 * (i % 128 / 32) & 3;
}
void read(Block &o, const stored::Q3_K &b) {
    o.d = half(b.d);
    for (int j = 0; j < 16; j++)
        o.scale[j] = ((b.scale[j % 8] >> (j < 8 ? 0 : 4) & 15) | (b.scale[8 + j % 4] >> 2 * (j / 4) & 3) << 4) - 32;
    for (int i = 0; i < 256; i++)
        o.q[i] = (b.q[i / 128 * 32 + i % 32] >> 2 * (i % 128 / 32) & 3) - (b.high[i % 32] >> i / 32 & 1 ? 0 : 4);
}
void read(Block &o, const stored::IQ4_XS &b) {
    o.d = half(b.d);
    for (int j = 0; j < 8; j++)
        o.scale[j] = ((b.scale_low[j / 2] >> 4 * (j % 2) & 15) | (b.scale_high >> 2 * j & 3) << 4) - 32;
    for (int i = 0; i < 256; i++) o.q[i] = IQ4[b.q[i / 32 * 16 + i % 16] >> (i % 32 < 16 ? 0 : 4) & 15];
}

void read(Block &o, int type, const void *row, int64_t i) {
    switch (type) {
    case Q4_0: return read(o, ((const stored::Q4_0 *)row)[i]);
    case IQ4_NL: return read_iq4(o, ((const stored::Q4_0 *)row)[i]);
    case Q4_1: return read(o, ((const stored::Q4_1 *)row)[i]);
    case Q5_0: return read(o, ((const stored::Q5_0 *)row)[i]);
    case Q5_1: return read(o, ((const stored::Q5_1 *)row)[i]);
    case Q8_0: return read(o, ((const stored::Q8_0 *)row)[i]);
    case MXFP4: return read(o, ((const stored::MXFP4 *)row)[i]);
    case Q2_K: return read(o, ((const stored::Q2_K *)row)[i]);
    case Q3_K: return read(o, ((const stored::Q3_K *)row)[i]);
    case Q4_K: return read(o, ((const stored::Q4_K *)row)[i]);
    case Q5_K: return read(o, ((const stored::Q5_K *)row)[i]);
    case Q6_K: return read(o, ((const stored::Q6_K *)row)[i]);
    case IQ4_XS: return read(o, ((const stored::IQ4_XS *)row)[i]);
    }
}

float weight(int type, const void *row, int64_t i) {
    if (type == F32) return ((const float *)row)[i];
    const uint16_t w = ((const uint16_t *)row)[i];
    return type == F16 ? half(w) : float_of((int32_t)((uint32_t)w << 16));
}

float product(int type, const void *row, const int32_t *a, int64_t values) {
    const TypeFacts &t = *facts(type);
    float f = 0;
    if (t.form == Form::floats) {
        for (int64_t i = 0; i < values; i++) f = fmaf(weight(type, row, i), float_of(a[i]), f);
        return f;
    }
    const int size = t.stored_values, words = block_words(t.form), part = t.form == Form::parts16 ? 16 : 32;
    for (int64_t i = 0; i < values / size; i++, a += words) {
        Block b;
        read(b, type, row, i);
        const int8_t *y = (const int8_t *)a;
        const float dy = float_of(a[t.form == Form::blocks32 ? 9 : words - 1]);
        int sum = 0, less = 0;
        for (int k = 0; k < size; k++) {
            sum += (size == 32 ? 1 : b.scale[k / part]) * b.q[k] * y[k];
            less += b.min[size == 32 ? 0 : k / part] * y[k];
        }
        f = fmaf((float)sum, b.d * dy, f);
        if (b.has_min) f = size == 32 ? fmaf(b.m, float_of(a[10]), f) : fmaf(-(float)less, b.m * dy, f);
    }
    return f;
}

// e to the power of x <= 0, as attention_kernels.h computes it.
float exp_below_zero(float x) {
    if (!(x >= -87.0f)) return 0;
    const float n = rintf(x * 1.44269504f);
    float r = fmaf(-n, 0.693359375f, x), p = 1.0f / 720;
    r = fmaf(-n, -2.12194440e-4f, r);
    for (float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = fmaf(p, r, c);
    int32_t bits;
    memcpy(&bits, &p, 4);
    return float_of((int32_t)((uint32_t)bits + ((uint32_t)(int32_t)n << 23)));
}

} // namespace

void reference(const Attention &a) {
    const auto seen = [&](int64_t stream, int64_t row, int64_t cell) {
        return a.mask ? ((const uint16_t *)((const char *)a.mask + stream * a.mask_stream + row * a.mask_row))[cell] : (uint16_t)0;
    };
    const auto tree = [](float *l) {
        for (int i = 0; i < 8; i++) l[i] += l[i + 8];
        return ((l[0] + l[1]) + (l[2] + l[3])) + ((l[4] + l[5]) + (l[6] + l[7]));
    };
    const auto read = [](std::vector<float> &to, const char *from, void (*convert)(const void *, float *, int64_t)) {
        if (convert) convert(from, to.data(), (int64_t)to.size());
        else for (size_t i = 0; i < to.size(); i++) to[i] = half(((const uint16_t *)from)[i]);
    };
    for (int64_t stream = 0; stream < a.streams; stream++)
        for (int64_t row = 0; row < a.rows; row++)
            for (int64_t head = 0; head < a.heads; head++) {
                const int64_t key_head = head / a.group();
                const float *q = (const float *)a.query.at(row, head, stream);
                std::vector<float> key((size_t)a.values), value((size_t)a.out_values), part(value.size());
                std::vector<int64_t> list;
                for (int64_t c = 0; c < a.cells; c++)
                    if (seen(stream, row, c) != 0xfc00) list.push_back(c);
                float m = 0, s = 0;
                std::vector<float> v((size_t)a.out_values, 0.0f);
                for (size_t first = 0; first < list.size(); first += PART) {
                    const size_t n = std::min<size_t>(PART, list.size() - first);
                    float p[PART], most = -INFINITY, lanes[16] = {};
                    for (size_t c = 0; c < n; c++) {
                        read(key, a.key.at(list[first + c], key_head, stream), a.key_floats);
                        float l[16] = {};
                        for (int64_t i = 0; i < a.values; i++) l[i % 16] = fmaf(q[i], key[(size_t)i], l[i % 16]);
                        p[c] = tree(l) * a.scale;
                        if (a.softcap != 0) {
                            const float e = exp_below_zero(std::max(p[c], -p[c]) * -2);
                            p[c] = a.softcap * copysignf((1 - e) / (1 + e), p[c]);
                        }
                        p[c] += a.slope(head) * half(seen(stream, row, list[first + c]));
                        most = std::max(most, p[c]);
                    }
                    for (size_t c = 0; c < n; c++) p[c] = exp_below_zero(p[c] - most), lanes[c % 16] += p[c];
                    const float sum = tree(lanes), next = std::max(m, most);
                    const float here = exp_below_zero(m - next), there = exp_below_zero(most - next);
                    std::fill(part.begin(), part.end(), 0.0f);
                    for (size_t c = 0; c < n; c++) {
                        read(value, a.value.at(list[first + c], key_head, stream), a.value_floats);
                        for (size_t i = 0; i < part.size(); i++) part[i] = fmaf(p[c], value[i], part[i]);
                    }
                    for (size_t i = 0; i < part.size(); i++) v[i] = first == 0 ? part[i] : fmaf(part[i], there, v[i] * here);
                    s = first == 0 ? sum : s * here + sum * there;
                    m = first == 0 ? most : next;
                }
                if (a.sinks) {
                    const float next = s == 0 ? a.sinks[head] : std::max(m, a.sinks[head]);
                    const float here = s == 0 ? 0 : exp_below_zero(m - next);
                    for (float &one : v) one *= here;
                    s = s * here + exp_below_zero(a.sinks[head] - next);
                }
                for (size_t i = 0; i < v.size(); i++) ((float *)a.out.at(row, head, stream))[i] = v[i] * (s == 0 ? 0.0f : 1.0f / s);
            }
}

void reference(int type, const void *weights, int64_t values, int64_t rows, const float *x, int64_t n, float *y) {
    const TypeFacts &t = *facts(type);
    const int64_t blocks = values / block_values(t.form), row = values / t.stored_values * t.stored_bytes;
    std::vector<int32_t> a((size_t)(blocks * block_words(t.form)));
    for (int64_t k = 0; k < n; k++) {
        const float *from = x + k * values;
        switch (t.form) {
        case Form::parts16: quantize<Scalar, Form::parts16>(from, 0, blocks, a.data(), 1, 0); break;
        case Form::parts32: quantize<Scalar, Form::parts32>(from, 0, blocks, a.data(), 1, 0); break;
        case Form::blocks32: quantize<Scalar, Form::blocks32>(from, 0, blocks, a.data(), 1, 0); break;
        case Form::floats: quantize<Scalar, Form::floats>(from, 0, blocks, a.data(), 1, 0); break;
        }
        for (int64_t r = 0; r < rows; r++) y[k * rows + r] = product(type, (const char *)weights + r * row, a.data(), values);
    }
}

} // namespace specllama
