// Packing: blocks of 16 rows, as a file holds them, put side by side. Four bytes at a time.
#include "layout.h"

#include <cstring>

namespace specllama {
namespace {

constexpr uint32_t LOW = 0x0f0f0f0f, TWO = 0x03030303, ONE = 0x01010101;

inline uint32_t word(const uint8_t *p, int i) {
    uint32_t w;
    memcpy(&w, p + 4 * i, 4);
    return w;
}

inline void put(packed::Vector &v, int row, uint32_t w) { memcpy(v + 4 * row, &w, 4); }

inline uint32_t low(uint32_t w) { return w & LOW; }
inline uint32_t high(uint32_t w) { return (w >> 4) & LOW; }

// The four bits t of `bits` as the bits of four bytes: where group t has its fifth bits.
inline uint32_t spread(uint32_t bits) {
    return ((bits & 1) | (bits & 2) << 7 | (bits & 4) << 14 | (bits & 8) << 21);
}

inline uint32_t fifth_bits(const uint8_t *bits) {  // 32 bits: bit 4 t + c goes to byte c, bit t
    uint32_t all = word(bits, 0), w = 0;
    for (int t = 0; t < 8; t++) w |= spread(all >> 4 * t & 15) << t;
    return w;
}

inline void nibbles(packed::Vector *q, const uint8_t *from, int row) {
    for (int t = 0; t < 4; t++) put(q[t], row, word(from, t));
}

// 32 bytes of halves: low halves are one part, high halves the next; two groups share a vector.
inline void two_parts(packed::Vector (*q)[4], const uint8_t *from, int row) {
    for (int p = 0; p < 4; p++, from += 32)
        for (int t = 0; t < 4; t++) {
            uint32_t a = word(from, t), b = word(from, t + 4);
            put(q[2 * p][t], row, low(a) | low(b) << 4);
            put(q[2 * p + 1][t], row, high(a) | (b & ~LOW));
        }
}

// Eight scales and minima of six bits (ggml-quants.c, get_scale_min_k4).
template <class P> inline void scales_and_minima(P &o, const uint8_t *s, int row) {
    for (int j = 0; j < 8; j++) {
        o.scale[j][row] = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
        o.min[j / 2][row][j % 2] = j < 4 ? s[j + 4] & 63 : s[j + 4] >> 4 | (s[j] >> 6) << 4;
    }
}

void add(packed::Nibbles32<2> &o, int i, const stored::Q4_0 &b, int row) {
    o.d[i][row] = b.d;
    nibbles(o.q[i], b.q, row);
}

void add(packed::Q4_1 &o, int, const stored::Q4_1 &b, int row) {
    o.d[row] = b.d, o.m[row] = b.m;
    nibbles(o.q, b.q, row);
}

void add(packed::Q5_0 &o, int i, const stored::Q5_0 &b, int row) {
    o.d[i][row] = b.d;
    put(o.high[i], row, fifth_bits(b.high));
    nibbles(o.q[i], b.q, row);
}

void add(packed::Q5_1 &o, int, const stored::Q5_1 &b, int row) {
    o.d[row] = b.d, o.m[row] = b.m;
    put(o.high, row, fifth_bits(b.high));
    nibbles(o.q, b.q, row);
}

void add(packed::Q8_0 &o, int i, const stored::Q8_0 &b, int row) {
    o.d[i][row] = b.d;
    for (int t = 0; t < 8; t++) put(o.q[i][t], row, word((const uint8_t *)b.q, t));
}

void add(packed::MXFP4 &o, int i, const stored::MXFP4 &b, int row) {
    o.e[i][row] = b.e;
    nibbles(o.q[i], b.q, row);
}

void add(packed::Q4_K &o, int, const stored::Q4_K &b, int row) {
    o.d[row] = b.d, o.dmin[row] = b.dmin;
    scales_and_minima(o, b.scale, row);
    two_parts(o.q, b.q, row);
}

void add(packed::Q5_K &o, int, const stored::Q5_K &b, int row) {
    o.d[row] = b.d, o.dmin[row] = b.dmin;
    scales_and_minima(o, b.scale, row);
    two_parts(o.q, b.q, row);
    for (int j = 0; j < 8; j++) {  // bit j of high[k]: of value k of part j
        uint32_t w = 0;
        for (int t = 0; t < 8; t++) w |= (word(b.high, t) >> j & ONE) << t;
        put(o.high[j], row, w);
    }
}

void add(packed::Q6_K &o, int, const stored::Q6_K &b, int row) {
    o.d[row] = b.d;
    for (int j = 0; j < 16; j++) {
        o.scale[j][row] = b.scale[j];
        // a half h of 128 values has four quarters g, whose low bits lie in 64 bytes (two quarters
        // a byte), their high bits in 32 (two bits each)
        const int h = j / 8, g = j % 8 / 2, first = j % 2 * 4;
        const uint8_t *ql = b.low + 64 * h + 32 * (g & 1), *qh = b.high + 32 * h;
        uint32_t lows[4], bits = 0;
        for (int t = 0; t < 4; t++) {
            lows[t] = word(ql, first + t) >> (g < 2 ? 0 : 4) & LOW;
            bits |= (word(qh, first + t) >> 2 * g & TWO) << 2 * t;
        }
        put(o.low[j][0], row, lows[0] | lows[1] << 4);
        put(o.low[j][1], row, lows[2] | lows[3] << 4);
        put(o.high[j], row, bits);
    }
}

void add(packed::Q2_K &o, int, const stored::Q2_K &b, int row) {
    o.d[row] = b.d, o.dmin[row] = b.dmin;
    for (int j = 0; j < 16; j++) {
        o.scale[j][row] = b.scale[j] & 15;
        o.min[j / 2][row][j % 2] = b.scale[j] >> 4;
        const int h = j / 8, g = j % 8 / 2, first = j % 2 * 4;
        uint32_t w = 0;
        for (int t = 0; t < 4; t++) w |= (word(b.q + 32 * h, first + t) >> 2 * g & TWO) << 2 * t;
        put(o.q[j], row, w);
    }
}

void add(packed::Q3_K &o, int, const stored::Q3_K &b, int row) {
    o.d[row] = b.d;
    uint32_t highs[8] = {};
    for (int j = 0; j < 16; j++) {
        // 16 scales of six bits, 32 too large: low halves in eight bytes, two high bits in four
        const uint8_t *s = b.scale;
        const int l = (j < 8 ? s[j] : s[j - 8] >> 4) & 15;
        o.scale[j][row] = (int8_t)((l | (s[8 + j % 4] >> 2 * (j / 4) & 3) << 4) - 32);
        const int h = j / 8, g = j % 8 / 2, first = j % 2 * 4;
        uint32_t w = 0;
        for (int t = 0; t < 4; t++) {
            w |= (word(b.q + 32 * h, first + t) >> 2 * g & TWO) << 2 * t;
            highs[j / 2] |= (word(b.high, first + t) >> (4 * h + g) & ONE) << (first + t);
        }
        put(o.low[j], row, w);
    }
    for (int p = 0; p < 8; p++) put(o.high[p], row, highs[p]);
}

void add(packed::IQ4_XS &o, int, const stored::IQ4_XS &b, int row) {
    o.d[row] = b.d;
    for (int j = 0; j < 8; j++) {
        const int l = b.scale_low[j / 2] >> 4 * (j % 2) & 15, h = b.scale_high >> 2 * j & 3;
        o.scale[j][row] = (int8_t)((l | h << 4) - 32);
        for (int t = 0; t < 4; t++) put(o.q[j][t], row, word(b.q + 16 * j, t));
    }
}

template <class P, class S> void pack_rows(const void *from, int64_t values, int64_t rows, int per, int size, char *to) {
    const int64_t blocks = values / size;
    for (int row = 0; row < rows; row++) {
        const S *b = (const S *)from + row * blocks;
        for (int64_t i = 0; i < blocks; i++) add(((P *)to)[i / per], (int)(i % per), b[i], row);
    }
}

template <class T> void pack_floats(const void *from, int64_t values, int64_t rows, char *to) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t k = 0; k < values; k++)
            memcpy(to + (k * ROWS + row) * sizeof(T), (const T *)from + row * values + k, sizeof(T));
}

