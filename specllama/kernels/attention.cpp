// Attention: which rows read which cells together, and how threads share that (attention.h).
#include "attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace specllama {
namespace {

int64_t padded(int64_t n) { return (n + ROWS - 1) / ROWS * ROWS; }

// Results of a part, or of all: a row of a head is a query.
struct Found {
    float *m, *s, *v;  // [query], [query], [query][values]
};

// The memory of one thread, for a block of rows and the heads that share a key head.
struct Scratch {
    int64_t queries, key_values, values;
    int32_t *seen;     // [BLOCK][cells]
    float *query, *cell;
    uint16_t *half;    // a row of keys or values, filled up with zeros
    float (*scores)[PART];
    Found part, all;
    char *end;

    Scratch(const Attention &a, char *memory)
        : queries(BLOCK * a.group()), key_values(padded(a.values)), values(padded(a.out_values)), end(memory) {
        seen = take<int32_t>(BLOCK * a.cells);
        query = take<float>(queries * key_values);
        cell = take<float>(PART * std::max(key_values, values));
        half = take<uint16_t>(std::max(key_values, values));
        scores = (float(*)[PART])take<float>(queries * PART);
        for (Found *f : {&part, &all})
            f->m = take<float>(queries), f->s = take<float>(queries), f->v = take<float>(queries * values);
    }
    template <class T> T *take(int64_t n) {
        char *at = end;
        end += (n * sizeof(T) + 63) / 64 * 64;
        return (T *)at;
    }
};

// A block of rows of a stream, and the cells that each sees.
struct Block {
    int64_t stream = -1, first = -1;
    int rows = 0;
    int64_t count[BLOCK], same[BLOCK];  // cells; those that the row before sees as well, from the first on

