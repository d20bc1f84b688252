// Attention of a tile of queries: keys and values stream by, weights stay in registers. While the products with a tile
// of keys are made its values arrive, and while the values are summed the next keys.
#pragma once
#include "scores.cuh"
#include "shapes.h"
#include "tiles.cuh"

namespace seq1f1b::cuda {

struct ForwardArguments : Forward {
  Rule rule;
  Scores scores;
  int tiles;  // of queries
  bool query_vectors, key_vectors, value_vectors, output_vectors;
};

template <class T, int Size>
struct ForwardKernel {
  using Shape = ForwardShape<Size>;
  static constexpr int threads = 32 * Shape::warps;
  static constexpr int warp_rows = 16 * Shape::row_tiles;
  static constexpr int queries = Shape::warps * warp_rows;
  static constexpr int keys = Shape::keys;
  static constexpr int shared_bytes = (queries + 2 * keys) * pitch<Size> * static_cast<int>(sizeof(T));
  static_assert(shared_bytes <= largest_shared_bytes, "one block must fit");
};

template <class T, int Size>
__global__ void __launch_bounds__(ForwardKernel<T, Size>::threads) forward_kernel(const ForwardArguments a) {
  using Kernel = ForwardKernel<T, Size>;
  constexpr int threads = Kernel::threads;
  T* const query_tile = reinterpret_cast<T*>(shared_memory());
  T* const key_tile = query_tile + Kernel::queries * pitch<Size>;
  T* const value_tile = key_tile + Kernel::keys * pitch<Size>;

  // The last queries see most: they start first.
  const int tile = a.tiles - 1 - static_cast<int>(blockIdx.x % a.tiles);
  const int heads = static_cast<int>(a.heads), row = blockIdx.x / a.tiles / heads, head = blockIdx.x / a.tiles % heads;
  const int kv_head = head / static_cast<int>(a.heads / a.kv_heads), first_query = tile * Kernel::queries;
  const Mask mask{a.rule, row};
  const auto query = tokens_of<const T>(a.query, row, head, mask.rule.queries, a.size, a.query_vectors);
  const auto key = tokens_of<const T>(a.key, row, kv_head, mask.rule.keys, a.size, a.key_vectors);
  const auto value = tokens_of<const T>(a.value, row, kv_head, mask.rule.keys, a.value_size, a.value_vectors);

  // The tile of values is free until the first values are loaded, after a barrier.
  const KeyRange range = visible_keys<Kernel::queries, threads>(mask, first_query, reinterpret_cast<int*>(value_tile));
  int at = next_key_tile<Kernel::keys>(mask, range.begin / Kernel::keys * Kernel::keys, range.end);
  load_tile<Kernel::queries, Size, threads>(query_tile, query, first_query);
  if (at < range.end) load_tile<Kernel::keys, Size, threads>(key_tile, key, at);
  commit_copies();

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first_row = warp * Kernel::warp_rows;
  T* const query_rows = query_tile + first_row * pitch<Size>;
  Accumulator<Kernel::Shape::row_tiles, Size> sum;
  Softmax<Kernel::Shape::row_tiles> softmax;
  sum.clear();
  softmax.clear();
  while (at < range.end) {
    const int next = next_key_tile<Kernel::keys>(mask, at + Kernel::keys, range.end);
    wait_for_copies<0>();
    __syncthreads();  // the keys are there, and nobody sums the values before any more
    load_tile<Kernel::keys, Size, threads>(value_tile, value, at);
    commit_copies();

    Accumulator<Kernel::Shape::row_tiles, Kernel::keys> scores;
    scores.clear();
    multiply_by_transposed<T, Size>(scores, query_rows, key_tile);
    finish(scores, a.scores);
    if (is_partial<Kernel::keys>(mask, range, at)) hide_invisible(scores, mask, first_query + first_row, at);
    softmax.take(scores, sum, a.scores.factor);

    wait_for_copies<0>();
    __syncthreads();  // the values are there, and nobody reads the keys any more
    if (next < range.end) load_tile<Kernel::keys, Size, threads>(key_tile, key, next);
    commit_copies();
    multiply<T, pitch<Size>>(sum, scores, value_tile);
    at = next;
  }

  float lse[Kernel::Shape::row_tiles][2];
  softmax.close(sum, a.scores.factor, lse);
#pragma unroll
  for (int r = 0; r < Kernel::Shape::row_tiles; ++r)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = first_query + first_row + r * 16 + entry_row(lane, 2 * half);
      const int64_t entry = (static_cast<int64_t>(row) * heads + head) * mask.rule.queries + token;
      if (lane % 4 == 0 && token < mask.rule.queries) static_cast<float*>(a.lse)[entry] = lse[r][half];
    }
  wait_for_copies<0>();
  __syncthreads();  // the queries have come even if no key did, and their tile becomes the staging area
  const auto output = tokens_of<T>(a.output, row, head, mask.rule.queries, a.value_size, a.output_vectors);
  store_tokens(output, first_query + first_row, sum, query_rows);
}

template <class T, int Size>
int launch_forward(const Forward& problem, void* stream) {
  using Kernel = ForwardKernel<T, Size>;
  const Forward& p = problem;
  const int64_t tiles = (p.queries + Kernel::queries - 1) / Kernel::queries;
  const ForwardArguments arguments{
      p,
      Rule::of(p),
      Scores::of(p),
      static_cast<int>(tiles),
      starts_at_multiples(p.query, p.rows, p.heads, p.queries, sizeof(T), vector_bytes),
      starts_at_multiples(p.key, p.rows, p.kv_heads, p.keys, sizeof(T), vector_bytes),
      starts_at_multiples(p.value, p.rows, p.kv_heads, p.keys, sizeof(T), vector_bytes),
      starts_at_multiples(p.output, p.rows, p.heads, p.queries, sizeof(T), vector_bytes)};
  return launch(forward_kernel<T, Size>, tiles * p.rows * p.heads, Kernel::threads, Kernel::shared_bytes, stream,
                arguments);
}

}  // namespace seq1f1b::cuda
