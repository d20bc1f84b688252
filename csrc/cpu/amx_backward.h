// Gradients of attention for blocks of 256 query rows and 256 keys: transposed products K Q^T and V dO^T, weights P^T
// and their gradients dS^T, then dV += P^T dO, dK += dS^T Q and dQ^T += K^T dS^T.
#pragma once
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "../attention.h"
#include "amx_gradients.h"
#include "amx_keys.h"
#include "amx_packing.h"
#include "amx_queries.h"
#include "amx_softmax.h"
#include "amx_tiles.h"
#include "workspace.h"

namespace seq1f1b::cpu::amx {
namespace {

constexpr int64_t most_key_blocks = 4;

struct BackwardSizes {
  Extent key_size, value_size;
  int64_t row_blocks, key_blocks;  // blocks of query rows and of keys that are held at a time, 4 of keys at most
};

struct BackwardBuffers : BackwardSizes {
  char *queries, *outputs;            // of each panel: [2][depth] pairs, of Q and dO
  char *query_rows, *output_rows;     // of each block of query rows: [columns][8] pairs
  char* query_sums;                   // of each panel: [2][columns] floats, dQ^T
  float *lse, *delta;                 // [rows]
  int32_t *first_key, *last_key;      // [rows]
  Visible* visible;                   // [panels]
  char *keys, *values, *transposed;   // of each block of keys: [16][depth] rows, and K^T as [columns][8] rows
  char *key_sums, *value_sums;        // of each block of keys: [16][columns] floats
  char* products;                     // 2 x Products, of the panel at hand and of the next one
  char *weights, *gradients;          // of a group of keys with a block of query rows: [2][8] rows
  char *pairs, *rests;                // of a block of keys with a block of query rows: [8 panels][2][8] pairs

  BackwardBuffers(Arena& arena, const BackwardSizes& sizes) : BackwardSizes(sizes) {
    const int64_t rows = row_blocks * block_length, panels = row_blocks * block_panels;
    const int64_t k = key_size.depth, v = value_size.depth;
    queries = arena.take<char>(panels * panel(k));
    outputs = arena.take<char>(panels * panel(v));
    query_rows = arena.take<char>(panels * panel(k));
    output_rows = arena.take<char>(panels * panel(v));
    query_sums = arena.take<char>(panels * sums(k));
    lse = arena.take<float>(rows);
    delta = arena.take<float>(rows);
    first_key = arena.take<int32_t>(rows);
    last_key = arena.take<int32_t>(rows);
    visible = arena.take<Visible>(panels);
    keys = arena.take<char>(key_blocks * block_groups * panel(k));
    values = arena.take<char>(key_blocks * block_groups * panel(v));
    transposed = arena.take<char>(key_blocks * block_groups * panel(k));
    key_sums = arena.take<char>(key_blocks * block_groups * sums(k));
    value_sums = arena.take<char>(key_blocks * block_groups * sums(v));
    products = arena.take<char>(4 * Products::bytes());
    weights = arena.take<char>(2 * block_panels * tile_bytes);
    gradients = arena.take<char>(2 * block_panels * tile_bytes);
    pairs = arena.take<char>(block_panels * 2 * block_groups * tile_bytes);
    rests = arena.take<char>(block_panels * 2 * block_groups * tile_bytes);
  }
  // Bytes of 32 rows of a head as bfloat16 and as sums.
  static int64_t panel(int64_t depth) { return 2 * depth * tile_bytes; }
  static int64_t sums(int64_t depth) { return 4 * depth * tile_bytes; }
};

template <Wanted wanted>
class BlockBackward {
 public:
  BlockBackward(const Backward& backward, int64_t row, int64_t kv_head, const BackwardBuffers& buffers)
      : f_(backward), row_(row), kv_head_(kv_head), b_(buffers), scale_(backward) {}

  // Gets ready for a span of at most `row_blocks` blocks. Returns the keys that it sees.
  Range open(const QuerySpan& span) {
    Range seen{0, 0};
    for (int64_t panel = 0; panel < span.panels(); ++panel) {
      b_.visible[panel] = span.visible_of(panel);
      seen.cover({std::max<int64_t>(0, b_.visible[panel].begin), b_.visible[panel].end});
    }
    return seen;
  }