    void look(const Attention &a, int64_t of, int64_t from, int32_t *seen) {
        if (of == stream && from == first) return;
        stream = of, first = from, rows = (int)std::min<int64_t>(BLOCK, a.rows - from);
        constexpr uint16_t HIDDEN = 0xfc00;  // -infinity
        for (int r = 0; r < rows; r++) {
            int32_t *list = seen + r * a.cells;
            const auto *mask = (const uint16_t *)((const char *)a.mask + of * a.mask_stream + (from + r) * a.mask_row);
            int64_t n = 0;
            for (int64_t c = 0; c < a.cells; c++) {
                list[n] = (int32_t)c;
                n += !a.mask || mask[c] != HIDDEN;
            }
            count[r] = n;
            if (r == 0) continue;
            const int32_t *before = list - a.cells;
            const int64_t both = std::min(n, count[r - 1]);
            same[r] = std::mismatch(list, list + both, before).first - list;
        }
    }
    // Cells of part p of row r.
    int of_part(int r, int64_t p) const { return (int)std::clamp<int64_t>(count[r] - p * PART, 0, PART); }
    // True if row r sees in part p all that row r - 1 sees there, and perhaps more behind it.
    bool joins(int r, int64_t p) const { return same[r] >= p * PART + of_part(r - 1, p); }
    int64_t parts() const { return (*std::max_element(count, count + rows) + PART - 1) / PART; }
};

// Part p of the rows of a block: s.part. Rows without a cell there have m = -infinity.
void read_part(const Attention &a, const AttentionKernels &k, const Block &b, Scratch &s, int64_t key_head, int64_t p) {
    const int64_t group = a.group();
    for (int first = 0, last; first < b.rows; first = last) {
        for (last = first + 1; last < b.rows && b.joins(last, p);) last++;
        // the last row sees all that those before it see
        const int cells = b.of_part(last - 1, p), all = (cells + 3) / 4 * 4;
        const int32_t *list = s.seen + (last - 1) * a.cells + p * PART;
        const int64_t from = first * group, n = (last - first) * group;
        const auto read = [&](const Place &place, int64_t values, int64_t wide, void (*floats)(const void *, float *, int64_t)) {
            std::fill(s.half + values, s.half + wide, 0);
            for (int c = 0; c < all; c++) {
                float *to = s.cell + c * wide;
                if (c >= cells) {
                    std::fill(to, to + wide, 0.0f);
                    continue;
                }
                const char *row = place.at(list[c], key_head, b.stream);
                if (floats) {
                    floats(row, to, values);
                    std::fill(to + values, to + wide, 0.0f);
                } else if (values == wide) {
                    k.halves((const uint16_t *)row, wide, to);
                } else {
                    memcpy(s.half, row, values * sizeof(uint16_t));
                    k.halves(s.half, wide, to);
                }
            }
        };
        read(a.key, a.values, s.key_values, a.key_floats);
        k.scores(s.query + from * s.key_values, n, s.cell, all, s.key_values, s.scores + from);
        for (int r = first; r < last; r++) {
            const int mine = b.of_part(r, p);
            uint16_t added[PART] = {};
            float distance[PART], bias[PART] = {};
            if (a.mask) {
                const auto *mask = (const uint16_t *)((const char *)a.mask + b.stream * a.mask_stream + (b.first + r) * a.mask_row);
                for (int c = 0; c < mine; c++) added[c] = mask[list[c]];
                k.halves(added, PART, distance);
            }
            for (int64_t h = 0; h < group; h++) {
                const int64_t q = r * group + h;
                if (mine == 0) {
                    s.part.m[q] = -INFINITY, s.part.s[q] = 0;
                    std::fill(s.scores[q], s.scores[q] + PART, 0.0f);
                    continue;
                }
                if (a.mask && (h == 0 || a.max_bias > 0)) {
                    const float slope = a.slope(key_head * group + h);
                    for (int c = 0; c < mine; c++) bias[c] = slope * distance[c];
                }
                k.weigh(s.scores[q], mine, a.scale, a.softcap, bias, &s.part.m[q], &s.part.s[q]);
                std::fill(s.scores[q] + mine, s.scores[q] + all, 0.0f);
            }
        }
        read(a.value, a.out_values, s.values, a.value_floats);
        k.mix(s.scores + from, n, s.cell, cells, s.values, s.part.v + from * s.values);
    }
}

// Add a part to all before it.
void add(const AttentionKernels &k, float *m, float *s, float *v, float m2, float s2, const float *v2, int64_t values) {
    if (s2 == 0) return;  // no cell
    if (*s == 0) {
        *m = m2, *s = s2;
        memcpy(v, v2, values * sizeof(float));
    } else k.join(m, s, v, m2, s2, v2, values);
}

void finish(const Attention &a, const AttentionKernels &k, int64_t head, float m, float s, float *v, int64_t values, float *out) {
    if (a.sinks) {
        if (s == 0) s = 1;
        else k.join(&m, &s, v, a.sinks[head], 1.0f, nullptr, values);
    }
    const float whole = s == 0 ? 0.0f : 1.0f / s;
    for (int64_t i = 0; i < a.out_values; i++) out[i] = v[i] * whole;
}

int64_t blocks_of(const Attention &a) { return (a.rows + BLOCK - 1) / BLOCK; }
int64_t parts_of(const Attention &a) { return (a.cells + PART - 1) / PART; }
size_t scratch_bytes(const Attention &a) { return (size_t)(Scratch(a, nullptr).end - (char *)nullptr); }
int64_t partial_floats(const Attention &a) { return padded(a.out_values) + 2; }

} // namespace

float Attention::slope(int64_t head) const {
    if (max_bias <= 0) return 1.0f;
    const int64_t power = (int64_t)1 << (int)std::floor(std::log2((double)heads));
    const float base = std::pow(2.0f, -(head < power ? max_bias : max_bias / 2.0f) / (float)power);
    return std::pow(base, (float)(head < power ? head + 1 : 2 * (head - power) + 1));
}

bool Attention::splits(int threads) const {
    constexpr int64_t MOST = 16 << 20;  // floats of parts
    return threads > 1 && parts_of(*this) > 1 && blocks_of(*this) * key_heads * streams < 4 * threads &&
           rows * heads * streams * parts_of(*this) * partial_floats(*this) <= MOST;
}

