// delta = rowsum(dO O), which every gradient of a score subtracts: a warp for each query.
#include "instances.h"
#include "tiles.cuh"

namespace seq1f1b::cuda {

constexpr int delta_threads = 256;
constexpr int delta_queries = delta_threads / 32;  // of a block

template <class T>
__global__ void __launch_bounds__(delta_threads) delta_kernel(const Backward a, float* delta, bool vectors) {
  const int64_t entry = static_cast<int64_t>(blockIdx.x) * delta_queries + threadIdx.x / 32;
  if (entry >= a.rows * a.heads * a.queries) return;  // all lanes of the warp
  const int64_t line = entry / a.queries, token = entry % a.queries;
  const int64_t row = line / a.heads, head = line % a.heads;
  const T* const gradient = static_cast<const T*>(a.gradient.data) + row * a.gradient.row + head * a.gradient.head +
                            token * a.gradient.token;
  const T* const output =
      static_cast<const T*>(a.output.data) + row * a.output.row + head * a.output.head + token * a.output.token;
  constexpr int vector = vector_bytes / sizeof(T);
  const int lane = threadIdx.x % 32, size = static_cast<int>(a.value_size);
  float sum = 0;
  int next = 0;  // entry that the vectors leave over
  if (vectors) {
    next = size / vector * vector;
    for (int i = lane * vector; i < next; i += 32 * vector) {
      const Vector left = *reinterpret_cast<const Vector*>(gradient + i);
      const Vector right = *reinterpret_cast<const Vector*>(output + i);
#pragma unroll
      for (int k = 0; k < vector; ++k)
        sum = fmaf(element_of<T>(left, k), element_of<T>(right, k), sum);
    }
  }
  for (int i = next + lane; i < size; i += 32) sum = fmaf(to_float(gradient[i]), to_float(output[i]), sum);
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += shuffle_xor(sum, lanes);
  if (lane == 0) delta[entry] = sum;
}

template <class T>
int launch_delta(const Backward& p, float* delta, void* stream) {
  const bool vectors = starts_at_multiples(p.gradient, p.rows, p.heads, p.queries, sizeof(T), vector_bytes) &&
                       starts_at_multiples(p.output, p.rows, p.heads, p.queries, sizeof(T), vector_bytes);
  const int64_t blocks = (p.rows * p.heads * p.queries + delta_queries - 1) / delta_queries;
  return launch(delta_kernel<T>, blocks, delta_threads, 0, stream, p, delta, vectors);
}

template int launch_delta<BFloat16>(const Backward&, float*, void*);
template int launch_delta<Float16>(const Backward&, float*, void*);

}  // namespace seq1f1b::cuda