  void pack(const QuerySpan& span) {
    const int64_t k = b_.key_size.depth, v = b_.value_size.depth;
    for (int64_t panel = 0; panel < span.panels(); ++panel) {
      Rows rows, outputs;
      span.rows_of(f_.query, panel, rows);
      pack_along<Order::transposed>(rows, f_.size, k, b_.queries + panel * b_.panel(k), k * tile_bytes);
      if (wanted != Wanted::queries) {
        pack_across<Order::as_is>(rows, f_.size, b_.key_size.columns, across(b_.query_rows, panel, k),
                                  block_panels * tile_bytes);
      }
      span.rows_of(f_.gradient, panel, rows);
      pack_along<Order::transposed>(rows, f_.value_size, v, b_.outputs + panel * b_.panel(v), v * tile_bytes);
      if (wanted != Wanted::queries) {
        pack_across<Order::as_is>(rows, f_.value_size, b_.value_size.columns, across(b_.output_rows, panel, v),
                                  block_panels * tile_bytes);
      }
      span.rows_of(f_.output, panel, outputs);
      for (int64_t r = 0; r < panel_length; ++r) {
        const int64_t at = panel * panel_length + r;
        b_.delta[at] = rows[r] ? dot(rows[r], outputs[r], f_.value_size) : 0.0f;
        b_.lse[at] = rows[r] ? static_cast<const float*>(f_.lse)[span.lse(at)] * static_cast<float>(log2e)
                             : std::numeric_limits<float>::infinity();
      }
      span.limits(panel, b_.first_key + panel * panel_length, b_.last_key + panel * panel_length);
      if (wanted != Wanted::keys) std::memset(b_.query_sums + panel * b_.sums(k), 0, b_.sums(k));
    }
  }

  // Keys of `block` that somebody sees, as block `slot` of those held, without gradients so far.
  void pack(const GroupedKeys& block, Range groups, int64_t slot) {
    const int64_t k = b_.key_size.depth, v = b_.value_size.depth;
    for (int64_t g = groups.begin; g < groups.end; ++g) {
      Rows rows;
      block.rows_of(f_.key, row_, kv_head_, g, rows);
      pack_along<Order::as_is>(rows, f_.size, k, keys(b_.keys, slot, g, b_.panel(k)), k * tile_bytes);
      if (wanted != Wanted::keys) {
        pack_across<Order::transposed>(rows, f_.size, b_.key_size.columns,
                                       keys(b_.transposed, slot, 0, b_.panel(k)) + g * tile_bytes,
                                       block_groups * tile_bytes);
      }
      block.rows_of(f_.value, row_, kv_head_, g, rows);
      pack_along<Order::as_is>(rows, f_.value_size, v, keys(b_.values, slot, g, b_.panel(v)), v * tile_bytes);
      started_[slot * block_groups + g] = false;
    }
  }

  // Everything that block `rows` of the span and a block of keys give each other.
  void meet(const QuerySpan& span, int64_t rows, const GroupedKeys& block, int64_t slot) {
    const int64_t first = rows * block_panels, panels = std::min(block_panels, span.panels() - first);
    Range seen[block_panels], all{0, 0};
    for (int64_t i = 0; i < panels; ++i) {
      seen[i] = block.groups(b_.visible[first + i]);
      all.cover(seen[i]);
    }
    for (int64_t g = all.begin; g < all.end; ++g) {
      int64_t looking[block_panels], count = 0;
      for (int64_t i = 0; i < panels; ++i) {
        if (seen[i].contains(g)) looking[count++] = i;
      }
      if (count == 0) continue;
      multiply_group(first + looking[0], slot, g, 0);
      for (int64_t i = 0; i < count; ++i) {
        // One panel ahead, so that the tile unit works on it meanwhile.
        if (i + 1 < count) multiply_group(first + looking[i + 1], slot, g, i + 1);
        differentiate_group(block, g, first, looking[i], i);
      }
      if (wanted != Wanted::queries) {
        const Range among{looking[0], looking[count - 1] + 1};
        for (int64_t i = among.begin; i < among.end; ++i) {
          if (!seen[i].contains(g)) clear_group(i);
        }
        add_keys(rows, among, slot, g);
      }
    }
    if (wanted == Wanted::keys) return;
    for (int64_t i = 0; i < panels; ++i) {
      if (seen[i].empty()) continue;
      add_queries(first + i, b_.pairs + 2 * i * block_groups * tile_bytes, seen[i], slot);
      if (!sees_few(b_.visible[first + i])) continue;
      add_queries(first + i, b_.rests + 2 * i * block_groups * tile_bytes, seen[i], slot);
    }
  }