size_t Attention::memory(int threads) const {
    const int64_t parts = splits(threads) ? rows * heads * streams * parts_of(*this) * partial_floats(*this) : 0;
    return 64 + (size_t)threads * scratch_bytes(*this) + (size_t)parts * sizeof(float);
}

void Attention::begin(int ith, void *memory) const {
    if (ith == 0) __atomic_store_n((int64_t *)memory, 0, __ATOMIC_RELAXED);
}

void Attention::read_parts(const Kernels &kernels, int ith, int nth, void *memory) const {
    const AttentionKernels &k = *kernels.attention;
    Scratch s(*this, (char *)memory + 64 + ith * scratch_bytes(*this));
    float *partials = (float *)((char *)memory + 64 + nth * scratch_bytes(*this));
    const bool split = splits(nth);
    const int64_t blocks = blocks_of(*this), parts = split ? parts_of(*this) : 1;
    Block b;
    int64_t loaded = -1;  // the key head whose queries are in s
    for (;;) {
        const int64_t unit = __atomic_fetch_add((int64_t *)memory, 1, __ATOMIC_RELAXED);
        if (unit >= streams * blocks * key_heads * parts) return;
        const int64_t part = unit % parts, key_head = unit / parts % key_heads;
        const int64_t block = unit / parts / key_heads % blocks, stream = unit / parts / key_heads / blocks;
        if (stream != b.stream || block * BLOCK != b.first || loaded != key_head) {
            b.look(*this, stream, block * BLOCK, s.seen);
            loaded = key_head;
            for (int r = 0; r < b.rows; r++)
                for (int64_t h = 0; h < group(); h++) {
                    float *to = s.query + (r * group() + h) * s.key_values;
                    memcpy(to, query.at(b.first + r, key_head * group() + h, stream), values * sizeof(float));
                    std::fill(to + values, to + s.key_values, 0.0f);
                }
        }
        const int64_t queries = b.rows * group();
        const auto each = [&](auto done) {
            for (int64_t q = 0; q < queries; q++) done(q, b.first + q / group(), key_head * group() + q % group());
        };
        if (split) {
            read_part(*this, k, b, s, key_head, part);
            each([&](int64_t q, int64_t row, int64_t head) {
                float *to = partials + (((stream * rows + row) * heads + head) * parts + part) * partial_floats(*this);
                to[0] = s.part.m[q], to[1] = s.part.s[q];
                memcpy(to + 2, s.part.v + q * s.values, s.values * sizeof(float));
            });
            continue;
        }
        std::fill(s.all.s, s.all.s + queries, 0.0f);
        std::fill(s.all.v, s.all.v + queries * s.values, 0.0f);
        for (int64_t p = 0; p < b.parts(); p++) {
            read_part(*this, k, b, s, key_head, p);
            for (int64_t q = 0; q < queries; q++)
                add(k, &s.all.m[q], &s.all.s[q], s.all.v + q * s.values, s.part.m[q], s.part.s[q], s.part.v + q * s.values, s.values);
        }
        each([&](int64_t q, int64_t row, int64_t head) {
            finish(*this, k, head, s.all.m[q], s.all.s[q], s.all.v + q * s.values, s.values, (float *)out.at(row, head, stream));
        });
    }
}

void Attention::join_parts(const Kernels &kernels, int ith, int nth, void *memory) const {
    const AttentionKernels &k = *kernels.attention;
    Scratch s(*this, (char *)memory + 64 + ith * scratch_bytes(*this));
    float *partials = (float *)((char *)memory + 64 + nth * scratch_bytes(*this));
    const int64_t all = streams * rows * heads, parts = parts_of(*this);
    for (int64_t i = all * ith / nth; i < all * (ith + 1) / nth; i++) {
        float m = 0, sum = 0, *v = s.all.v;
        std::fill(v, v + s.values, 0.0f);
        for (int64_t p = 0; p < parts; p++) {
            const float *from = partials + (i * parts + p) * partial_floats(*this);
            add(k, &m, &sum, v, from[0], from[1], from + 2, s.values);
        }
        finish(*this, k, i % heads, m, sum, v, s.values, (float *)out.at(i / heads % rows, i % heads, i / heads / rows));
    }
}

} // namespace specllama
