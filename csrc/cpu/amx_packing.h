// From rows of bfloat16 anywhere in memory to tiles, and from tiles of sums back to rows.
#pragma once
#include <immintrin.h>

#include <algorithm>
#include <cstdint>

#include "amx_tiles.h"
#include "amx_vectors.h"

namespace seq1f1b::cpu::amx {
namespace {

using BFloat16Bits = uint16_t;

// Where 32 rows lie; null for a row of zeros.
using Rows = const BFloat16Bits* [panel_length];

enum class Order { as_is, transposed };

inline uint32_t first_lanes(int64_t count, int64_t lanes) {
  if (count <= 0) return 0;
  return static_cast<uint32_t>((uint64_t{1} << std::min(count, lanes)) - 1);
}

template <Order order>
inline void store_lines(__m512i (&lines)[16], char* tile) {
  if (order == Order::transposed) transpose(lines);
  for (int i = 0; i < 16; ++i) _mm512_store_si512(tile + i * line_bytes, lines[i]);
}

// Two rows of `depth` tiles of form "rows", rows 0 .. 15 and 16 .. 31; the rows' ends are filled with zeros.
// Transposed, they are of form "pairs" and the numbers of a row go down the lines: the right operand of a product that
// sums over the entries of the rows.
template <Order order>
inline void pack_along(const Rows& rows, int64_t size, int64_t depth, char* tiles, int64_t second) {
  for (int64_t half = 0; half < 2; ++half) {
    for (int64_t k = 0; k < depth; ++k) {
      const __mmask32 inside = first_lanes(size - k * tile_depth, tile_depth);
      __m512i lines[16];
      for (int64_t i = 0; i < 16; ++i) {
        const BFloat16Bits* row = rows[half * tile_lines + i];
        lines[i] = row ? _mm512_maskz_loadu_epi16(inside, row + k * tile_depth) : _mm512_setzero_si512();
      }
      store_lines<order>(lines, tiles + half * second + k * tile_bytes);
    }
  }
}

// One tile of form "pairs" for every 16 entries of the 32 rows, `stride` bytes apart: the right operand of a product
// that sums over the rows. Transposed, it is of form "rows", an entry of all rows to a line: the left operand.
template <Order order>
inline void pack_across(const Rows& rows, int64_t size, int64_t columns, char* tiles, int64_t stride) {
  for (int64_t c = 0; c < columns; ++c) {
    const __mmask16 inside = static_cast<__mmask16>(first_lanes(size - c * tile_lines, tile_lines));
    const auto load = [&](const BFloat16Bits* row) {
      if (!row) return _mm512_setzero_si512();
      return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(inside, row + c * tile_lines));
    };
    __m512i lines[16];
    for (int64_t i = 0; i < 16; ++i) {
      lines[i] = _mm512_or_si512(load(rows[2 * i]), _mm512_slli_epi32(load(rows[2 * i + 1]), 16));
    }
    store_lines<order>(lines, tiles + c * stride);
  }
}

// Where 16 rows to be written lie; null for one that is not wanted.
using Targets = BFloat16Bits* [tile_lines];

// Column j of tiles of floats below each other, times factor[j], becomes row j of bfloat16.
inline void write_columns(const char* tiles, __m512 factor, const Targets& rows, int64_t size) {
  for (int64_t t = 0; t * tile_lines < size; ++t) {
    const __mmask16 inside = static_cast<__mmask16>(first_lanes(size - t * tile_lines, tile_lines));
    __m512i lines[16];
    for (int64_t i = 0; i < 16; ++i) {
      const __m512 line = _mm512_load_ps(tiles + t * tile_bytes + i * line_bytes);
      lines[i] = _mm512_castps_si512(_mm512_mul_ps(line, factor));
    }
    transpose(lines);
    for (int64_t j = 0; j < 16; ++j) {
      const __m256i row = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_castsi512_ps(lines[j])));
      if (rows[j]) _mm256_mask_storeu_epi16(rows[j] + t * tile_lines, inside, row);
    }
  }
}

// target[row i] += factor * row i of tiles of floats beside each other, for 16 rows at most.
inline void add_rows(const char* tiles, float factor, float* target, int64_t stride, int64_t rows, int64_t size) {
  for (int64_t i = 0; i < std::min(rows, tile_lines); ++i) {
    for (int64_t t = 0; t * tile_lines < size; ++t) {
      const __mmask16 inside = static_cast<__mmask16>(first_lanes(size - t * tile_lines, tile_lines));
      float* const line = target + i * stride + t * tile_lines;
      const __m512 sum = _mm512_fmadd_ps(_mm512_load_ps(tiles + t * tile_bytes + i * line_bytes),
                                         _mm512_set1_ps(factor), _mm512_maskz_loadu_ps(inside, line));
      _mm512_mask_storeu_ps(line, inside, sum);
    }
  }
}

}  // namespace
}  // namespace seq1f1b::cpu::amx