struct Entry {
    TypeFacts facts;
    void (*pack)(const void *, int64_t values, int64_t rows, char *to);
};

template <class P, class S, int SIZE, int PER> void pack_as(const void *from, int64_t values, int64_t rows, char *to) {
    pack_rows<P, S>(from, values, rows, PER, SIZE, to);
}

template <class P, class S, int SIZE, int PER> constexpr Entry entry(Form form) {
    return {{form, SIZE, (int)sizeof(S), SIZE * PER, (int)sizeof(P)}, pack_as<P, S, SIZE, PER>};
}

template <class T> constexpr Entry floats() {
    return {{Form::floats, 1, (int)sizeof(T), 1, (int)(ROWS * sizeof(T))}, pack_floats<T>};
}

const Entry *entry_of(int type) {
    static const Entry f32 = floats<float>(), half = floats<uint16_t>();
    static const Entry q4_0 = entry<packed::Nibbles32<2>, stored::Q4_0, 32, 2>(Form::blocks32);
    static const Entry q4_1 = entry<packed::Q4_1, stored::Q4_1, 32, 1>(Form::blocks32);
    static const Entry q5_0 = entry<packed::Q5_0, stored::Q5_0, 32, 2>(Form::blocks32);
    static const Entry q5_1 = entry<packed::Q5_1, stored::Q5_1, 32, 1>(Form::blocks32);
    static const Entry q8_0 = entry<packed::Q8_0, stored::Q8_0, 32, 2>(Form::blocks32);
    static const Entry mxfp4 = entry<packed::MXFP4, stored::MXFP4, 32, 4>(Form::blocks32);
    static const Entry q2_k = entry<packed::Q2_K, stored::Q2_K, 256, 1>(Form::parts16);
    static const Entry q3_k = entry<packed::Q3_K, stored::Q3_K, 256, 1>(Form::parts16);
    static const Entry q4_k = entry<packed::Q4_K, stored::Q4_K, 256, 1>(Form::parts32);
    static const Entry q5_k = entry<packed::Q5_K, stored::Q5_K, 256, 1>(Form::parts32);
    static const Entry q6_k = entry<packed::Q6_K, stored::Q6_K, 256, 1>(Form::parts16);
    static const Entry iq4_xs = entry<packed::IQ4_XS, stored::IQ4_XS, 256, 1>(Form::parts32);
    switch (type) {
    case F32: return &f32;
    case F16: case BF16: return &half;
    case Q4_0: case IQ4_NL: return &q4_0;
    case Q4_1: return &q4_1;
    case Q5_0: return &q5_0;
    case Q5_1: return &q5_1;
    case Q8_0: return &q8_0;
    case MXFP4: return &mxfp4;
    case Q2_K: return &q2_k;
    case Q3_K: return &q3_k;
    case Q4_K: return &q4_k;
    case Q5_K: return &q5_k;
    case Q6_K: return &q6_k;
    case IQ4_XS: return &iq4_xs;
    default: return nullptr;
    }
}

} // namespace

const TypeFacts *facts(int type) {
    const Entry *e = entry_of(type);
    return e ? &e->facts : nullptr;
}

size_t packed_row_bytes(int type, int64_t values) {
    const TypeFacts &f = *facts(type);
    return (size_t)((values + f.packed_values - 1) / f.packed_values) * f.packed_bytes;
}

size_t packed_bytes(int type, int64_t values, int64_t rows) {
    return (size_t)((rows + ROWS - 1) / ROWS) * packed_row_bytes(type, values);
}

void pack(int type, const void *from, int64_t values, int64_t rows, void *to, int64_t first, int64_t last) {
    const Entry &e = *entry_of(type);
    const size_t row = (size_t)(values / e.facts.stored_values) * e.facts.stored_bytes;
    const size_t size = packed_row_bytes(type, values);
    for (int64_t g = first; g < last; g++) {
        const int64_t here = rows - g * ROWS < ROWS ? rows - g * ROWS : ROWS;
        char *out = (char *)to + g * size;
        if (here < ROWS || values % e.facts.packed_values) memset(out, 0, size);
        e.pack((const char *)from + g * ROWS * row, values, here, out);
    }
}

} // namespace specllama
