// What one variant of the CPU kernels (one instruction set) offers.
#pragma once
#include <cstdint>

#include "../attention.h"

namespace seq1f1b::cpu {

// The backward can be cut two ways. `all` computes every score once; its tasks share no key head, so there are few of
// them. `query` followed by `key_value` computes the scores twice, but its tasks are many.
enum class Part : int32_t { all, query, key_value };

// Work is cut into independent tasks, which threads take as ranges [begin, end). Tasks never write to the same memory,
// and how the tasks of the forward or of one part are spread over threads changes no bit of the result. The parts add
// in different orders, though, and callers choose between them by the number of threads: the gradients that different
// numbers of threads compute may differ by rounding.
struct Kernels {
  const char* name;
  int64_t (*forward_tasks)(const Forward&);
  void (*forward)(const Forward&, int64_t begin, int64_t end);
  int64_t (*backward_tasks)(const Backward&, Part);
  void (*backward)(const Backward&, Part, int64_t begin, int64_t end);
};

// Each is null where the compiler's target has no such instructions.
extern const Kernels* const generic_kernels;
extern const Kernels* const avx2_kernels;
extern const Kernels* const avx512_kernels;
extern const Kernels* const amx_kernels;  // bfloat16 only

}  // namespace seq1f1b::cpu
