// The instruction sets that were compiled, the best first.
#include "layout.h"

namespace specllama {
extern const Kernels avx512_kernels, avxvnni_kernels, avx2_kernels, neon_kernels;

const Kernels *const all_kernels[] = {
#ifdef HAVE_AVX512
    &avx512_kernels,
#endif
#ifdef HAVE_AVXVNNI
    &avxvnni_kernels,
#endif
#ifdef HAVE_AVX2
    &avx2_kernels,
#endif
#ifdef HAVE_NEON
    &neon_kernels,
#endif
    nullptr,
};
} // namespace specllama
