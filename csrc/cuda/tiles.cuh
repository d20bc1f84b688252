// Tiles of one head's tokens between global and shared memory. Rows and columns that do not exist are zero.
#pragma once
#include "../attention.h"
#include "fragments.cuh"

namespace seq1f1b::cuda {

// Element i of what was loaded at once.
template <class T>
__device__ __forceinline__ float element_of(const Vector& vector, int i) {
  if constexpr (sizeof(T) == 2) {
    return to_float(T{static_cast<uint16_t>(vector.words[i / 2] >> 16 * (i % 2))});
  } else {
    return of_bits(vector.words[i]);
  }
}

// The tokens of one head of one row.
template <class T>
struct Tokens {
  T* data;
  int64_t distance;  // of a token from the one before, in elements
  int count, size;
  bool vectors;      // every token starts at a multiple of 16 bytes
};

template <class T, class Pointer>
__device__ __forceinline__ Tokens<T> tokens_of(
    const Strided<Pointer>& tensor, int row, int head, int count, int64_t size, bool vectors) {
  return {static_cast<T*>(tensor.data) + row * tensor.row + head * tensor.head, tensor.token, count,
          static_cast<int>(size), vectors};
}

// Whether all tokens of a tensor start at multiples of `bytes`.
template <class Pointer>
bool starts_at_multiples(const Strided<Pointer>& tensor, int64_t rows, int64_t heads, int64_t tokens,
                         int64_t element_bytes, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(tensor.data) % bytes == 0 &&
         (rows == 1 || tensor.row * element_bytes % bytes == 0) &&
         (heads == 1 || tensor.head * element_bytes % bytes == 0) &&
         (tokens == 1 || tensor.token * element_bytes % bytes == 0);
}

// Starts to copy tokens [first, first + Rows) into a tile of `Columns` columns. The tile may be read after
// wait_for_copies and a barrier.
template <int Rows, int Columns, int Threads, class T>
__device__ __forceinline__ void load_tile(T* tile, const Tokens<const T>& from, int first) {
  constexpr int vector = vector_bytes / sizeof(T), vectors = Columns / vector, step = Threads / vectors;
  static_assert(Threads % vectors == 0 && Rows % step == 0, "every thread copies one column of vectors");
  if (from.vectors) {
    const int column = threadIdx.x % vectors * vector, start = threadIdx.x / vectors;
    const int bytes = min(max(from.size - column, 0), vector) * static_cast<int>(sizeof(T));
    const T* source = from.data + (first + start) * from.distance + column;
#pragma unroll
    for (int row = 0; row < Rows; row += step) {
      const bool exists = first + start + row < from.count && bytes > 0;
      copy_async(tile + (start + row) * pitch<Columns> + column, exists ? source : from.data, exists ? bytes : 0);
      source += step * from.distance;
    }
  } else {
#pragma unroll 1
    for (int i = threadIdx.x; i < Rows * Columns; i += Threads) {
      const int row = i / Columns, column = i % Columns;
      const bool exists = first + row < from.count && column < from.size;
      tile[row * pitch<Columns> + column] = exists ? from.data[(first + row) * from.distance + column] : T{};
    }
  }
}

// Rounds a warp's accumulator to T and stores it as tokens [first, first + 16 RowTiles), through a piece of shared
// memory that only this warp uses.
template <class T, int RowTiles, int Columns>
__device__ __forceinline__ void store_tokens(
    const Tokens<T>& to, int first, const Accumulator<RowTiles, Columns>& from, T* staging) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < RowTiles; ++r)
#pragma unroll
    for (int c = 0; c < Columns / 8; ++c)
#pragma unroll
      for (int e = 0; e < 4; e += 2) {
        T* at = staging + (r * 16 + entry_row(lane, e)) * pitch<Columns> + c * 8 + entry_column(lane, e);
        *reinterpret_cast<Word*>(at) = pack<T>(from.at[r][c][e], from.at[r][c][e + 1]);
      }
  __syncwarp();
  constexpr int vector = vector_bytes / sizeof(T), vectors = Columns / vector;
  const int rows = min(16 * RowTiles, to.count - first);
#pragma unroll 1
  for (int i = lane; i < rows * vectors; i += 32) {
    const int row = i / vectors, column = i % vectors * vector;
    const T* at = staging + row * pitch<Columns> + column;
    T* target = to.data + (first + row) * to.distance + column;
    if (to.vectors && column + vector <= to.size) {
      *reinterpret_cast<Vector*>(target) = *reinterpret_cast<const Vector*>(at);
    } else {
      for (int k = 0; k < vector && column + k < to.size; ++k) target[k] = at[k];
    }
  }
}

// Adds a warp's accumulator, times a factor, to tokens [first, first + 16 RowTiles), from column `first_column` on.
template <int RowTiles, int Columns>
__device__ __forceinline__ void add_to_tokens(const Tokens<float>& to, int first, int first_column,
                                              const Accumulator<RowTiles, Columns>& from, float factor) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < RowTiles; ++r)
#pragma unroll
    for (int e = 0; e < 4; e += 2) {
      const int token = first + r * 16 + entry_row(lane, e);
      if (token >= to.count) continue;
      float* row = to.data + token * to.distance;
#pragma unroll
      for (int c = 0; c < Columns / 8; ++c) {
        const int column = first_column + c * 8 + entry_column(lane, e);
        if (to.vectors && column + 1 < to.size) {
          Pair* pair = reinterpret_cast<Pair*>(row + column);
          const Pair before = *pair;
          *pair = {before.first + factor * from.at[r][c][e], before.second + factor * from.at[r][c][e + 1]};
        } else {
          if (column < to.size) row[column] += factor * from.at[r][c][e];
          if (column + 1 < to.size) row[column + 1] += factor * from.at[r][c][e + 1];
        }
      }
    }
}

}  // namespace seq1f1b::cuda
