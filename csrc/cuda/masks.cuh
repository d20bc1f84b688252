// Which queries see which keys: tiles that see nothing of each other are skipped, and only tiles at an edge compare
// positions. Token counts fit 31 bits (the launchers check that).
#pragma once
#include "../attention.h"
#include "fragments.cuh"

namespace seq1f1b::cuda {

// The rule of attention.h for all rows of the batch. It stays among the kernel's arguments, which cost no registers.
struct Rule {
  int queries, keys, window;
  const int32_t* first_key;  // [rows, queries]; or null
  const bool* key_mask;      // [rows, keys]; or null

  static Rule of(const Problem& p) {
    return {static_cast<int>(p.queries), static_cast<int>(p.keys),
            p.window < p.keys ? static_cast<int>(p.window) : 0, p.first_key, p.key_mask};
  }
};

// The rule for one row.
struct Mask {
  const Rule& rule;
  int row;

  // The last key that query i sees.
  __device__ __forceinline__ int position(int i) const { return rule.keys - rule.queries + i; }

  // The first key that query i sees, before `key_mask`; queries beyond the last are as the last.
  __device__ __forceinline__ int first(int i) const {
    i = min(i, rule.queries - 1);
    const int of_window = rule.window > 0 ? max(0, position(i) - rule.window + 1) : 0;
    if (!rule.first_key) return of_window;
    return max(of_window, static_cast<int>(rule.first_key[static_cast<int64_t>(row) * rule.queries + i]));
  }

  __device__ __forceinline__ bool key_exists(int key) const {
    return key < rule.keys && (!rule.key_mask || rule.key_mask[static_cast<int64_t>(row) * rule.keys + key]);
  }
};

// The least and the most that any thread of the block has. Called by all of them; `scratch` holds two numbers per warp
// and is not used again.
template <int Threads>
__device__ __forceinline__ void reduce_block(int& least, int& most, int* scratch) {
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    least = min(least, shuffle_xor(least, lanes));
    most = max(most, shuffle_xor(most, lanes));
  }
  constexpr int warps = Threads / 32;
  if (threadIdx.x % 32 == 0) {
    scratch[threadIdx.x / 32] = least;
    scratch[warps + threadIdx.x / 32] = most;
  }
  __syncthreads();
  for (int warp = 0; warp < warps; ++warp) {
    least = min(least, scratch[warp]);
    most = max(most, scratch[warps + warp]);
  }
}

// The keys that a tile of queries sees, before `key_mask`: none outside [begin, end), and [all_begin, all_end) by all.
struct KeyRange {
  int begin, end, all_begin, all_end;
};

// `scratch` as for reduce_block.
template <int Tile, int Threads>
__device__ __forceinline__ KeyRange visible_keys(const Mask& mask, int first_query, int* scratch) {
  const int last_query = min(first_query + Tile, mask.rule.queries) - 1;
  KeyRange range{mask.first(first_query), mask.position(last_query) + 1, mask.first(last_query),
                 mask.position(first_query) + 1};
  if (mask.rule.first_key) {
    for (int i = first_query + threadIdx.x; i <= last_query; i += Threads) {
      range.begin = min(range.begin, mask.first(i));
      range.all_begin = max(range.all_begin, mask.first(i));
    }
    reduce_block<Threads>(range.begin, range.all_begin, scratch);
  }
  return range;
}

// The queries that see a key of a tile, before `key_mask`: none outside [begin, end).
struct QueryRange {
  int begin, end;
};

// `scratch` as for reduce_block.
template <int Threads>
__device__ __forceinline__ QueryRange visible_queries(const Mask& mask, int first_key, int end_key, int* scratch) {
  const int shift = mask.rule.keys - mask.rule.queries, last_key = min(end_key, mask.rule.keys) - 1;
  QueryRange range{max(first_key - shift, 0), mask.rule.queries};
  if (mask.rule.window > 0) range.end = last_key - shift + min(mask.rule.window, mask.rule.keys - last_key);
  if (mask.rule.first_key) {
    int least = INT32_MAX, last = -1;
    for (int i = range.begin + threadIdx.x; i < range.end; i += Threads)
      if (mask.first(i) <= last_key) {
        least = min(least, i);
        last = i;
      }
    reduce_block<Threads>(least, last, scratch);
    range = {least, last + 1};
  }
  return range;
}

// The first of the tiles from `tile` on, below `end`, that has a key that `key_mask` lets through; `end` or beyond if
// there is none. Called by all threads of the block.
template <int Tile>
__device__ __forceinline__ int next_key_tile(const Mask& mask, int tile, int end) {
  if (!mask.rule.key_mask) return tile;
  for (; tile < end; tile += Tile)
    if (__syncthreads_or(threadIdx.x < Tile && mask.key_exists(tile + threadIdx.x))) break;
  return tile;
}

// Whether some query misses some key of the tile.
template <int Tile>
__device__ __forceinline__ bool is_partial(const Mask& mask, const KeyRange& range, int tile) {
  return mask.rule.key_mask || tile < range.all_begin || tile + Tile > range.all_end;
}

// Whether some query of a tile misses some key of [first_key, end_key), or may do so.
template <int Tile>
__device__ __forceinline__ bool is_partial(const Mask& mask, int first_query, int first_key, int end_key) {
  return mask.rule.key_mask || mask.rule.first_key || end_key - 1 > mask.position(first_query) ||
         first_key < mask.first(first_query + Tile - 1);
}

constexpr float invisible = -INFINITY;

// Sets the scores of keys that a query does not see to minus infinity; rows are queries, columns keys.
template <int RowTiles, int Columns>
__device__ __forceinline__ void hide_invisible(
    Accumulator<RowTiles, Columns>& scores, const Mask& mask, int first_query, int first_key) {
  const int lane = threadIdx.x % 32;
  static_assert(Columns / 4 <= 32, "a lane's columns fit the bits");
  uint32_t present = 0;
#pragma unroll
  for (int c = 0; c < Columns / 8; ++c)
#pragma unroll
    for (int e = 0; e < 2; ++e)
      present |= static_cast<uint32_t>(mask.key_exists(first_key + c * 8 + entry_column(lane, e))) << (2 * c + e);
#pragma unroll
  for (int r = 0; r < RowTiles; ++r)
#pragma unroll
    for (int half = 0; half < 4; half += 2) {
      const int query = first_query + r * 16 + entry_row(lane, half);
      const int first = mask.first(query), last = mask.position(query);
#pragma unroll
      for (int c = 0; c < Columns / 8; ++c)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int key = first_key + c * 8 + entry_column(lane, e);
          const bool visible = key >= first && key <= last && present >> (2 * c + e) & 1;
          if (!visible) scores.at[r][c][half + e] = invisible;
        }
    }
}

}  // namespace seq1f1b::cuda
