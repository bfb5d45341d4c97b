#include "product.h"

#include <algorithm>
#include <cstring>

namespace specllama {
namespace {

// Rows of a panel in tiles that are as even as can be: tile t has its rows at start(t).
struct Tiles {
    int64_t rows, count, each, more;
    Tiles(int64_t rows, int widest)
        : rows(rows), count((rows + widest - 1) / widest), each(count ? rows / count : 0), more(count ? rows % count : 0) {}
    int64_t start(int64_t t) const { return t * each + std::min(t, more); }
    int width(int64_t t) const { return (int)(each + (t < more)); }
    int64_t of(int64_t row) const {
        const int64_t wide = more * (each + 1);
        return row < wide ? row / (each + 1) : more + (row - wide) / each;
    }
};

constexpr int64_t SHARES = 8;  // of a panel's weights for each thread: who is slow takes fewer

} // namespace

size_t product_memory(int type, int64_t values, int64_t rows) {
    const Form form = facts(type)->form;
    return 64 + (size_t)(rows * (values / block_values(form)) * block_words(form)) * 4;
}

size_t Product::memory() const { return product_memory(type, values, (int64_t)rows.size()); }

void round_activations(const Kernels &k, const Product &p, int ith, int nth, int32_t *to) {
    const Form form = facts(p.type)->form;
    const int64_t blocks = p.values / block_values(form), words = block_words(form) * blocks;
    for (const Panel &panel : p.panels) {
        const Tiles tiles(panel.count, k.widest);
        const int64_t all = panel.count * blocks, last = all * (ith + 1) / nth;
        for (int64_t at = all * ith / nth; at < last;) {
            const int64_t row = at / blocks, from = at % blocks, until = std::min(blocks, from + last - at);
            const int64_t t = tiles.of(row), start = tiles.start(t);
            int32_t *tile = to + (panel.first + start) * words + (row - start);
            k.quantize[(int)form](p.rows[panel.first + row].x, from, until, tile, tiles.width(t), k.offset[p.type]);
            at += until - from;
        }
    }
}

void multiply(const Kernels &k, const Product &p, int nth, const int32_t *activations, int64_t *next) {
    const Form form = facts(p.type)->form;
    const int64_t blocks = p.values / block_values(form), words = block_words(form) * blocks;
    const int64_t groups = (p.outputs + ROWS - 1) / ROWS, shares = nth == 1 ? 1 : std::min(groups, SHARES * nth);
    const size_t size = packed_row_bytes(p.type, p.values);
    for (;;) {
        const int64_t share = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
        if (share >= shares * (int64_t)p.panels.size()) return;
        const Panel &panel = p.panels[share / shares];
        const int64_t part = share % shares;
        const Tiles tiles(panel.count, k.widest);
        for (int64_t g = groups * part / shares; g < groups * (part + 1) / shares; g++) {
            const char *weights = (const char *)panel.weights + g * size;
            const int64_t here = std::min<int64_t>(ROWS, p.outputs - g * ROWS);
            for (int64_t t = 0; t < tiles.count; t++) {
                const int n = tiles.width(t);
                const int64_t first = panel.first + tiles.start(t);
                float *out[WIDEST], spare[WIDEST][ROWS];  // the last rows of a matrix may be fewer than 16
                for (int r = 0; r < n; r++) out[r] = here == ROWS ? p.rows[first + r].y + g * ROWS : spare[r];
                k.tile[p.type][n](weights, activations + first * words, blocks, out);
                if (here < ROWS)
                    for (int r = 0; r < n; r++) memcpy(p.rows[first + r].y + g * ROWS, spare[r], here * sizeof(float));
            }
        }
    }
}

} // namespace specllama
