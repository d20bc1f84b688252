// The backward as three kernels in a row on one stream.
#pragma once
#include "backward_keys.cuh"
#include "backward_queries.cuh"
#include "instances.h"

namespace seq1f1b::cuda {

template <class T, int Size>
int launch_backward(const Backward& problem, float* delta, void* stream) {
  int error = launch_delta<T>(problem, delta, stream);
  if (error) return error;
  BackwardArguments arguments = backward_arguments<T>(problem, delta);

  using Keys = KeyGradientKernel<T, Size>;
  const int64_t key_tiles = problem.queries > 0 ? (problem.keys + Keys::keys - 1) / Keys::keys : 0;
  arguments.tiles = static_cast<int>(key_tiles);
  error = launch(key_gradient_kernel<T, Size>, key_tiles * problem.rows * problem.kv_heads, Keys::threads,
                 Keys::shared_bytes, stream, arguments);
  if (error) return error;

  using Queries = QueryGradientKernel<T, Size>;
  const int64_t query_tiles = (problem.queries + Queries::queries - 1) / Queries::queries;
  arguments.tiles = static_cast<int>(query_tiles);
  return launch(query_gradient_kernel<T, Size>, query_tiles * problem.rows * problem.heads, Queries::threads,
                Queries::shared_bytes, stream, arguments);
}

}  // namespace seq1f1b::cuda
