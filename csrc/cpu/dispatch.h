// Which variant of the CPU kernels runs on this machine.
#pragma once
#include <string>
#include <vector>

#include "kernels.h"

namespace seq1f1b::cpu {

// Names of the variants that are built in and that this machine can run, slowest first; "generic" always.
const std::vector<std::string>& variants();

// The fastest variant for a dtype, or the one chosen by `use` where it computes that dtype.
const Kernels& kernels(DType dtype);

// Choose a variant by name for the whole process; "" goes back to the fastest. False: no such variant here.
bool use(const std::string& name);

}  // namespace seq1f1b::cpu
