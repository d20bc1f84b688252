// The number formats of the kernels as bits, and what is moved at once.
#pragma once
#include <cstdint>

namespace seq1f1b::cuda {

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

// What one load or store moves at most; of any elements, which is why they may alias.
struct __attribute__((aligned(16), may_alias)) Vector {
  uint32_t words[4];
};
constexpr int vector_bytes = sizeof(Vector);

struct __attribute__((aligned(8), may_alias)) Pair {
  float first, second;
};

// Two packed elements.
typedef uint32_t __attribute__((may_alias)) Word;

}  // namespace seq1f1b::cuda
