// dK and dV of a tile of keys: the queries that see it stream by, of all heads that share it, twice buffered. Scores
// are transposed, so that a warp owns keys and sums in registers; each block adds to keys of its own, without atomics.
#pragma once
#include <type_traits>

#include "backward_arguments.cuh"
#include "shapes.h"

namespace seq1f1b::cuda {

template <class T, int Size>
struct KeyGradientKernel {
  using Shape = KeyGradientShape<Size>;
  static constexpr int threads = 32 * Shape::row_warps * Shape::splits;
  static constexpr int warp_rows = 16 * Shape::row_tiles;
  static constexpr int keys = Shape::row_warps * warp_rows;
  static constexpr int queries = Shape::queries;
  static constexpr int columns = Size / Shape::splits;  // of a warp's share of dK and dV
  static constexpr int shared_bytes = (2 * keys + 4 * queries) * pitch<Size> * static_cast<int>(sizeof(T));
  static_assert(shared_bytes <= largest_shared_bytes, "one block must fit");
};

// What the scores of a query need besides its products.
struct QueryTerms {
  Pair pair;  // log-sum-exp, in units of log 2, and delta
  int first;  // key that it sees
};

// They lie where the query's row of a tile has its padding.
template <int Size, class T>
__device__ __forceinline__ auto& terms_of(T* tile, int query) {
  using Terms = std::conditional_t<std::is_const<T>::value, const QueryTerms, QueryTerms>;
  static_assert(sizeof(Terms) <= (pitch<Size> - Size) * sizeof(T), "the padding holds the terms");
  return *reinterpret_cast<Terms*>(tile + query * pitch<Size> + Size);
}

// As hide_invisible, with keys as rows and queries as columns; `queries` are their rows of the tile.
template <int Size, class T, int RowTiles, int Columns>
__device__ __forceinline__ void hide_invisible_transposed(
    Accumulator<RowTiles, Columns>& scores, const Mask& mask, int first_key, int first_query, const T* queries) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < RowTiles; ++r)
#pragma unroll
    for (int half = 0; half < 4; half += 2) {
      const int key = first_key + r * 16 + entry_row(lane, half);
      const bool exists = mask.key_exists(key);
#pragma unroll
      for (int c = 0; c < Columns / 8; ++c)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int query = c * 8 + entry_column(lane, e);
          const bool visible = exists && key <= mask.position(first_query + query) &&
                               key >= terms_of<Size>(queries, query).first;
          if (!visible) scores.at[r][c][half + e] = invisible;
        }
    }
}

