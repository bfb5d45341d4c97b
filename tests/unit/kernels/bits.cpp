// Compares an instruction set with the scalar reference, bit for bit: bits NAME [THREADS [QUICK]]
//
// It needs the kernels' sources alone, so it is built with sanitizers, with errors that are put into
// them, and for processors that are not here (tests/lab/kernels_elsewhere.py).
#include "attention.h"
#include "product.h"
#include "random_weights.h"
#include "reference.h"

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

using namespace specllama;

static Random random_numbers;
static float draw_float() { return random_numbers.real(); }

// Run work(i) in threads; work may call the barrier that it is given.
template <class Work> static void together(int threads, Work work) {
    std::atomic<int> arrived{0};
    const auto one = [&](int ith) {
        int passed = 0;
        work(ith, [&] {
            arrived++;
            for (passed++; arrived < passed * threads;) std::this_thread::yield();
        });
    };
    std::vector<std::thread> others;
    for (int i = 1; i < threads; i++) others.emplace_back(one, i);
    one(0);
    for (auto &t : others) t.join();
}

static void copy_floats(const void *from, float *to, int64_t n) { memcpy(to, from, (size_t)n * 4); }

// Attention of n rows over the cells of `lanes` texts that lie mixed in a cache, in which some cells
// are dead; a row sees its text up to itself, perhaps through a window, or (a tree) without siblings.
static bool attention_alike(const Kernels &k, int threads, int64_t n, int64_t cells, int variant) {
    static const int64_t shapes[][4] = {{64, 64, 6, 2}, {128, 128, 4, 1}, {80, 80, 3, 3}, {72, 40, 2, 1}, {192, 128, 4, 2}};
    const auto &[values, out_values, heads, key_heads] = shapes[variant % 5];
    const int64_t lanes = 1 + variant % 3, window = variant % 4 == 3 ? 90 : cells, streams = 1 + (variant % 7 == 6);
    const bool whole = variant % 11 == 10, wide = variant % 5 == 4;  // no mask; keys and values as floats
    const auto floats = [](int64_t count) {
        std::vector<float> all((size_t)count);
        for (float &one : all) one = draw_float() * 3;
        return all;
    };
    const auto halves = [](int64_t count) {
        std::vector<uint16_t> all((size_t)count);
        for (auto &one : all) one = (uint16_t)((random_numbers.draw() & 0x83ff) | (13 + random_numbers.draw() % 4) << 10);
        return all;
    };
    std::vector<float> q = floats(streams * heads * n * values), sinks = floats(heads);
    std::vector<uint16_t> key16 = halves(streams * cells * key_heads * values), value16 = halves(streams * cells * key_heads * out_values);
    std::vector<float> key32 = floats(wide ? (int64_t)key16.size() : 0), value32 = floats(wide ? (int64_t)value16.size() : 0);
    std::vector<uint16_t> mask((size_t)(streams * n * cells), 0xfc00);
    for (int64_t s = 0; s < streams; s++)
        for (int64_t r = 0; r < n; r++) {
            const int64_t self = cells - n + r;  // rows' own cells are the last
            for (int64_t c = 0; c <= self; c++) {
                const bool mine = c < cells - n ? c % lanes == r % lanes && c % 13 != 5 : c % lanes == self % lanes;
                const bool sibling = variant % 6 == 5 && c >= cells - n && c != self && (self - c) % 2;
                if (mine && !sibling && c > self - window) mask[(size_t)((s * n + r) * cells + c)] = variant % 8 == 7 ? (uint16_t)(0xb800 + c % 900) : 0;
            }
        }
    Attention a{};
    a.rows = n, a.heads = heads, a.key_heads = key_heads, a.cells = cells, a.streams = streams;
    a.values = values, a.out_values = out_values;
    a.scale = 0.11f, a.softcap = variant % 9 == 8 ? 20.0f : 0, a.max_bias = variant % 8 == 7 ? 8.0f : 0;
    const auto place = [&](auto &all, int64_t of, int64_t width, int64_t rows) {
        constexpr size_t size = sizeof all[0];
        return Place{(char *)all.data(), size * of * width, size * width, size * rows * of * width};
    };
    a.query = place(q, heads, values, n);
    a.key = wide ? place(key32, key_heads, values, cells) : place(key16, key_heads, values, cells);
    a.value = wide ? place(value32, key_heads, out_values, cells) : place(value16, key_heads, out_values, cells);
    if (wide) a.key_floats = a.value_floats = copy_floats;
    if (!whole) a.mask = mask.data(), a.mask_row = (size_t)cells * 2, a.mask_stream = (size_t)(n * cells) * 2;
    if (variant % 7 == 3) a.sinks = sinks.data();
    std::vector<float> y((size_t)(streams * heads * n * out_values), NAN), expected(y.size());
    a.out = place(expected, heads, out_values, n);
    reference(a);
    a.out = place(y, heads, out_values, n);
    void *memory = aligned_alloc(64, (a.memory(threads) + 63) / 64 * 64);
    together(threads, [&](int ith, auto wait) { a.compute(k, ith, threads, memory, wait); });
    free(memory);
    return !memcmp(y.data(), expected.data(), y.size() * 4);
}

