// append and accumulate on the CPU: chunks written into, and added to, longer buffers.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cstring>

#include "arguments.h"

namespace seq1f1b::bindings {
namespace {

// Calls run(row, head, first token, tokens) for runs of tokens, which threads take in shares.
template <class Run>
void each_run(const Tensor& chunk, const Run& run) {
  const int64_t rows = chunk.size(0), heads = chunk.size(1), tokens = chunk.size(2), size = chunk.size(3);
  if (chunk.numel() == 0) return;
  constexpr int64_t entries_worth_a_thread = 32768;
  const int64_t grain = std::max<int64_t>(1, entries_worth_a_thread / size);
  torch::stable::parallel_for(0, rows * heads * tokens, grain, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t token = begin % tokens, head = begin / tokens;
      const int64_t count = std::min(end - begin, tokens - token);
      run(head / heads, head % heads, token, count);
      begin += count;
    }
  });
}

void append(const Tensor& buffer, const Tensor& chunk, int64_t start) {
  const Demands demands("append", buffer);
  check_append(demands, buffer, chunk, start);
  const Output to = output(buffer);
  const Input from = input(chunk);
  const int64_t bytes = static_cast<int64_t>(buffer.element_size()), size = chunk.size(3);
  const bool adjacent = to.token == size && from.token == size;
  each_run(chunk, [&](int64_t row, int64_t head, int64_t token, int64_t count) {
    char* target = static_cast<char*>(to.data) + (row * to.row + head * to.head + (start + token) * to.token) * bytes;
    const char* source =
        static_cast<const char*>(from.data) + (row * from.row + head * from.head + token * from.token) * bytes;
    if (adjacent) {
      std::memcpy(target, source, count * size * bytes);
    } else {
      for (int64_t i = 0; i < count; ++i)
        std::memcpy(target + i * to.token * bytes, source + i * from.token * bytes, size * bytes);
    }
  });
}

template <class Total, class Part>
void add(const Tensor& total, const Tensor& part) {
  const Output to = output(total);
  const Input from = input(part);
  const int64_t size = part.size(3);
  each_run(part, [&](int64_t row, int64_t head, int64_t token, int64_t count) {
    for (int64_t i = token; i < token + count; ++i) {
      Total* sum = static_cast<Total*>(to.data) + row * to.row + head * to.head + i * to.token;
      const Part* term = static_cast<const Part*>(from.data) + row * from.row + head * from.head + i * from.token;
      for (int64_t entry = 0; entry < size; ++entry) sum[entry] += static_cast<Total>(term[entry]);
    }
  });
}

template <class Total>
void add_any(DType dtype, const Tensor& total, const Tensor& part) {
  switch (dtype) {
    case DType::float32: return add<Total, float>(total, part);
    case DType::float64: return add<Total, double>(total, part);
    case DType::bfloat16: return add<Total, c10::BFloat16>(total, part);
    case DType::float16: return add<Total, c10::Half>(total, part);
  }
}

void accumulate(const Tensor& total, const Tensor& part) {
  const Demands demands("accumulate", total);
  check_accumulate(demands, total, part);
  const DType dtype = demands.kernel_dtype("part", part);
  if (total.scalar_type() == ScalarType::Double)
    add_any<double>(dtype, total, part);
  else
    add_any<float>(dtype, total, part);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lightning_seq1f1b, CPU, library) {
  library.impl("append", TORCH_BOX(&append));
  library.impl("accumulate", TORCH_BOX(&accumulate));
}

}  // namespace seq1f1b::bindings
