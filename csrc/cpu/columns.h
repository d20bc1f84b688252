// A super-block: queries of all heads that share one key head, packed as the columns of a transposed score matrix.
//
// Packed column c is query c / group of head c % group, so neighbours stand at almost the same position whatever the
// number of heads, and a block of one query and many heads is as good as one of many queries. Columns are worked on in
// strips as wide as a tile; what pads the last strip gives zeros and is never written.
#pragma once
#include <cstdint>

#include "../attention.h"
#include "simd.h"
#include "storage.h"
#include "tiles.h"
#include "visible.h"
#include "workspace.h"

namespace seq1f1b::cpu {
namespace {

template <class Real>
constexpr int strip = tile_columns<Real>;

inline int64_t group(const Problem& p) { return p.heads / p.kv_heads; }
inline int64_t packed_columns(const Problem& p) { return group(p) * p.queries; }

template <class Real>
struct Columns {
  Integer<Real>* first;  // the first key a column sees
  Integer<Real>* last;   // the last key it sees
  Visible* visible;      // of each strip
  int64_t begin = 0, count = 0, strips = 0;
  Visible all{0, 0, 0, 0};

  void cut(Arena& arena, int64_t columns) {
    first = arena.take<Integer<Real>>(columns);
    last = arena.take<Integer<Real>>(columns);
    visible = arena.take<Visible>(columns / strip<Real>);
  }

  int64_t query(const Problem& p, int64_t column) const { return (begin + column) / group(p); }
  int64_t head(const Problem& p, int64_t kv_head, int64_t column) const {
    return kv_head * group(p) + (begin + column) % group(p);
  }

  // The columns [begin, end), padded to whole multiples of `unit`.
  void set(const Problem& p, int64_t row, int64_t from, int64_t to, int64_t unit) {
    begin = from;
    count = to - from;
    strips = round_up(count, unit) / strip<Real>;
    all = {p.keys, 0, 0, p.keys};
    for (int64_t s = 0; s < strips; ++s) {
      Visible v{p.keys, 0, 0, p.keys};
      for (int64_t c = s * strip<Real>; c < (s + 1) * strip<Real>; ++c) {
        const bool real = c < count;
        const int64_t i = real ? query(p, c) : 0;
        const int64_t low = real ? smaller(first_visible(p, row, i), p.keys) : p.keys;
        const int64_t high = real ? position(p, i) : -1;
        first[c] = Integer<Real>(low);
        last[c] = Integer<Real>(high);
        if (!real) continue;
        v.begin = smaller(v.begin, low);
        v.end = larger(v.end, high + 1);
        v.all_begin = larger(v.all_begin, low);
        v.all_end = smaller(v.all_end, high + 1);
      }
      visible[s] = v;
      all.begin = smaller(all.begin, v.begin);
      all.end = larger(all.end, v.end);
    }
  }

  // Rows of a tensor of queries, one a column, `width` numbers each with zeros beyond `size`.
  void load(const Problem& p, const Storage<Real>& type, const Input& from, int64_t row, int64_t kv_head, int64_t size,
            int64_t width, int64_t first_column, int64_t columns, Real* to) const {
    for (int64_t c = 0; c < columns; ++c, to += width) {
      const int64_t column = first_column + c;
      int64_t filled = 0;
      if (column < count) {
        const int64_t index = row * from.row + head(p, kv_head, column) * from.head + query(p, column) * from.token;
        type.load(from.data, index, size, to);
        filled = size;
      }
      for (int64_t d = filled; d < width; ++d) to[d] = 0;
    }
  }
};

// A strip's rows of `width` numbers, each times `factor`, as `size` rows of a strip.
template <class Real>
void transpose(const Real* __restrict from, int64_t size, int64_t width, Real factor, Real* __restrict to) {
  for (int64_t d = 0; d < size; ++d) {
    for (int c = 0; c < strip<Real>; ++c) to[d * strip<Real> + c] = factor * from[c * width + d];
  }
}

}  // namespace
}  // namespace seq1f1b::cpu