template <class T, int Size>
__global__ void __launch_bounds__(KeyGradientKernel<T, Size>::threads) key_gradient_kernel(const BackwardArguments a) {
  using Kernel = KeyGradientKernel<T, Size>;
  using Shape = typename Kernel::Shape;
  constexpr int threads = Kernel::threads, queries = Kernel::queries, query_entries = queries * pitch<Size>;
  T* const key_tile = reinterpret_cast<T*>(shared_memory());
  T* const value_tile = key_tile + Kernel::keys * pitch<Size>;
  T* const query_tiles = value_tile + Kernel::keys * pitch<Size>;
  T* const gradient_tiles = query_tiles + 2 * query_entries;

  // The first keys are seen by most: they start first.
  const int first_key = static_cast<int>(blockIdx.x % a.tiles) * Kernel::keys;
  const int kv_heads = static_cast<int>(a.kv_heads), heads = static_cast<int>(a.heads), group = heads / kv_heads;
  const int row = blockIdx.x / a.tiles / kv_heads, kv_head = blockIdx.x / a.tiles % kv_heads;
  const Mask mask{a.rule, row};
  const auto key = tokens_of<const T>(a.key, row, kv_head, mask.rule.keys, a.size, a.key_vectors);
  const auto value = tokens_of<const T>(a.value, row, kv_head, mask.rule.keys, a.value_size, a.value_vectors);
  const int end_key = min(first_key + Kernel::keys, mask.rule.keys);
  if (next_key_tile<Kernel::keys>(mask, first_key, end_key) >= end_key) return;
  // The second buffers are free until the loop fills them, after a barrier.
  const QueryRange range =
      visible_queries<threads>(mask, first_key, end_key, reinterpret_cast<int*>(query_tiles + query_entries));
  if (range.begin >= range.end) return;

  const auto load = [&](int head, int tile, int buffer) {
    const auto query = tokens_of<const T>(a.query, row, head, mask.rule.queries, a.size, a.query_vectors);
    const auto gradient =
        tokens_of<const T>(a.gradient, row, head, mask.rule.queries, a.value_size, a.gradient_vectors);
    load_tile<queries, Size, threads>(query_tiles + buffer * query_entries, query, tile);
    load_tile<queries, Size, threads>(gradient_tiles + buffer * query_entries, gradient, tile);
    if (threadIdx.x < queries) {
      const int token = tile + static_cast<int>(threadIdx.x);
      const int64_t entry = (static_cast<int64_t>(row) * heads + head) * mask.rule.queries + token;
      const bool exists = token < mask.rule.queries;
      QueryTerms& terms = terms_of<Size>(query_tiles + buffer * query_entries, threadIdx.x);
      terms.pair.first = exists ? static_cast<const float*>(a.lse)[entry] * static_cast<float>(log2_e) : INFINITY;
      terms.pair.second = exists ? a.delta[entry] : 0;
      terms.first = mask.first(token);
    }
  };

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_row = warp % Shape::row_warps * Kernel::warp_rows;
  const int first_column = warp / Shape::row_warps * Kernel::columns;
  const T* const key_rows = key_tile + first_row * pitch<Size>;
  const T* const value_rows = value_tile + first_row * pitch<Size>;
  load_tile<Kernel::keys, Size, threads>(key_tile, key, first_key);
  load_tile<Kernel::keys, Size, threads>(value_tile, value, first_key);
  const int begin = range.begin / queries * queries;
  int head = kv_head * group, at = begin;
  const int end_head = head + group;
  load(head, at, 0);
  commit_copies();

  Accumulator<Shape::row_tiles, Kernel::columns> key_sum, value_sum;
  key_sum.clear();
  value_sum.clear();
  for (int buffer = 0; head < end_head; buffer ^= 1) {
    int next = at + queries, next_head = head;
    if (next >= range.end) {
      next = begin;
      ++next_head;
    }
    wait_for_copies<0>();
    __syncthreads();  // the tiles are there, and nobody reads those of the other buffer any more
    if (next_head < end_head) load(next_head, next, buffer ^ 1);
    commit_copies();

    const T* const query_tile = query_tiles + buffer * query_entries;
    const T* const gradient_tile = gradient_tiles + buffer * query_entries;
#pragma unroll 1
    for (int part = 0; part < queries; part += Shape::step) {
      const T* const query_rows = query_tile + part * pitch<Size>;
      const T* const gradient_rows = gradient_tile + part * pitch<Size>;
      Accumulator<Shape::row_tiles, Shape::step> scores, gradients;
      scores.clear();
      gradients.clear();
      multiply_by_transposed<T, Size>(scores, key_rows, query_rows);
      multiply_by_transposed<T, Size>(gradients, value_rows, gradient_rows);
      finish(scores, a.scores);
      if (is_partial<queries>(mask, at, first_key, end_key))
        hide_invisible_transposed<Size>(scores, mask, first_key + first_row, at + part, query_rows);
      weigh_gradients(scores, gradients, a.scores, [&](int, int c, int e) {
        return terms_of<Size>(query_rows, c * 8 + entry_column(lane, e)).pair;
      });
      multiply<T, pitch<Size>>(value_sum, scores, gradient_rows + first_column);
      multiply<T, pitch<Size>>(key_sum, gradients, query_rows + first_column);
    }
    at = next;
    head = next_head;
  }

  const auto key_gradient =
      tokens_of<float>(a.key_gradient, row, kv_head, mask.rule.keys, a.size, a.key_gradient_vectors);
  const auto value_gradient =
      tokens_of<float>(a.value_gradient, row, kv_head, mask.rule.keys, a.value_size, a.value_gradient_vectors);
  add_to_tokens(key_gradient, first_key + first_row, first_column, key_sum, static_cast<float>(a.scale));
  add_to_tokens(value_gradient, first_key + first_row, first_column, value_sum, 1);
}

}  // namespace seq1f1b::cuda
