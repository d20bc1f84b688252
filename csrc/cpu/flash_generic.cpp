// The kernels for whatever the compiler's default target is.
#include "flash.h"

namespace seq1f1b::cpu {

static const Kernels table = flash("generic");
const Kernels* const generic_kernels = &table;

}  // namespace seq1f1b::cpu
