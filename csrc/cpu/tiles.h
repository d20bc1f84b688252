// Matrix products by tiles of a few rows whose sums stay in registers until a `finish` takes them.
//
// A finish is called as finish(row, sums) with `row` the tile's first and sums a Vector<Real>[rows][vectors].
#pragma once
#include <cstdint>

#include "simd.h"

namespace seq1f1b::cpu {
namespace {

// Six rows of four vectors (two, with few registers) need fewer loads than multiplications.
constexpr int tile_rows = 6;
constexpr int tile_vectors = vector_registers == 32 ? 4 : 2;
template <class Real>
constexpr int tile_columns = tile_vectors * lanes<Real>;

// How the left operand lies: entry (i, k) at a[i * stride + k], or at a[k * stride + i].
enum class Left { rows, columns };

template <Left left, int rows, int vectors, class Real, class Finish>
[[gnu::always_inline]] inline void tile(int64_t depth, const Real* a, int64_t a_stride, const Real* b, int64_t b_stride,
                                        int64_t row, const Finish& finish) {
  Vector<Real> sums[rows][vectors];
#pragma GCC unroll 8
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < vectors; ++j) sums[i][j] = Vector<Real>{};
  }
  for (int64_t k = 0; k < depth; ++k) {
    Vector<Real> right[vectors];
#pragma GCC unroll 4
    for (int j = 0; j < vectors; ++j) right[j] = load(b + j * lanes<Real>);
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i) {
      const Vector<Real> x = broadcast(left == Left::rows ? a[i * a_stride] : a[i]);
#pragma GCC unroll 4
      for (int j = 0; j < vectors; ++j) sums[i][j] = multiply_add(x, right[j], sums[i][j]);
    }
    a += left == Left::rows ? 1 : a_stride;
    b += b_stride;
  }
  finish(row, sums);
}

// rows x (vectors * lanes) sums over `depth`; `b` has rows of b_stride, aligned to a vector.
template <Left left, int vectors, class Real, class Finish>
[[gnu::noinline]] void panel(int64_t rows, int64_t depth, const Real* a, int64_t a_stride, const Real* b,
                             int64_t b_stride, const Finish& finish) {
  const int64_t a_step = left == Left::rows ? a_stride : 1;
  int64_t i = 0;
  for (; i + tile_rows <= rows; i += tile_rows) {
    tile<left, tile_rows, vectors>(depth, a + i * a_step, a_stride, b, b_stride, i, finish);
  }
  const Real* rest = a + i * a_step;
  switch (rows - i) {
    case 1: return tile<left, 1, vectors>(depth, rest, a_stride, b, b_stride, i, finish);
    case 2: return tile<left, 2, vectors>(depth, rest, a_stride, b, b_stride, i, finish);
    case 3: return tile<left, 3, vectors>(depth, rest, a_stride, b, b_stride, i, finish);
    case 4: return tile<left, 4, vectors>(depth, rest, a_stride, b, b_stride, i, finish);
    case 5: return tile<left, 5, vectors>(depth, rest, a_stride, b, b_stride, i, finish);
    default: return;
  }
}

template <class Real>
struct Store {
  Real* to;
  int64_t stride;
  template <int rows, int vectors>
  [[gnu::always_inline]] void operator()(int64_t row, const Vector<Real> (&sums)[rows][vectors]) const {
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < vectors; ++j) store(to + (row + i) * stride + j * lanes<Real>, sums[i][j]);
    }
  }
};

template <class Real>
struct Add {
  Real* to;
  int64_t stride;
  template <int rows, int vectors>
  [[gnu::always_inline]] void operator()(int64_t row, const Vector<Real> (&sums)[rows][vectors]) const {
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < vectors; ++j) {
        Real* at = to + (row + i) * stride + j * lanes<Real>;
        store(at, load(at) + sums[i][j]);
      }
    }
  }
};

// to[rows, width] += a b, any width of whole vectors. Every sum over `depth` starts from zero, so that a long row of
// keys is summed in two levels and loses fewer digits.
template <Left left, class Real>
inline void add_product(int64_t rows, int64_t width, int64_t depth, const Real* a, int64_t a_stride, const Real* b,
                        Real* to) {
  int64_t j = 0;
  for (; j + tile_columns<Real> <= width; j += tile_columns<Real>) {
    panel<left, tile_vectors>(rows, depth, a, a_stride, b + j, width, Add<Real>{to + j, width});
  }
  for (; j + 2 * lanes<Real> <= width; j += 2 * lanes<Real>) {
    panel<left, 2>(rows, depth, a, a_stride, b + j, width, Add<Real>{to + j, width});
  }
  for (; j < width; j += lanes<Real>) {
    panel<left, 1>(rows, depth, a, a_stride, b + j, width, Add<Real>{to + j, width});
  }
}

}  // namespace
}  // namespace seq1f1b::cpu
