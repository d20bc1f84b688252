// The controls of the emulation for the tests; built together with all kernels.
#include "../../csrc/cuda/emulation/grid.h"

extern "C" {

void seq1f1b_emulation_seed(uint64_t value) { seq1f1b::emulation::seed(value); }

const char* seq1f1b_emulation_error() { return seq1f1b::emulation::last_error().c_str(); }

}  // extern "C"
