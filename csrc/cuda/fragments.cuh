// Products of tiles in shared memory on tensor cores. A warp owns 16 rows of the result per row tile, and lane 4 g + t
// entries (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1) of each 16x8 piece: the layout of mma m16n8k16.
#pragma once
#include "device.h"

namespace seq1f1b::cuda {

// Row tiles x column pieces of a warp's share of a product.
template <int RowTiles, int Columns>
struct Accumulator {
  static constexpr int row_tiles = RowTiles;
  static constexpr int pieces = Columns / 8;
  float at[RowTiles][pieces][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int r = 0; r < RowTiles; ++r)
#pragma unroll
      for (int c = 0; c < pieces; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) at[r][c][e] = 0;
  }
};

// The row, within a row tile, of entry e of a lane's piece; and its column within the piece.
__device__ __forceinline__ int entry_row(int lane, int e) { return lane / 4 + 8 * (e / 2); }
__device__ __forceinline__ int entry_column(int lane, int e) { return 2 * (lane % 4) + e % 2; }

// The distance of the rows of a tile in shared memory: 8 rows of 16 bytes then touch all banks once.
template <int Columns>
constexpr int pitch = Columns + 8;

// sum += a b^T with a [16 RowTiles, Depth] and b [Columns, Depth], both in shared memory.
template <class T, int Depth, int RowTiles, int Columns>
__device__ __forceinline__ void multiply_by_transposed(Accumulator<RowTiles, Columns>& sum, const T* a, const T* b) {
  constexpr int distance = pitch<Depth>;
  const int lane = threadIdx.x % 32;
  const T* a_row = a + (lane % 16) * distance + (lane / 16) * 8;
  const T* b_row = b + (lane / 16 * 8 + lane % 8) * distance + (lane / 8 % 2) * 8;
#pragma unroll
  for (int k = 0; k < Depth; k += 16) {
    uint32_t left[RowTiles][4];
#pragma unroll
    for (int r = 0; r < RowTiles; ++r) ldmatrix(left[r], a_row + r * 16 * distance + k);
#pragma unroll
    for (int c = 0; c < Columns / 16; ++c) {
      uint32_t right[4];
      ldmatrix(right, b_row + c * 16 * distance + k);
      const uint32_t first[2] = {right[0], right[1]}, second[2] = {right[2], right[3]};
#pragma unroll
      for (int r = 0; r < RowTiles; ++r) {
        mma<T>(sum.at[r][2 * c], left[r], first);
        mma<T>(sum.at[r][2 * c + 1], left[r], second);
      }
    }
  }
}

// sum += a b with a [16 RowTiles, Depth] in registers, rounded to T, and b [Depth, Columns] in shared memory, a part of
// rows `Pitch` apart.
template <class T, int Pitch, int RowTiles, int Depth, int Columns>
__device__ __forceinline__ void multiply(
    Accumulator<RowTiles, Columns>& sum, const Accumulator<RowTiles, Depth>& a, const T* b) {
  const int lane = threadIdx.x % 32;
  const T* b_row = b + (lane % 16) * Pitch + (lane / 16) * 8;
#pragma unroll
  for (int k = 0; k < Depth / 16; ++k) {
    uint32_t left[RowTiles][4];
#pragma unroll
    for (int r = 0; r < RowTiles; ++r)
#pragma unroll
      for (int half = 0; half < 4; ++half) {
        const float* pair = a.at[r][2 * k + half / 2] + 2 * (half % 2);
        left[r][half] = pack<T>(pair[0], pair[1]);
      }
#pragma unroll
    for (int c = 0; c < Columns / 16; ++c) {
      uint32_t right[4];
      ldmatrix_transposed(right, b_row + k * 16 * Pitch + c * 16);
      const uint32_t first[2] = {right[0], right[1]}, second[2] = {right[2], right[3]};
#pragma unroll
      for (int r = 0; r < RowTiles; ++r) {
        mma<T>(sum.at[r][2 * c], left[r], first);
        mma<T>(sum.at[r][2 * c + 1], left[r], second);
      }
    }
  }
}

}  // namespace seq1f1b::cuda
