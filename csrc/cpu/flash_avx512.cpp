// The kernels for x86 with AVX-512 F, BW, VL and DQ; the build compiles this file for them.
#include "flash.h"

namespace seq1f1b::cpu {

#if defined(SEQ1F1B_AVX512)
static const Kernels table = flash("avx512");
const Kernels* const avx512_kernels = &table;
#else
const Kernels* const avx512_kernels = nullptr;
#endif

}  // namespace seq1f1b::cpu
