// The queries of all heads that share a key head, as one list of rows: row r is query r / group of the group's head
// r % group. Neighbouring rows stand at neighbouring positions, so a panel of 32 rows sees almost one range of keys.
#pragma once
#include <algorithm>
#include <cstdint>
#include <limits>

#include "../attention.h"
#include "amx_packing.h"
#include "visible.h"

namespace seq1f1b::cpu::amx {
namespace {

constexpr int64_t block_length = 256;  // keys that are packed together; queries of one backward product
constexpr int64_t block_panels = block_length / panel_length;
constexpr int64_t largest_span = 8 * block_length;   // rows of a task, for heads of up to 64
constexpr int64_t smallest_span = 2 * block_length;  // of those that are cut smaller than memory asks for
constexpr int64_t tasks_wanted = 16;                 // more tasks than this are not worth packing the keys more often

inline int64_t blocks(int64_t count, int64_t length) { return (count + length - 1) / length; }

// Tiles that the entries of a head take. Both kinds of tile cover the same entries, so the last may be padding.
struct Extent {
  int64_t depth;    // tiles of 32 entries
  int64_t columns;  // tiles of 16 entries

  explicit Extent(int64_t size) : depth(blocks(size, tile_depth)), columns(2 * depth) {}
};

// How the rows of a key head are cut into spans: by the problem alone, so that threads change nothing.
struct QuerySpans {
  int64_t group, rows, length, count;  // rows of a key head; of a span; spans of a key head

  // `many`: where spans are tasks of their own, enough of them to go round.
  QuerySpans(const Problem& p, bool many) : group(p.heads / p.kv_heads), rows(group * p.queries) {
    const int64_t entries = std::max<int64_t>(64, std::max(p.size, p.value_size));
    int64_t longest = std::max(block_length, largest_span * 64 / entries / block_length * block_length);
    if (many) {
      const int64_t fair = blocks(rows * p.rows * p.kv_heads, tasks_wanted);
      longest = std::min(longest, std::max(smallest_span, fair));
    }
    const int64_t even = blocks(rows, std::max<int64_t>(1, blocks(rows, longest)));
    length = std::max<int64_t>(1, blocks(even, block_length)) * block_length;
    count = blocks(rows, length);
  }
};

// Later spans see more keys. In this order every half of the tasks is about as much work as the other.
inline int64_t light_beside_heavy(int64_t task, int64_t count) {
  return task % 2 == 0 ? task / 2 : count - 1 - task / 2;
}

// Rows [first, first + count) of one key head.
struct QuerySpan {
  const Problem& problem;
  int64_t row, kv_head, group, first, count;

  int64_t panels() const { return blocks(count, panel_length); }
  int64_t query(int64_t r) const { return (first + r) / group; }
  int64_t head(int64_t r) const { return kv_head * group + (first + r) % group; }
  int64_t lse(int64_t r) const { return (row * problem.heads + head(r)) * problem.queries + query(r); }
  template <class Pointer>
  int64_t offset(const Strided<Pointer>& x, int64_t r) const {
    return row * x.row + head(r) * x.head + query(r) * x.token;
  }
  Visible visible_of(int64_t panel) const {
    const int64_t last = std::min(count, (panel + 1) * panel_length) - 1;
    return visible(problem, row, query(panel * panel_length), query(last));
  }
  // The keys that each row of a panel sees, as [first, last]; rows beyond the span see none.
  void limits(int64_t panel, int32_t* first_key, int32_t* last_key) const {
    constexpr int64_t largest = std::numeric_limits<int32_t>::max();
    for (int64_t r = 0; r < panel_length; ++r) {
      const bool exists = panel * panel_length + r < count;
      const int64_t i = exists ? query(panel * panel_length + r) : 0;
      first_key[r] = exists ? static_cast<int32_t>(std::min(first_visible(problem, row, i), largest)) : 0;
      last_key[r] = exists ? static_cast<int32_t>(std::max<int64_t>(position(problem, i), -1)) : -1;
    }
  }
  // Where the panel's rows of a tensor lie.
  void rows_of(const Input& x, int64_t panel, Rows& rows) const {
    for (int64_t r = 0; r < panel_length; ++r) {
      const int64_t at = panel * panel_length + r;
      rows[r] = at < count ? static_cast<const BFloat16Bits*>(x.data) + offset(x, at) : nullptr;
    }
  }
  BFloat16Bits* target(const Output& x, int64_t r) const {
    return r < count ? static_cast<BFloat16Bits*>(x.data) + offset(x, r) : nullptr;
  }
};

}  // namespace
}  // namespace seq1f1b::cpu::amx
