// Which keys a block of queries sees: blocks of keys that none of them sees are skipped, and blocks that all of them
// see need no comparison of positions. The functions are static because files compiled for different instruction sets
// include them.
#pragma once
#include <cstdint>

#include "../attention.h"

namespace seq1f1b::cpu {

// The position of query i, which is the last key it sees.
static inline int64_t position(const Problem& p, int64_t i) { return p.keys - p.queries + i; }

// The first key that query i of a row sees, before `key_mask`; beyond its position when it sees none.
static inline int64_t first_visible(const Problem& p, int64_t row, int64_t i) {
  const int64_t of_window = p.window > 0 ? position(p, i) - p.window + 1 : 0;
  const int64_t of_document = p.first_key ? p.first_key[row * p.queries + i] : 0;
  const int64_t first = of_window > of_document ? of_window : of_document;
  return first > 0 ? first : 0;
}

struct Visible {
  int64_t begin, end;          // no query of the block sees a key outside [begin, end)
  int64_t all_begin, all_end;  // every query of the block sees [all_begin, all_end), before `key_mask`
};

static inline Visible visible(const Problem& p, int64_t row, int64_t first_query, int64_t last_query) {
  Visible v{p.keys, position(p, last_query) + 1, 0, position(p, first_query) + 1};
  for (int64_t i = first_query; i <= last_query; ++i) {
    const int64_t first = first_visible(p, row, i);
    if (first < v.begin) v.begin = first;
    if (first > v.all_begin) v.all_begin = first;
  }
  return v;
}

}  // namespace seq1f1b::cpu
