// The sizes of blocks and tiles for heads of up to 64, 128 and 256 entries. Registers bound them, and shared memory:
// with 99 KiB at most, what sm_86 and sm_89 have, they run on every GPU from sm_80 on. On an sm_80 two blocks share a
// multiprocessor, but for heads of more than 128 entries.
#pragma once

namespace seq1f1b::cuda {

constexpr int largest_shared_bytes = 99 * 1024;

// Warps that own 16 queries per row tile, and the keys that they work on at a time.
template <int Size>
struct ForwardShape;
template <>
struct ForwardShape<64> {
  static constexpr int warps = 4, row_tiles = 2, keys = 64;
};
template <>
struct ForwardShape<128> {
  static constexpr int warps = 4, row_tiles = 2, keys = 32;
};
template <>
struct ForwardShape<256> {
  static constexpr int warps = 8, row_tiles = 1, keys = 32;
};

template <int Size>
struct QueryGradientShape;
template <>
struct QueryGradientShape<64> {
  static constexpr int warps = 4, row_tiles = 2, keys = 32;
};
template <>
struct QueryGradientShape<128> {
  static constexpr int warps = 4, row_tiles = 1, keys = 32;
};
template <>
struct QueryGradientShape<256> {
  static constexpr int warps = 4, row_tiles = 1, keys = 16;
};

// Rows are keys here, of which `row_warps` warps own 16 per row tile; they load `queries` and work on `step` of them at
// a time. `splits` warps share the rows and each sums its part of the columns of dK and dV, which one could not hold.
template <int Size>
struct KeyGradientShape;
template <>
struct KeyGradientShape<64> {
  static constexpr int row_warps = 4, splits = 1, row_tiles = 2, queries = 64, step = 16;
};
template <>
struct KeyGradientShape<128> {
  static constexpr int row_warps = 4, splits = 1, row_tiles = 1, queries = 32, step = 32;
};
template <>
struct KeyGradientShape<256> {
  static constexpr int row_warps = 4, splits = 2, row_tiles = 1, queries = 16, step = 16;
};

}  // namespace seq1f1b::cuda
