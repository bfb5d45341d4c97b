// How packed weights and activations lie in memory.
//
// 16 rows of a weight matrix stand side by side, four values at a time. One vector of 64 bytes is
//
//        row 0            row 1                    row 15
//     [k k+1 k+2 k+3] [k k+1 k+2 k+3]  ...  [k k+1 k+2 k+3]
//
// so one instruction multiplies four values of 16 rows with the same four activations, which are
// broadcast (AVX-512: one vector; AVX2: two halves; NEON: four quarters). Values below a byte share
// it: the low half of a byte belongs to one vector, the high half to another of the same rows, and
// further bits lie in a vector of their own ("high"). No row ever needs a sum across lanes.
//
// The order of sums of a row, in every width, thread and instruction set:
//   quantized types: whole numbers within a block, then one chain of floats over blocks, in order;
//   floats:          one chain over the values, in order.
#pragma once
#include <cstddef>
#include <cstdint>

namespace specllama {

constexpr int ROWS = 16;  // rows of weights side by side
constexpr int WIDEST = 8; // rows of activations that share one walk over the weights

// numbers of types in ggml.h
enum Type : int {
    F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11,
    Q4_K = 12, Q5_K = 13, Q6_K = 14, IQ4_NL = 20, IQ4_XS = 23, I32 = 26, BF16 = 30, MXFP4 = 39, TYPES = 40,
};

// Blocks of one row, as files hold them (ggml-common.h). d is the scale, m or dmin that of minima.
namespace stored {
struct Q4_0 { uint16_t d; uint8_t q[16]; };                   // value i: low half of q[i], i+16: high
struct Q4_1 { uint16_t d, m; uint8_t q[16]; };
struct Q5_0 { uint16_t d; uint8_t high[4], q[16]; };          // bit i of high: fifth bit of value i
struct Q5_1 { uint16_t d, m; uint8_t high[4], q[16]; };
struct Q8_0 { uint16_t d; int8_t q[32]; };
struct MXFP4 { uint8_t e, q[16]; };                           // e: exponent of two
struct Q2_K { uint8_t scale[16], q[64]; uint16_t d, dmin; };  // scale: low half, minimum: high half
struct Q3_K { uint8_t high[32], q[64], scale[12]; uint16_t d; };
struct Q4_K { uint16_t d, dmin; uint8_t scale[12], q[128]; }; // 8 scales and 8 minima of 6 bits
struct Q5_K { uint16_t d, dmin; uint8_t scale[12], high[32], q[128]; };
struct Q6_K { uint8_t low[128], high[64]; int8_t scale[16]; uint16_t d; };
struct IQ4_XS { uint16_t d, scale_high; uint8_t scale_low[4], q[128]; };
} // namespace stored

// The same blocks of 16 rows. Structs are multiples of 64 bytes, so small blocks come in groups.
namespace packed {
using Vector = uint8_t[64];                     // four values (or parts of eight) of 16 rows
using Halves = uint16_t[ROWS];                  // a half-precision number a row

template <int BLOCKS> struct alignas(64) Nibbles32 {     // Q4_0, IQ4_NL; BLOCKS = 2
    Halves d[BLOCKS];
    Vector q[BLOCKS][4];                        // vector t: group t in low halves, t + 4 in high
};
struct alignas(64) Q4_1 { Halves d, m; Vector q[4]; };
struct alignas(64) Q5_0 { Halves d[2]; Vector high[2], q[2][4]; };  // bit t of high: group t
struct alignas(64) Q5_1 { Halves d, m; Vector high, q[4]; };
struct alignas(64) Q8_0 { Halves d[2]; Vector q[2][8]; };
struct alignas(64) MXFP4 { uint8_t e[4][ROWS]; Vector q[4][4]; };

// 256 values in 8 parts of 32 (8 groups) or 16 parts of 16 (4 groups), each with a scale. Minima
// of two neighbouring parts alternate, row by row: they are multiplied as pairs.
using Pairs = uint8_t[ROWS][2];
struct alignas(64) Q4_K { Halves d, dmin; uint8_t scale[8][ROWS]; Pairs min[4]; Vector q[8][4]; };
struct alignas(64) Q5_K { Halves d, dmin; uint8_t scale[8][ROWS]; Pairs min[4]; Vector high[8], q[8][4]; };
struct alignas(64) Q6_K { Halves d; int8_t scale[16][ROWS]; alignas(64) Vector low[16][2], high[16]; };
struct alignas(64) Q2_K { Halves d, dmin; uint8_t scale[16][ROWS]; Pairs min[8]; Vector q[16]; };
struct alignas(64) Q3_K { Halves d; int8_t scale[16][ROWS]; alignas(64) Vector low[16], high[8]; };
struct alignas(64) IQ4_XS { Halves d; int8_t scale[8][ROWS]; alignas(64) Vector q[8][4]; };
} // namespace packed

// Activations of a tile of n rows, in words of 32 bits; word w of row r is at [w * n + r], so that
// the rows' words for one vector of weights are neighbours. Words of a block:
//   256 values: 64 words of four int8, then sums of neighbouring parts as two int16, then the scale
//   32 values:  8 words of four int8, minus offset times their sum, the scale, scale times their sum
//   floats:     the values
enum class Form : int { parts16, parts32, blocks32, floats };

constexpr int block_values(Form f) { return f <= Form::parts32 ? 256 : f == Form::blocks32 ? 32 : 1; }
constexpr int block_words(Form f) {
    return f == Form::parts16 ? 64 + 8 + 1 : f == Form::parts32 ? 64 + 4 + 1 : f == Form::blocks32 ? 11 : 1;
}

// What is known of a type; all but the kernels is the same for every instruction set.
struct TypeFacts {
    Form form;
    int stored_values, stored_bytes;  // of a block of a row
    int packed_values, packed_bytes;  // of a struct of 16 rows
};
const TypeFacts *facts(int type);     // null: a type that is not taken

size_t packed_row_bytes(int type, int64_t values);                  // of 16 rows
size_t packed_bytes(int type, int64_t values, int64_t rows);
// Pack rows [first, last) of 16 each; rows that the matrix lacks become zero.
void pack(int type, const void *from, int64_t values, int64_t rows, void *to, int64_t first, int64_t last);

// One instruction set. tile: products of 16 rows of weights with n rows of activations, into
// out[0..n-1][0..15]. quantize: values [from, to) (in blocks) of one row into its place in a tile.
using Tile = void (*)(const void *weights, const int32_t *activations, int64_t blocks, float *const *out);
using Quantize = void (*)(const float *x, int64_t from, int64_t to, int32_t *tile, int n, int offset);
struct AttentionKernels;
struct Kernels {
    const char *name;
    bool (*runs_here)();
    Tile tile[TYPES][WIDEST + 1];
    Quantize quantize[4];
    int offset[TYPES];  // of 32-value blocks: what is taken from each stored value
    int widest;         // the tile with the best use of its registers
    const AttentionKernels *attention;
};
extern const Kernels *const all_kernels[];  // the best first; ends in null

} // namespace specllama