  // Adds the gradients of the keys of a block to those of earlier calls.
  void close(int64_t start, Range groups, int64_t slot) {
    const int64_t k = b_.key_size.depth, v = b_.value_size.depth;
    for (int64_t n = groups.begin * panel_length; n < groups.end * panel_length; n += tile_lines) {
      if (!started_[slot * block_groups + n / panel_length]) continue;
      add(f_.key_gradient, start + n, keys(b_.key_sums, slot, 0, b_.sums(k)) + n / tile_lines * 2 * k * tile_bytes,
          f_.size, static_cast<float>(f_.scale));
      add(f_.value_gradient, start + n, keys(b_.value_sums, slot, 0, b_.sums(v)) + n / tile_lines * 2 * v * tile_bytes,
          f_.value_size, 1.0f);
    }
  }

  // Writes the gradients of the queries of a span.
  void close(const QuerySpan& span) {
    const int64_t columns = b_.key_size.columns;
    for (int64_t panel = 0; panel < span.panels(); ++panel) {
      for (int64_t h = 0; h < 2; ++h) {
        Targets targets;
        for (int64_t j = 0; j < tile_lines; ++j) {
          targets[j] = span.target(f_.query_gradient, panel * panel_length + query_of_column(h, j));
        }
        write_columns(b_.query_sums + (2 * panel + h) * columns * tile_bytes,
                      _mm512_set1_ps(static_cast<float>(f_.scale)), targets, f_.size);
      }
    }
  }

 private:
  static float dot(const BFloat16Bits* a, const BFloat16Bits* b, int64_t size) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t e = 0; e < size; e += tile_lines) {
      const __mmask16 inside = static_cast<__mmask16>(first_lanes(size - e, tile_lines));
      const auto load = [&](const BFloat16Bits* x) {
        return from_bfloat16(_mm256_maskz_loadu_epi16(inside, x + e));
      };
      sum = _mm512_fmadd_ps(load(a), load(b), sum);
    }
    return _mm512_reduce_add_ps(sum);
  }

  // A panel's part of tiles that lie [columns][8 panels] for each block of query rows.
  char* across(char* tiles, int64_t panel, int64_t depth) const {
    return tiles + panel / block_panels * block_panels * b_.panel(depth) + panel % block_panels * tile_bytes;
  }
  // A group's part of tiles that lie [8 groups] for each block of keys.
  static char* keys(char* tiles, int64_t slot, int64_t group, int64_t bytes) {
    return tiles + (slot * block_groups + group) * bytes;
  }

  void multiply_group(int64_t panel, int64_t slot, int64_t group, int64_t turn) {
    const int64_t k = b_.key_size.depth, v = b_.value_size.depth;
    char* const scores = b_.products + turn % 2 * 2 * Products::bytes();
    multiply<false>({keys(b_.keys, slot, group, b_.panel(k)), k * tile_bytes},
                    {b_.queries + panel * b_.panel(k), k * tile_bytes}, k,
                    {scores, tile_bytes, Products::half_bytes()});
    multiply<false>({keys(b_.values, slot, group, b_.panel(v)), v * tile_bytes},
                    {b_.outputs + panel * b_.panel(v), v * tile_bytes}, v,
                    {scores + Products::bytes(), tile_bytes, Products::half_bytes()});
  }

