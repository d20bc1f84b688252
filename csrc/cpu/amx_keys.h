// A block of 256 keys, in groups of 32, and which of them the panels of queries see.
#pragma once
#include <algorithm>
#include <cstdint>
#include <limits>

#include "amx_queries.h"

namespace seq1f1b::cpu::amx {
namespace {

constexpr int64_t block_groups = block_length / panel_length;

struct Range {
  int64_t begin, end;

  bool empty() const { return begin >= end; }
  int64_t length() const { return end - begin; }
  bool contains(int64_t i) const { return begin <= i && i < end; }
  void cover(const Range& other) {
    if (other.empty()) return;
    *this = empty() ? other : Range{std::min(begin, other.begin), std::max(end, other.end)};
  }
};

// The fewer keys a query sees, the larger its output and its gradient, and the less do rounding errors of the weights
// and of their gradients average out. Where there are this few, it costs next to nothing to multiply with what rounding
// took away too.
inline bool sees_few(const Visible& v) { return v.end - v.begin <= block_length; }

class GroupedKeys {
 public:
  GroupedKeys(const Problem& p, int64_t row, int64_t start) : start_(start) {
    for (int64_t g = 0; g < block_groups; ++g) {
      int64_t seen = 0;
      for (int64_t n = g * panel_length; n < (g + 1) * panel_length; ++n) {
        const int64_t key = start + n;
        const bool visible = key < p.keys && (!p.key_mask || p.key_mask[row * p.keys + key]);
        index_[n] = visible ? static_cast<int32_t>(key) : hidden_key;
        seen += visible;
      }
      any_[g] = seen > 0;
      all_[g] = seen == panel_length;
    }
  }

  int64_t start() const { return start_; }
  // Position of a key; larger than every position where key_mask hides the key or there is none.
  const int32_t* index(int64_t group) const { return index_ + group * panel_length; }

  // The groups that queries see which see the keys of v.
  Range groups(const Visible& v) const {
    if (v.begin >= v.end) return {0, 0};
    Range range{std::clamp<int64_t>((v.begin - start_) / panel_length, 0, block_groups),
                std::clamp<int64_t>(blocks(std::max<int64_t>(v.end - start_, 0), panel_length), 0, block_groups)};
    while (!range.empty() && !any_[range.begin]) ++range.begin;
    while (!range.empty() && !any_[range.end - 1]) --range.end;
    return range;
  }

  // Whether queries which see the keys of v all see every key of a group.
  bool unmasked(const Visible& v, int64_t group) const {
    const int64_t first = start_ + group * panel_length;
    return all_[group] && first >= v.all_begin && first + panel_length <= v.all_end;
  }

  // Where a group's rows of a tensor of one head lie; hidden keys count as zeros, so that nothing in them spreads.
  void rows_of(const Input& x, int64_t row, int64_t kv_head, int64_t group, Rows& rows) const {
    const BFloat16Bits* const head = static_cast<const BFloat16Bits*>(x.data) + row * x.row + kv_head * x.head;
    for (int64_t n = 0; n < panel_length; ++n) {
      const int32_t key = index(group)[n];
      rows[n] = key == hidden_key ? nullptr : head + key * x.token;
    }
  }

 private:
  static constexpr int32_t hidden_key = std::numeric_limits<int32_t>::max();

  int64_t start_;
  alignas(line_bytes) int32_t index_[block_length];
  bool any_[block_groups], all_[block_groups];
};

// Which of the 16 queries with these limits see a key.
inline __mmask16 sees(__m512i first_key, __m512i last_key, int32_t key) {
  const __m512i k = _mm512_set1_epi32(key);
  return _mm512_mask_cmple_epi32_mask(_mm512_cmple_epi32_mask(first_key, k), k, last_key);
}

}  // namespace
}  // namespace seq1f1b::cpu::amx
