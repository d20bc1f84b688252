// A block of keys and values in contiguous scratch.
#pragma once
#include <cstdint>

#include "../attention.h"
#include "columns.h"
#include "simd.h"
#include "storage.h"
#include "workspace.h"

namespace seq1f1b::cpu {
namespace {

template <class Real>
struct KeyBlock {
  Real* key;           // [block, key_width]
  Real* value;         // [block, value_width]
  Integer<Real>* ids;  // the key's number; beyond every query's last where `key_mask` hides it
  int64_t key_width, value_width;
  int64_t begin = 0, end = 0;
  bool any_hidden = false, any_shown = false;

  void cut(Arena& arena, const Problem& p, int64_t block) {
    key_width = round_up(p.size, lanes<Real>);
    value_width = round_up(p.value_size, lanes<Real>);
    key = arena.take<Real>(block * key_width);
    value = arena.take<Real>(block * value_width);
    ids = arena.take<Integer<Real>>(block);
  }

  // Hidden keys become zeros: whatever padding holds must not reach a product.
  void load(const Problem& p, const Storage<Real>& type, const Input& keys, const Input& values, int64_t row,
            int64_t kv_head, int64_t from, int64_t to) {
    begin = from;
    end = to;
    any_hidden = any_shown = false;
    for (int64_t n = begin; n < end; ++n) {
      const bool shown = !p.key_mask || p.key_mask[row * p.keys + n];
      ids[n - begin] = shown ? Integer<Real>(n) : Integer<Real>(p.keys);
      (shown ? any_shown : any_hidden) = true;
      load_one(type, keys, row, kv_head, n, shown ? p.size : 0, key_width, key + (n - begin) * key_width);
      load_one(type, values, row, kv_head, n, shown ? p.value_size : 0, value_width,
               value + (n - begin) * value_width);
    }
  }

 private:
  static void load_one(const Storage<Real>& type, const Input& from, int64_t row, int64_t kv_head, int64_t n,
                       int64_t size, int64_t width, Real* to) {
    if (size > 0) type.load(from.data, row * from.row + kv_head * from.head + n * from.token, size, to);
    for (int64_t d = size; d < width; ++d) to[d] = 0;
  }
};

// The part of a block of keys that a strip sees.
struct Span {
  int64_t begin, end;
  bool masked;  // some query does not see some key of it
};
template <class Real>
inline Span seen(const KeyBlock<Real>& block, const Visible& v) {
  Span s{larger(v.begin, block.begin), smaller(v.end, block.end), block.any_hidden};
  s.masked = s.masked || v.all_begin > s.begin || v.all_end < s.end;
  return s;
}

}  // namespace
}  // namespace seq1f1b::cpu
