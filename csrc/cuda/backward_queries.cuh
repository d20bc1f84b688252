// dQ of a tile of queries: keys and values stream by, twice buffered, and the weights are made anew from the
// log-sum-exp.
#pragma once
#include "backward_arguments.cuh"
#include "shapes.h"

namespace seq1f1b::cuda {

template <class T, int Size>
struct QueryGradientKernel {
  using Shape = QueryGradientShape<Size>;
  static constexpr int threads = 32 * Shape::warps;
  static constexpr int warp_rows = 16 * Shape::row_tiles;
  static constexpr int queries = Shape::warps * warp_rows;
  static constexpr int keys = Shape::keys;
  static constexpr int shared_bytes = (2 * queries + 4 * keys) * pitch<Size> * static_cast<int>(sizeof(T));
  static_assert(shared_bytes <= largest_shared_bytes, "one block must fit");
};

template <class T, int Size>
__global__ void __launch_bounds__(QueryGradientKernel<T, Size>::threads)
    query_gradient_kernel(const BackwardArguments a) {
  using Kernel = QueryGradientKernel<T, Size>;
  constexpr int threads = Kernel::threads, row_tiles = Kernel::Shape::row_tiles;
  constexpr int key_entries = Kernel::keys * pitch<Size>;
  T* const query_tile = reinterpret_cast<T*>(shared_memory());
  T* const gradient_tile = query_tile + Kernel::queries * pitch<Size>;
  T* const key_tiles = gradient_tile + Kernel::queries * pitch<Size>;
  T* const value_tiles = key_tiles + 2 * key_entries;

  const int tile = a.tiles - 1 - static_cast<int>(blockIdx.x % a.tiles);
  const int heads = static_cast<int>(a.heads), row = blockIdx.x / a.tiles / heads, head = blockIdx.x / a.tiles % heads;
  const int kv_head = head / static_cast<int>(a.heads / a.kv_heads), first_query = tile * Kernel::queries;
  const Mask mask{a.rule, row};
  const auto query = tokens_of<const T>(a.query, row, head, mask.rule.queries, a.size, a.query_vectors);
  const auto gradient = tokens_of<const T>(a.gradient, row, head, mask.rule.queries, a.value_size, a.gradient_vectors);
  const auto key = tokens_of<const T>(a.key, row, kv_head, mask.rule.keys, a.size, a.key_vectors);
  const auto value = tokens_of<const T>(a.value, row, kv_head, mask.rule.keys, a.value_size, a.value_vectors);

  // The second buffers are free until the loop fills them, after a barrier.
  const KeyRange range =
      visible_keys<Kernel::queries, threads>(mask, first_query, reinterpret_cast<int*>(value_tiles + key_entries));
  int at = next_key_tile<Kernel::keys>(mask, range.begin / Kernel::keys * Kernel::keys, range.end);
  load_tile<Kernel::queries, Size, threads>(query_tile, query, first_query);
  load_tile<Kernel::queries, Size, threads>(gradient_tile, gradient, first_query);
  if (at < range.end) {
    load_tile<Kernel::keys, Size, threads>(key_tiles, key, at);
    load_tile<Kernel::keys, Size, threads>(value_tiles, value, at);
  }
  commit_copies();

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first_row = warp * Kernel::warp_rows;
  T* const query_rows = query_tile + first_row * pitch<Size>;
  const T* const gradient_rows = gradient_tile + first_row * pitch<Size>;
  Pair of_query[row_tiles][2];
#pragma unroll
  for (int r = 0; r < row_tiles; ++r)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = first_query + first_row + r * 16 + entry_row(lane, 2 * half);
      const int64_t entry = (static_cast<int64_t>(row) * heads + head) * mask.rule.queries + token;
      const bool exists = token < mask.rule.queries;
      of_query[r][half].first =
          exists ? static_cast<const float*>(a.lse)[entry] * static_cast<float>(log2_e) : INFINITY;
      of_query[r][half].second = exists ? a.delta[entry] : 0;
    }

  Accumulator<row_tiles, Size> sum;
  sum.clear();
  for (int buffer = 0; at < range.end; buffer ^= 1) {
    const int next = next_key_tile<Kernel::keys>(mask, at + Kernel::keys, range.end);
    wait_for_copies<0>();
    __syncthreads();  // the tiles are there, and nobody reads those of the other buffer any more
    const T* const key_tile = key_tiles + buffer * key_entries;
    if (next < range.end) {
      load_tile<Kernel::keys, Size, threads>(key_tiles + (buffer ^ 1) * key_entries, key, next);
      load_tile<Kernel::keys, Size, threads>(value_tiles + (buffer ^ 1) * key_entries, value, next);
    }
    commit_copies();

    Accumulator<row_tiles, Kernel::keys> scores, gradients;
    scores.clear();
    gradients.clear();
    multiply_by_transposed<T, Size>(scores, query_rows, key_tile);
    multiply_by_transposed<T, Size>(gradients, gradient_rows, value_tiles + buffer * key_entries);
    finish(scores, a.scores);
    if (is_partial<Kernel::keys>(mask, range, at)) hide_invisible(scores, mask, first_query + first_row, at);
    weigh_gradients(scores, gradients, a.scores, [&](int r, int, int e) { return of_query[r][e / 2]; });
    multiply<T, pitch<Size>>(sum, gradients, key_tile);
    at = next;
  }

#pragma unroll
  for (int r = 0; r < row_tiles; ++r)
#pragma unroll
    for (int c = 0; c < Size / 8; ++c)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum.at[r][c][e] *= static_cast<float>(a.scale);
  wait_for_copies<0>();
  __syncthreads();  // the queries have come even if no key did, and their tile becomes the staging area
  const auto result = tokens_of<T>(a.query_gradient, row, head, mask.rule.queries, a.size, a.query_gradient_vectors);
  store_tokens(result, first_query + first_row, sum, query_rows);
}

}  // namespace seq1f1b::cuda
