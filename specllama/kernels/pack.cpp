// Packing: blocks of 16 rows, as a file holds them, put side by side. Four bytes of each at a time.
#include "layout.h"

#include <cstring>
#include <vector>

namespace specllama {
namespace {

// One word of each of 16 rows, and what is done with all of them at once.
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Shorts __attribute__((vector_size(32)));
typedef uint8_t Bytes __attribute__((vector_size(16)));

constexpr uint32_t LOW = 0x0f0f0f0f, TWO = 0x03030303, ONE = 0x01010101;

// Blocks of 16 rows: where the first row has a field, and how far apart the rows are, in bytes.
struct Rows {
    const char *field;
    size_t apart;
    template <class T> T of(int row) const {
        T x;
        memcpy(&x, field + row * apart, sizeof x);
        return x;
    }
    Words word(int i) const {
        Words w;
        for (int row = 0; row < ROWS; row++) w[row] = Rows{field + 4 * i, apart}.of<uint32_t>(row);
        return w;
    }
    void copy(packed::Halves &to) const {
        for (int row = 0; row < ROWS; row++) to[row] = of<uint16_t>(row);
    }
};

// The same block of 16 rows; `b.at(&S::field)` are their fields.
template <class S> struct Blocks {
    const S *first;
    size_t apart;
    template <class F> Rows at(F S::*field) const { return {(const char *)&(first->*field), apart}; }
};

inline void put(packed::Vector &v, Words w) { memcpy(v, &w, sizeof w); }
template <class B> void put_bytes(B &to, Words w) {  // the lowest byte of each word
    const Bytes b = __builtin_convertvector(w, Bytes);
    memcpy(to, &b, sizeof b);
}
inline void put_pairs(packed::Pairs &to, Words even, Words odd) {
    const Shorts s = __builtin_convertvector((even & 0xff) | (odd & 0xff) << 8, Shorts);
    memcpy(to, &s, sizeof s);
}

inline Words low(Words w) { return w & LOW; }
inline Words high(Words w) { return (w >> 4) & LOW; }

// Bits of 32 values, one each: bit 4 t + c goes to byte c, bit t.
inline Words fifth_bits(Words all) {
    Words w = {};
    for (int t = 0; t < 8; t++, all >>= 4)
        w |= ((all & 1) | (all & 2) << 7 | (all & 4) << 14 | (all & 8) << 21) << t;
    return w;
}

inline void nibbles(packed::Vector *q, Rows from) {
    for (int t = 0; t < 4; t++) put(q[t], from.word(t));
}

// 32 bytes of halves: low halves are one part, high halves the next; two groups share a vector.
inline void two_parts(packed::Vector (*q)[4], Rows from) {
    for (int p = 0; p < 4; p++)
        for (int t = 0; t < 4; t++) {
            const Words a = from.word(8 * p + t), b = from.word(8 * p + t + 4);
            put(q[2 * p][t], low(a) | low(b) << 4);
            put(q[2 * p + 1][t], high(a) | (b & ~LOW));
        }
}

// Quarter g of four words that hold two bits of four quarters, in one word.
inline Words two_bits(const Words *four, int g) {
    Words w = {};
    for (int t = 0; t < 4; t++) w |= (four[t] >> 2 * g & TWO) << 2 * t;
    return w;
}

// 64 bytes, of two bits four times.
inline void pairs_of_bits(packed::Vector *q, Rows from) {
    for (int h = 0; h < 2; h++)
        for (int e = 0; e < 2; e++) {
            Words four[4];
            for (int t = 0; t < 4; t++) four[t] = from.word(8 * h + 4 * e + t);
            for (int g = 0; g < 4; g++) put(q[8 * h + 2 * g + e], two_bits(four, g));
        }
}

// Eight scales and minima of six bits (ggml-quants.c, get_scale_min_k4), four a word.
template <class P> inline void scales_and_minima(P &o, Rows from) {
    const Words s = from.word(0), m = from.word(1), rest = from.word(2);
    const Words scale[2] = {s & 0x3f3f3f3f, low(rest) | (s >> 6 & TWO) << 4};
    const Words min[2] = {m & 0x3f3f3f3f, high(rest) | (m >> 6 & TWO) << 4};
    for (int j = 0; j < 8; j++) put_bytes(o.scale[j], scale[j / 4] >> 8 * (j % 4));
    for (int p = 0; p < 4; p++) put_pairs(o.min[p], min[p / 2] >> 16 * (p % 2), min[p / 2] >> (16 * (p % 2) + 8));
}

void add(packed::Nibbles32<2> &o, int i, Blocks<stored::Q4_0> b) {
    b.at(&stored::Q4_0::d).copy(o.d[i]);
    nibbles(o.q[i], b.at(&stored::Q4_0::q));
}

void add(packed::Q4_1 &o, int, Blocks<stored::Q4_1> b) {
    b.at(&stored::Q4_1::d).copy(o.d);
    b.at(&stored::Q4_1::m).copy(o.m);
    nibbles(o.q, b.at(&stored::Q4_1::q));
}

void add(packed::Q5_0 &o, int i, Blocks<stored::Q5_0> b) {
    b.at(&stored::Q5_0::d).copy(o.d[i]);
    put(o.high[i], fifth_bits(b.at(&stored::Q5_0::high).word(0)));
    nibbles(o.q[i], b.at(&stored::Q5_0::q));
}

void add(packed::Q5_1 &o, int, Blocks<stored::Q5_1> b) {
    b.at(&stored::Q5_1::d).copy(o.d);
    b.at(&stored::Q5_1::m).copy(o.m);
    put(o.high, fifth_bits(b.at(&stored::Q5_1::high).word(0)));
    nibbles(o.q, b.at(&stored::Q5_1::q));
}

void add(packed::Q8_0 &o, int i, Blocks<stored::Q8_0> b) {
    b.at(&stored::Q8_0::d).copy(o.d[i]);
    for (int t = 0; t < 8; t++) put(o.q[i][t], b.at(&stored::Q8_0::q).word(t));
}

void add(packed::MXFP4 &o, int i, Blocks<stored::MXFP4> b) {
    for (int row = 0; row < ROWS; row++) o.e[i][row] = b.at(&stored::MXFP4::e).of<uint8_t>(row);
    nibbles(o.q[i], b.at(&stored::MXFP4::q));
}

void add(packed::Q4_K &o, int, Blocks<stored::Q4_K> b) {
    b.at(&stored::Q4_K::d).copy(o.d);
    b.at(&stored::Q4_K::dmin).copy(o.dmin);
    scales_and_minima(o, b.at(&stored::Q4_K::scale));
    two_parts(o.q, b.at(&stored::Q4_K::q));
}

void add(packed::Q5_K &o, int, Blocks<stored::Q5_K> b) {
    b.at(&stored::Q5_K::d).copy(o.d);
    b.at(&stored::Q5_K::dmin).copy(o.dmin);
    scales_and_minima(o, b.at(&stored::Q5_K::scale));
    two_parts(o.q, b.at(&stored::Q5_K::q));
    Words bits[8] = {};  // bit j of a word's bytes: of values of part j
    for (int t = 0; t < 8; t++) {
        const Words w = b.at(&stored::Q5_K::high).word(t);
        for (int j = 0; j < 8; j++) bits[j] |= (w >> j & ONE) << t;
    }
    for (int j = 0; j < 8; j++) put(o.high[j], bits[j]);
}

// Types with 16 parts: a half h of 128 values has four quarters of two parts each. Part e of every
// quarter lies in the same bytes, at other bits.
void add(packed::Q6_K &o, int, Blocks<stored::Q6_K> b) {
    b.at(&stored::Q6_K::d).copy(o.d);
    for (int j = 0; j < 16; j++) put_bytes(o.scale[j], b.at(&stored::Q6_K::scale).word(j / 4) >> 8 * (j % 4));
    for (int h = 0; h < 2; h++)
        for (int e = 0; e < 2; e++) {
            Words lows[8], highs[4];  // low bits: two quarters a byte; high bits: all four
            for (int t = 0; t < 8; t++) lows[t] = b.at(&stored::Q6_K::low).word(16 * h + t / 4 * 8 + 4 * e + t % 4);
            for (int t = 0; t < 4; t++) highs[t] = b.at(&stored::Q6_K::high).word(8 * h + 4 * e + t);
            for (int g = 0; g < 4; g++) {
                const int j = 8 * h + 2 * g + e;
                const Words *l = lows + g % 2 * 4;
                for (int k = 0; k < 2; k++)
                    put(o.low[j][k], g < 2 ? low(l[2 * k]) | low(l[2 * k + 1]) << 4 : high(l[2 * k]) | (l[2 * k + 1] & ~LOW));
                put(o.high[j], two_bits(highs, g));
            }
        }
}

void add(packed::Q2_K &o, int, Blocks<stored::Q2_K> b) {
    b.at(&stored::Q2_K::d).copy(o.d);
    b.at(&stored::Q2_K::dmin).copy(o.dmin);
    for (int j = 0; j < 16; j++) {
        const Words s = b.at(&stored::Q2_K::scale).word(j / 4) >> 8 * (j % 4);
        put_bytes(o.scale[j], s & 15);
        if (j % 2 == 0) put_pairs(o.min[j / 2], s >> 4 & 15, s >> 12 & 15);
    }
    pairs_of_bits(o.q, b.at(&stored::Q2_K::q));
}

void add(packed::Q3_K &o, int, Blocks<stored::Q3_K> b) {
    b.at(&stored::Q3_K::d).copy(o.d);
    // 16 scales of six bits, 32 too large: low halves in eight bytes, two high bits in four
    const Rows s = b.at(&stored::Q3_K::scale);
    const Words first = s.word(0), second = s.word(1), last = s.word(2);
    for (int j = 0; j < 16; j++) {
        const Words l = (j % 8 < 4 ? first : second) >> (8 * (j % 4) + j / 8 * 4) & 15;
        put_bytes(o.scale[j], (l | (last >> (8 * (j % 4) + 2 * (j / 4)) & 3) << 4) - 32);
    }
    pairs_of_bits(o.low, b.at(&stored::Q3_K::q));
    for (int p = 0; p < 8; p++) {  // bit t of high[p]: of parts 2 p and 2 p + 1
        Words bits = {};
        for (int t = 0; t < 8; t++) bits |= (b.at(&stored::Q3_K::high).word(t) >> p & ONE) << t;
        put(o.high[p], bits);
    }
}

void add(packed::IQ4_XS &o, int, Blocks<stored::IQ4_XS> b) {
    b.at(&stored::IQ4_XS::d).copy(o.d);
    for (int row = 0; row < ROWS; row++) {
        const stored::IQ4_XS s = Rows{(const char *)b.first, b.apart}.of<stored::IQ4_XS>(row);
        for (int j = 0; j < 8; j++)
            o.scale[j][row] = (int8_t)(((s.scale_low[j / 2] >> 4 * (j % 2) & 15) | (s.scale_high >> 2 * j & 3) << 4) - 32);
    }
    for (int j = 0; j < 32; j++) put(o.q[j / 4][j % 4], b.at(&stored::IQ4_XS::q).word(j));
}

template <class P, class S> void pack_blocks(const char *from, int64_t blocks, int per, char *to) {
    for (int64_t i = 0; i < blocks; i++)
        add(((P *)to)[i / per], (int)(i % per), Blocks<S>{(const S *)from + i, blocks * sizeof(S)});
}

template <class T> void pack_floats(const char *from, int64_t values, char *to) {
    for (int64_t k = 0; k < values; k++)
        for (int row = 0; row < ROWS; row++)
            memcpy(to + (k * ROWS + row) * sizeof(T), from + (row * values + k) * sizeof(T), sizeof(T));
}

struct Entry {
    TypeFacts facts;
    void (*pack)(const char *, int64_t values, char *to);  // 16 rows
};

template <class P, class S, int SIZE, int PER> void pack_as(const char *from, int64_t values, char *to) {
    pack_blocks<P, S>(from, values / SIZE, PER, to);
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
    std::vector<char> filled;
    for (int64_t g = first; g < last; g++) {
        const char *rows_here = (const char *)from + g * ROWS * row;
        if (const int64_t here = rows - g * ROWS; here < ROWS) {
            filled.assign(ROWS * row, 0);
            memcpy(filled.data(), rows_here, here * row);
            rows_here = filled.data();
        }
        char *out = (char *)to + g * size;
        if (values % e.facts.packed_values) memset(out, 0, size);
        e.pack(rows_here, values, out);
    }
}

} // namespace specllama