int main(int argc, char **argv) {
    const Kernels *k = nullptr;
    for (int i = 0; all_kernels[i]; i++)
        if (argc > 1 && !strcmp(all_kernels[i]->name, argv[1])) k = all_kernels[i];
    if (!k || !k->runs_here()) return printf("not here\n"), 3;
    const int threads = argc > 2 ? atoi(argv[2]) : 1;
    const bool quick = argc > 3;
    const int widths[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 31, 32, 33, 64, 100, 512};
    long compared = 0, different = 0;
    for (int type : ALL_TYPES)
        for (int n : widths) {
            if (quick && n > 17) continue;
            const int64_t block = facts(type)->stored_values, rows = n > 64 ? 20 : 41;
            const int64_t values = block == 1 ? 77 : block == 32 ? 32 * 7 : 512;
            const std::vector<char> w = random_numbers.weights(type, values, rows);
            char *packed = (char *)aligned_alloc(64, (packed_bytes(type, values, rows) + 63) / 64 * 64);
            pack(type, w.data(), values, rows, packed, 0, (rows + ROWS - 1) / ROWS);
            std::vector<float> x((size_t)(n * values)), y((size_t)(n * rows), NAN), expected((size_t)(n * rows));
            for (float &one : x) one = draw_float() * (random_numbers.draw() % 50 ? 1 : 30);
            for (int i = 0; i < 9 && n > 1; i++) x[(size_t)i] = 0;
            for (int64_t i = 0; i < values && n % 2 == 0; i++) x[(size_t)i] = 1;  // and the largest activations
            Product p{type, values, rows, {{packed, 0, n}}, {}};
            for (int i = 0; i < n; i++) p.rows.push_back({&x[(size_t)(i * values)], &y[(size_t)(i * rows)]});
            void *memory = aligned_alloc(64, (p.memory() + 63) / 64 * 64);
            together(threads, [&](int ith, auto wait) { p.compute(*k, ith, threads, memory, wait); });
            reference(type, w.data(), values, rows, x.data(), n, expected.data());
            for (size_t i = 0; i < y.size(); i++, compared++)
                if (memcmp(&y[i], &expected[i], 4) && !different++)
                    printf("type %d, %d rows, at %zu: %a, not %a\n", type, n, i, y[i], expected[i]);
            free(memory), free(packed);
        }
    for (int variant = 0; variant < (quick ? 12 : 48); variant++)
        for (int n : {1, 2, 5, 17, 40}) {
            if (n > 2 && variant % 3 != n % 3) continue;
            compared++;
            if (!attention_alike(*k, threads, n, n + variant * 37 % (quick ? 100 : 330), variant) && !different++)
                printf("attention, variant %d, %d rows\n", variant, n);
        }
    printf("%s, %d threads: %ld compared, %ld different\n", k->name, threads, compared, different);
    return different ? 1 : 0;
}
