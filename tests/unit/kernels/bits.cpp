// Compares an instruction set with the scalar reference, bit for bit: bits NAME [THREADS [QUICK]]
//
// It needs the kernels' sources alone, so it is built with sanitizers, with errors that are put into
// them, and for processors that are not here (tests/lab/kernels_elsewhere.py).
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
            std::atomic<int> arrived{0};
            const auto work = [&](int ith) {
                p.compute(*k, ith, threads, memory, [&] {
                    arrived++;
                    while (arrived < threads) std::this_thread::yield();
                });
            };
            std::vector<std::thread> others;
            for (int i = 1; i < threads; i++) others.emplace_back(work, i);
            work(0);
            for (auto &t : others) t.join();
            reference(type, w.data(), values, rows, x.data(), n, expected.data());
            for (size_t i = 0; i < y.size(); i++, compared++)
                if (memcmp(&y[i], &expected[i], 4) && !different++)
                    printf("type %d, %d rows, at %zu: %a, not %a\n", type, n, i, y[i], expected[i]);
            free(memory), free(packed);
        }
    printf("%s, %d threads: %ld compared, %ld different\n", k->name, threads, compared, different);
    return different ? 1 : 0;
}
