// The kernels alone, with everything in cache: products a nanosecond of one core, beside the most
// that its instruction could do. tests/lab/kernels_alone.sh builds and runs it.
#include "product.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <immintrin.h>

using namespace specllama;

static double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

template <class F> static double best(F work) {
    double least = 1e9;
    for (int turn = 0; turn < 30; turn++) {
        const double began = now();
        work();
        least = std::min(least, now() - began);
    }
    return least;
}

__attribute__((target("avx512f,avx512bw,avx512vnni"))) static void vnni() {
    __m512i s[16], v = _mm512_set1_epi8(3);
    for (auto &one : s) one = _mm512_setzero_si512();
    for (int i = 0; i < 100000; i++) {
#pragma GCC unroll 16
        for (int k = 0; k < 16; k++) s[k] = _mm512_dpbusd_epi32(s[k], v, v);
        __asm__ volatile("" : "+v"(v));
    }
    for (auto &one : s) __asm__ volatile("" : : "v"(one));
}

__attribute__((target("avx2"))) static void maddubs() {
    __m256i s[12], v = _mm256_set1_epi8(3);
    for (auto &one : s) one = _mm256_setzero_si256();
    for (int i = 0; i < 100000; i++) {
#pragma GCC unroll 12
        for (int k = 0; k < 12; k++) s[k] = _mm256_add_epi16(s[k], _mm256_maddubs_epi16(v, v));
        __asm__ volatile("" : "+x"(v));
    }
    for (auto &one : s) __asm__ volatile("" : : "x"(one));
}

int main() {
    if (__builtin_cpu_supports("avx512vnni")) printf("vpdpbusd, 512 bits: %.0f products/ns\n", 100000.0 * 16 * 64 / best(vnni) / 1e9);
    printf("vpmaddubsw and vpaddw, 256 bits: %.0f products/ns\n", 100000.0 * 12 * 32 / best(maddubs) / 1e9);
    const std::pair<int, const char *> types[] = {
        {Q4_K, "Q4_K"}, {Q6_K, "Q6_K"}, {Q5_K, "Q5_K"}, {Q3_K, "Q3_K"}, {Q2_K, "Q2_K"}, {IQ4_XS, "IQ4_XS"}, {Q8_0, "Q8_0"}, {Q4_0, "Q4_0"},
        {Q4_1, "Q4_1"}, {Q5_0, "Q5_0"}, {Q5_1, "Q5_1"}, {IQ4_NL, "IQ4_NL"}, {MXFP4, "MXFP4"}, {BF16, "BF16"}, {F16, "F16"}, {F32, "F32"}};
    const int64_t values = 1536, rows = 1536;
    for (int i = 0; all_kernels[i]; i++) {
        const Kernels &k = *all_kernels[i];
        if (!k.runs_here()) continue;
        for (const auto &[type, name] : types) {
            printf("%s %s:", k.name, name);
            char *packed = (char *)aligned_alloc(64, (packed_bytes(type, values, rows) + 63) / 64 * 64);
            memset(packed, 0x11, packed_bytes(type, values, rows));
            for (int n : {1, 2, 4, 8, 16}) {
                std::vector<float> x((size_t)(n * values), 0.5f), y((size_t)(n * rows));
                Product p{type, values, rows, {{packed, 0, n}}, {}};
                for (int r = 0; r < n; r++) p.rows.push_back({&x[(size_t)(r * values)], &y[(size_t)(r * rows)]});
                void *memory = aligned_alloc(64, (p.memory() + 63) / 64 * 64);
                const double took = best([&] { p.compute(k, 0, 1, memory, [] {}); });
                printf(" %d rows %.0f", n, (double)(values * rows * n) / took / 1e9);
                free(memory);
            }
            printf("\n");
            fflush(stdout);
            free(packed);
        }
    }
}
