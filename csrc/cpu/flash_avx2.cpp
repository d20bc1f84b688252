// The kernels for x86 with AVX2, FMA and F16C; the build compiles this file for them.
#include "flash.h"

namespace seq1f1b::cpu {

#if defined(SEQ1F1B_AVX2)
static const Kernels table = flash("avx2");
const Kernels* const avx2_kernels = &table;
#else
const Kernels* const avx2_kernels = nullptr;
#endif

}  // namespace seq1f1b::cpu