  void differentiate_group(const GroupedKeys& block, int64_t group, int64_t first_panel, int64_t i, int64_t turn) {
    const char* const scores = b_.products + turn % 2 * 2 * Products::bytes();
    const Products products{scores, scores + Products::bytes()};
    const int64_t panel = first_panel + i, pairs = (2 * i * block_groups + group) * tile_bytes;
    const Results results{b_.weights + i * tile_bytes, b_.gradients + i * tile_bytes,
                          block_panels * tile_bytes, b_.pairs + pairs,
                          sees_few(b_.visible[panel]) ? b_.rests + pairs : nullptr, block_groups * tile_bytes};
    PanelState state;
    for (int64_t h = 0; h < 2; ++h) {
      const int64_t r = panel * panel_length + h * tile_lines;
      state.lse[h] = _mm512_load_ps(b_.lse + r);
      state.delta[h] = _mm512_load_ps(b_.delta + r);
      state.first_key[h] = _mm512_load_si512(b_.first_key + r);
      state.last_key[h] = _mm512_load_si512(b_.last_key + r);
    }
    const int32_t* const index = block.unmasked(b_.visible[panel], group) ? nullptr : block.index(group);
    if (scale_.bends()) {
      differentiate<wanted, true>(products, scale_, state, index, results);
    } else {
      differentiate<wanted, false>(products, scale_, state, index, results);
    }
  }

  // A panel that does not see the group, between panels that do.
  void clear_group(int64_t i) {
    for (int64_t half = 0; half < 2; ++half) {
      std::memset(b_.weights + (half * block_panels + i) * tile_bytes, 0, tile_bytes);
      std::memset(b_.gradients + (half * block_panels + i) * tile_bytes, 0, tile_bytes);
    }
  }

  void add_keys(int64_t rows, Range panels, int64_t slot, int64_t group) {
    bool& started = started_[slot * block_groups + group];
    if (started) {
      add_keys<true>(rows, panels, slot, group);
    } else {
      add_keys<false>(rows, panels, slot, group);
    }
    started = true;
  }
  template <bool accumulate>
  void add_keys(int64_t rows, Range panels, int64_t slot, int64_t group) const {
    add_product<accumulate>(b_.weights, b_.output_rows, rows, panels, b_.value_size,
                            keys(b_.value_sums, slot, group, b_.sums(b_.value_size.depth)));
    add_product<accumulate>(b_.gradients, b_.query_rows, rows, panels, b_.key_size,
                            keys(b_.key_sums, slot, group, b_.sums(b_.key_size.depth)));
  }
  template <bool accumulate>
  void add_product(const char* left, const char* right, int64_t rows, Range panels, Extent size, char* sums) const {
    const Operand weights{left + panels.begin * tile_bytes, block_panels * tile_bytes};
    const char* const block = right + rows * block_panels * b_.panel(size.depth) + panels.begin * tile_bytes;
    for (int64_t c = 0; c < size.columns; c += 2) {
      multiply<accumulate>(weights, {block + c * block_panels * tile_bytes, block_panels * tile_bytes},
                           panels.length(), {sums + c * tile_bytes, size.columns * tile_bytes, tile_bytes});
    }
  }

  void add_queries(int64_t panel, const char* pairs, Range groups, int64_t slot) {
    const int64_t columns = b_.key_size.columns;
    char* const sums = b_.query_sums + 2 * panel * columns * tile_bytes;
    const char* const transposed = keys(b_.transposed, slot, 0, b_.panel(b_.key_size.depth));
    const Operand gradients{pairs + groups.begin * tile_bytes, block_groups * tile_bytes};
    for (int64_t c = 0; c < columns; c += 2) {
      multiply<true>({transposed + (c * block_groups + groups.begin) * tile_bytes, block_groups * tile_bytes},
                     gradients, groups.length(), {sums + c * tile_bytes, tile_bytes, columns * tile_bytes});
    }
  }

  void add(const Output& x, int64_t key, const char* sums, int64_t size, float factor) {
    float* const target = static_cast<float*>(x.data) + row_ * x.row + kv_head_ * x.head + key * x.token;
    add_rows(sums, factor, target, x.token, f_.keys - key, size);
  }

  const Backward& f_;
  const int64_t row_, kv_head_;
  const BackwardBuffers& b_;
  const Scale scale_;
  // Groups of keys which have gradients in `key_sums` and `value_sums`.
  bool started_[most_key_blocks * block_groups];
};

}  // namespace
}  // namespace seq1f1b::cpu::amx
