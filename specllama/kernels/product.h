// One matrix product, shared by threads.
#pragma once
#include "layout.h"

#include <vector>

namespace specllama {

// A row of activations, and where its products go.
struct Row {
    const float *x;
    float *y;
};

// A matrix of packed weights, and the rows that it is multiplied with: rows[first, first + count).
struct Panel {
    const void *weights;
    int64_t first, count;
};

struct Product {
    int type;
    int64_t values, outputs;  // of a row of weights; rows of weights
    std::vector<Panel> panels;
    std::vector<Row> rows;

    size_t memory() const;    // that compute() needs, aligned to 64
    // Thread ith of nth computes its part; all call it with equal products, and wait() for all.
    template <class Wait> void compute(const Kernels &k, int ith, int nth, void *memory, Wait wait) const;
};

size_t product_memory(int type, int64_t values, int64_t rows);
void round_activations(const Kernels &k, const Product &p, int ith, int nth, int32_t *to);
void multiply(const Kernels &k, const Product &p, int nth, const int32_t *activations, int64_t *next);

template <class Wait>
void Product::compute(const Kernels &k, int ith, int nth, void *memory, Wait wait) const {
    int64_t *next = (int64_t *)memory;  // the first share of work that no thread has taken
    int32_t *activations = (int32_t *)((char *)memory + 64);
    if (ith == 0) __atomic_store_n(next, 0, __ATOMIC_RELAXED);
    round_activations(k, *this, ith, nth, activations);
    wait();
    multiply(k, *this, nth, activations, next);
}

} // namespace specllama
