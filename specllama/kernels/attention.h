// Attention of rows over the cells of a cache (FLASH_ATTN_EXT).
//
// A row sees some cells; `Attention` lists them in the cache's order and cuts the list into parts of
// 64. The order of sums of a row and a head depends on that list alone:
//
//   score of a cell   16 lanes, lane l over values l, l + 16, ...; then lanes l and l + 8, then
//                     neighbours, and neighbours of these
//   a part            m: the largest score; p = exp(score - m); s: the p, in 16 lanes as above;
//                     v: p times the cell's values, one chain over the cells
//   all parts         one chain: the running (m, s, v) and the next part, both brought to the
//                     larger m; then the sink, if there is one; the result is v / s
//
// So neither other rows, nor cells that the row does not see, nor threads change a bit.
#pragma once
#include "layout.h"

namespace specllama {

constexpr int PART = 64;   // cells
constexpr int BLOCK = 16;  // rows that read a part together

// Where a tensor's rows lie: row i of head h of stream s is at data + i * row + h * head + s * stream.
struct Place {
    char *data;
    size_t row, head, stream;
    char *at(int64_t i, int64_t h, int64_t s) const { return data + i * row + h * head + s * stream; }
};

struct Attention {
    int64_t rows, heads, key_heads, cells, streams;
    int64_t values, out_values;       // of a query or key; of a value
    float scale, softcap, max_bias;   // softcap, max_bias: 0 if there is none
    Place query, key, value, out;     // floats, any, any, floats
    const uint16_t *mask;             // half-precision; -infinity: not seen. Null: all cells are
    size_t mask_row, mask_stream;     // in bytes
    const float *sinks;               // a score a head, or null
    // rows of keys and values as floats; null: they are half-precision
    void (*key_floats)(const void *, float *, int64_t), (*value_floats)(const void *, float *, int64_t);

    size_t memory(int threads) const;
    // Thread ith of nth computes its part; all call it with equal arguments, and wait() for all.
    template <class Wait> void compute(const Kernels &k, int ith, int nth, void *memory, Wait wait) const {
        begin(ith, memory);
        wait();
        read_parts(k, ith, nth, memory);
        if (!splits(nth)) return;
        wait();
        join_parts(k, ith, nth, memory);
    }

    float slope(int64_t head) const;  // of ALiBi
    // True if parts of few rows are units of work: else a block of rows with all its parts is one.
    bool splits(int threads) const;
    int64_t group() const { return heads / key_heads; }  // heads that share keys and values

private:
    void begin(int ith, void *memory) const;
    void read_parts(const Kernels &k, int ith, int nth, void *memory) const;
    void join_parts(const Kernels &k, int ith, int nth, void *memory) const;
};

// What an instruction set does of it. Lengths of values are multiples of 16.
struct AttentionKernels {
    void (*halves)(const uint16_t *from, int64_t values, float *to);
    // scores[q][c] of n queries and `cells` cells, which lie one after the other
    void (*scores)(const float *queries, int64_t n, const float *keys, int cells, int64_t values, float (*scores)[PART]);
    // scores -> p; most and sum of them. bias: what is added to a score
    void (*weigh)(float *scores, int cells, float scale, float softcap, const float *bias, float *most, float *sum);
    // out[q] = p[q][c] times values of cell c, over all cells
    void (*mix)(const float (*p)[PART], int64_t n, const float *cells, int count, int64_t values, float *out);
    // Join (m, s, v) with one that follows it; v may be null: of a sink.
    void (*join)(float *m, float *s, float *v, float m2, float s2, const float *v2, int64_t values);
};

} // namespace specllama
