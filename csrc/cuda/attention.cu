// Which kernel a problem gets.
#include <algorithm>

#include "device.h"
#include "instances.h"
#include "launch.h"

namespace seq1f1b::cuda {
namespace {

// Token numbers, beyond the last by up to a tile, are 32-bit; offsets are not.
constexpr int64_t most_tokens = INT32_MAX / 2;

bool is_supported(const Problem& p) {
  return (p.dtype == DType::bfloat16 || p.dtype == DType::float16) && p.rows >= 0 && p.queries >= 0 && p.keys >= 0 &&
         p.queries <= most_tokens && p.keys <= most_tokens && p.kv_heads > 0 && p.heads > 0 &&
         p.heads % p.kv_heads == 0 && p.heads <= INT32_MAX && p.rows <= INT32_MAX && p.size > 0 && p.value_size > 0 &&
         std::max(p.size, p.value_size) <= largest_head;
}

template <class T>
int forward(const Forward& p, void* stream) {
  const int64_t size = std::max(p.size, p.value_size);
  return size <= 64    ? launch_forward<T, 64>(p, stream)
         : size <= 128 ? launch_forward<T, 128>(p, stream)
                       : launch_forward<T, 256>(p, stream);
}

template <class T>
int backward(const Backward& p, float* delta, void* stream) {
  const int64_t size = std::max(p.size, p.value_size);
  return size <= 64    ? launch_backward<T, 64>(p, delta, stream)
         : size <= 128 ? launch_backward<T, 128>(p, delta, stream)
                       : launch_backward<T, 256>(p, delta, stream);
}

}  // namespace
}  // namespace seq1f1b::cuda

using namespace seq1f1b::cuda;

int seq1f1b_cuda_forward(const seq1f1b::Forward* problem, void* stream) {
  if (!is_supported(*problem)) return cudaErrorInvalidValue;
  return problem->dtype == seq1f1b::DType::bfloat16 ? forward<BFloat16>(*problem, stream)
                                                    : forward<Float16>(*problem, stream);
}

int seq1f1b_cuda_backward(const seq1f1b::Backward* problem, float* delta, void* stream) {
  if (!is_supported(*problem)) return cudaErrorInvalidValue;
  return problem->dtype == seq1f1b::DType::bfloat16 ? backward<BFloat16>(*problem, delta, stream)
                                                    : backward<Float16>(*problem, delta, stream);
}
