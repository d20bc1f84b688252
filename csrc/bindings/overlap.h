// Whether two tensors share memory. Neither a common storage nor overlapping ranges of addresses say so: keys and
// values may be the halves of every head of one tensor.
#pragma once
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace seq1f1b::bindings {

// Where the entries of a tensor of four axes lie: runs of adjacent bytes, a run for each row, head and token.
struct Memory {
  int64_t address, run_bytes;
  int64_t counts[3], strides[3];  // of the rows, heads and tokens; strides in bytes

  explicit Memory(const torch::stable::Tensor& tensor)
      : address(static_cast<int64_t>(reinterpret_cast<intptr_t>(tensor.const_data_ptr()))),
        run_bytes(tensor.size(3) * static_cast<int64_t>(tensor.element_size())) {
    for (int axis = 0; axis < 3; ++axis) {
      counts[axis] = tensor.size(axis);
      // The stride of a single one may be any number.
      strides[axis] = counts[axis] > 1 ? tensor.stride(axis) * static_cast<int64_t>(tensor.element_size()) : 0;
    }
  }

  // That of `count` tokens from `start` on.
  Memory tokens(int64_t start, int64_t count) const {
    Memory part = *this;
    part.address += start * strides[2];
    part.counts[2] = count;
    return part;
  }
  bool empty() const { return run_bytes == 0 || counts[0] == 0 || counts[1] == 0 || counts[2] == 0; }
};

// Any of the multiples [least, most] of a positive number of bytes.
struct Multiples {
  int64_t bytes, least, most;
};

// Whether some sum of one multiple of each term, from `term` on, lies in [low, high]. With the longest strides first,
// the others reach so little that few multiples are worth a try, as long as a tensor's own runs do not overlap.
inline bool some_sum_lies_in(const std::vector<Multiples>& terms, size_t term, int64_t low, int64_t high) {
  if (term == terms.size()) return low <= 0 && high >= 0;
  int64_t rest_low = 0, rest_high = 0;
  for (size_t i = term + 1; i < terms.size(); ++i) {
    rest_low += terms[i].least * terms[i].bytes;
    rest_high += terms[i].most * terms[i].bytes;
  }
  const Multiples& t = terms[term];
  const auto rounded_down = [&](int64_t x) { return x / t.bytes - (x % t.bytes < 0); };
  const int64_t first = std::max(t.least, -rounded_down(rest_high - low));
  const int64_t last = std::min(t.most, rounded_down(high - rest_low));
  for (int64_t n = first; n <= last; ++n) {
    if (some_sum_lies_in(terms, term + 1, low - n * t.bytes, high - n * t.bytes)) return true;
  }
  return false;
}

inline bool overlap(const Memory& a, const Memory& b) {
  if (a.empty() || b.empty()) return false;
  // How far a run of `a` can lie behind one of `b`, less the distance of the first ones.
  std::vector<Multiples> terms;
  const auto add = [&](int64_t bytes, int64_t least, int64_t most) {
    if (bytes == 0) return;
    for (Multiples& term : terms) {
      if (term.bytes != bytes) continue;
      term.least += least;
      term.most += most;
      return;
    }
    terms.push_back({bytes, least, most});
  };
  for (int axis = 0; axis < 3; ++axis) {
    add(a.strides[axis], 0, a.counts[axis] - 1);
    add(b.strides[axis], 1 - b.counts[axis], 0);
  }
  std::sort(terms.begin(), terms.end(), [](const Multiples& x, const Multiples& y) { return x.bytes > y.bytes; });
  const int64_t apart = b.address - a.address;
  return some_sum_lies_in(terms, 0, apart - a.run_bytes + 1, apart + b.run_bytes - 1);
}

}  // namespace seq1f1b::bindings
