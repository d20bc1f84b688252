// append and accumulate: the widest units that addresses and strides allow.
#include "elementwise.cuh"
#include "launch.h"

namespace seq1f1b::cuda {
namespace {

template <class T>
int add(const Output& total, const Input& part, int64_t rows, int64_t heads, int64_t tokens, int64_t size,
        void* stream) {
  constexpr int width = vector_bytes / sizeof(T);
  const bool vectors = size % width == 0 &&
                       starts_at_multiples(total, rows, heads, tokens, sizeof(float), vector_bytes) &&
                       starts_at_multiples(part, rows, heads, tokens, sizeof(T), vector_bytes);
  return vectors ? launch_add<T, width>(total, part, rows, heads, tokens, size, stream)
                 : launch_add<T, 1>(total, part, rows, heads, tokens, size, stream);
}

}  // namespace
}  // namespace seq1f1b::cuda

using namespace seq1f1b::cuda;

int seq1f1b_cuda_append(
    seq1f1b::Output buffer, seq1f1b::Input chunk, int64_t rows, int64_t heads, int64_t tokens, int64_t size,
    int64_t element_bytes, int64_t start, void* stream) {
  const bool is_width = element_bytes == 1 || element_bytes == 2 || element_bytes == 4 || element_bytes == 8;
  if (!is_width || size < 0 || size > INT32_MAX / element_bytes) return cudaErrorInvalidValue;
  seq1f1b::Output to = buffer;
  to.data = static_cast<char*>(buffer.data) + start * buffer.token * element_bytes;
  const auto units_of = [&](int64_t bytes) {
    return size * element_bytes % bytes == 0 && starts_at_multiples(to, rows, heads, tokens, element_bytes, bytes) &&
           starts_at_multiples(chunk, rows, heads, tokens, element_bytes, bytes);
  };
  const auto copy = units_of(16)  ? launch_copy<Vector>
                    : units_of(8) ? launch_copy<uint64_t>
                    : units_of(4) ? launch_copy<uint32_t>
                    : units_of(2) ? launch_copy<uint16_t>
                                  : launch_copy<uint8_t>;
  return copy(to, chunk, rows, heads, tokens, size, element_bytes, stream);
}

int seq1f1b_cuda_accumulate(
    seq1f1b::Output total, seq1f1b::Input part, seq1f1b::DType dtype, int64_t rows, int64_t heads, int64_t tokens,
    int64_t size, void* stream) {
  if (size < 0 || size > INT32_MAX) return cudaErrorInvalidValue;
  switch (dtype) {
    case seq1f1b::DType::float32:
      return add<float>(total, part, rows, heads, tokens, size, stream);
    case seq1f1b::DType::bfloat16:
      return add<BFloat16>(total, part, rows, heads, tokens, size, stream);
    case seq1f1b::DType::float16:
      return add<Float16>(total, part, rows, heads, tokens, size, stream);
    default:
      return cudaErrorInvalidValue;
  }
}
