// The scalar reference (reference.cpp).
#pragma once
#include "attention.h"

namespace specllama {
// y[k][r] = product of stored row r with x[k], for n rows x of `values` floats
void reference(int type, const void *weights, int64_t values, int64_t rows, const float *x, int64_t n, float *y);
// Attention of every row, with one thread and one order.
void reference(const Attention &a);
} // namespace specllama
