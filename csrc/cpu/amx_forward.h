// Attention of a span of query rows: for each block of keys, for each panel of rows, transposed products K Q^T,
// weights, and the transposed output V^T P^T added up.
#pragma once
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "../attention.h"
#include "amx_keys.h"
#include "amx_packing.h"
#include "amx_queries.h"
#include "amx_softmax.h"
#include "amx_tiles.h"
#include "workspace.h"

namespace seq1f1b::cpu::amx {
namespace {

struct ForwardBuffers {
  Extent key_size, value_size;
  char *queries, *output;        // tiles of each panel: [2][depth] pairs, [2][columns] floats
  char *keys, *values;           // tiles of a block of keys: [16][depth] rows, transposed [columns][8] rows
  char* products;                // tiles of a panel with a block: [2][16] floats, then [2][8] pairs of weights
  char* rests;                   // [2][8] pairs
  Running* softmax;              // [panels][2]
  int32_t *first_key, *last_key;  // [panels][32]
  Visible* visible;              // [panels]

  ForwardBuffers(Arena& arena, const Problem& p, int64_t span)
      : key_size(p.size), value_size(p.value_size) {
    const int64_t panels = span / panel_length;
    queries = arena.take<char>(panels * query_bytes());
    output = arena.take<char>(panels * output_bytes());
    keys = arena.take<char>(2 * block_groups * key_size.depth * tile_bytes);
    values = arena.take<char>(value_size.columns * block_groups * tile_bytes);
    products = arena.take<char>(2 * half_bytes());
    rests = arena.take<char>(2 * block_groups * tile_bytes);
    softmax = arena.take<Running>(panels * 2);
    first_key = arena.take<int32_t>(span);
    last_key = arena.take<int32_t>(span);
    visible = arena.take<Visible>(panels);
  }
  int64_t query_bytes() const { return 2 * key_size.depth * tile_bytes; }
  int64_t output_bytes() const { return 2 * value_size.columns * tile_bytes; }
  static constexpr int64_t half_bytes() { return block_length * line_bytes; }
};

class SpanForward {
 public:
  SpanForward(const Forward& forward, const QuerySpan& span, const ForwardBuffers& buffers)
      : f_(forward), span_(span), b_(buffers), scale_(forward) {}

  void run() {
    for (int64_t panel = 0; panel < span_.panels(); ++panel) open(panel);
    const int64_t begin = std::max<int64_t>(0, seen_.begin) / block_length * block_length;
    for (int64_t start = begin; start < seen_.end; start += block_length) {
      const GroupedKeys block(f_, span_.row, start);
      pack(block);
      for (int64_t panel = 0; panel < span_.panels(); ++panel) {
        const Range groups = block.groups(b_.visible[panel]);
        if (!groups.empty()) add(block, panel, groups);
      }
    }
    for (int64_t panel = 0; panel < span_.panels(); ++panel) close(panel);
  }

 private:
  void open(int64_t panel) {
    Rows rows;
    span_.rows_of(f_.query, panel, rows);
    const int64_t depth = b_.key_size.depth;
    pack_along<Order::transposed>(rows, f_.size, depth, b_.queries + panel * b_.query_bytes(), depth * tile_bytes);
    std::memset(b_.output + panel * b_.output_bytes(), 0, b_.output_bytes());
    b_.softmax[2 * panel] = b_.softmax[2 * panel + 1] = Running::none();
    span_.limits(panel, b_.first_key + panel * panel_length, b_.last_key + panel * panel_length);
    b_.visible[panel] = span_.visible_of(panel);
    seen_.cover({b_.visible[panel].begin, b_.visible[panel].end});
  }

  void pack(const GroupedKeys& block) {
    Range groups{0, 0};
    for (int64_t panel = 0; panel < span_.panels(); ++panel) groups.cover(block.groups(b_.visible[panel]));
    const int64_t depth = b_.key_size.depth;
    for (int64_t g = groups.begin; g < groups.end; ++g) {
      Rows rows;
      block.rows_of(f_.key, span_.row, span_.kv_head, g, rows);
      pack_along<Order::as_is>(rows, f_.size, depth, b_.keys + 2 * g * depth * tile_bytes, depth * tile_bytes);
      block.rows_of(f_.value, span_.row, span_.kv_head, g, rows);
      pack_across<Order::transposed>(rows, f_.value_size, b_.value_size.columns, b_.values + g * tile_bytes,
                                     block_groups * tile_bytes);
    }
  }

  // The groups of a block for one panel.
  void add(const GroupedKeys& block, int64_t panel, Range groups) {
    const int64_t depth = b_.key_size.depth, half = b_.half_bytes();
    const Operand queries{b_.queries + panel * b_.query_bytes(), depth * tile_bytes};
    __m512 most[2];
    most[0] = most[1] = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    for (int64_t g = groups.begin; g < groups.end; ++g) {
      const Operand keys{b_.keys + 2 * g * depth * tile_bytes, depth * tile_bytes};
      multiply<false>(keys, queries, depth, {b_.products + 2 * g * tile_bytes, tile_bytes, half});
      // One group behind, so that the tile unit works on the next products meanwhile.
      if (g > groups.begin) look_at(block, panel, g - 1, most);
    }
    look_at(block, panel, groups.end - 1, most);

    char* const output = b_.output + panel * b_.output_bytes();
    const int64_t columns = b_.value_size.columns;
    const bool few = sees_few(b_.visible[panel]);
    for (int64_t h = 0; h < 2; ++h) {
      char* const products = b_.products + h * half;
      char* const rests = few ? b_.rests + (h * block_groups + groups.begin) * tile_bytes : nullptr;
      const __m512 fade = b_.softmax[2 * panel + h].step(products + 2 * groups.begin * tile_bytes,
                                                         groups.length() * panel_length / 2, most[h], scale_.factor,
                                                         products + groups.begin * tile_bytes, rests);
      if (_mm512_cmp_ps_mask(fade, _mm512_set1_ps(1.0f), _CMP_NEQ_UQ)) {
        char* const lines = output + h * columns * tile_bytes;
        for (int64_t d = 0; d < columns * tile_lines; ++d) {
          _mm512_store_ps(lines + d * line_bytes, _mm512_mul_ps(_mm512_load_ps(lines + d * line_bytes), fade));
        }
      }
    }
    add_values({b_.products + groups.begin * tile_bytes, half}, groups, output);
    if (few) add_values({b_.rests + groups.begin * tile_bytes, block_groups * tile_bytes}, groups, output);
  }

  void add_values(Operand weights, Range groups, char* output) {
    const int64_t columns = b_.value_size.columns;
    for (int64_t c = 0; c < columns; c += 2) {
      const Operand values{b_.values + (c * block_groups + groups.begin) * tile_bytes, block_groups * tile_bytes};
      multiply<true>(values, weights, groups.length(), {output + c * tile_bytes, tile_bytes, columns * tile_bytes});
    }
  }

  void look_at(const GroupedKeys& block, int64_t panel, int64_t group, __m512 (&most)[2]) {
    const bool whole = block.unmasked(b_.visible[panel], group);
    for (int64_t h = 0; h < 2; ++h) {
      const int64_t r = panel * panel_length + h * tile_lines;
      const Sight sight{whole ? nullptr : block.index(group), _mm512_load_si512(b_.first_key + r),
                        _mm512_load_si512(b_.last_key + r)};
      most[h] = bend_and_hide(b_.products + h * b_.half_bytes() + 2 * group * tile_bytes, scale_, sight, most[h]);
    }
  }

  void close(int64_t panel) {
    float* const lse = static_cast<float*>(f_.lse);
    const char* const output = b_.output + panel * b_.output_bytes();
    const __m512 zero = _mm512_setzero_ps();
    for (int64_t h = 0; h < 2; ++h) {
      const Running& softmax = b_.softmax[2 * panel + h];
      const __mmask16 seen = _mm512_cmp_ps_mask(softmax.sum, zero, _CMP_NEQ_UQ);
      const __m512 factor = _mm512_maskz_div_ps(seen, _mm512_set1_ps(1.0f), softmax.rounded);
      alignas(line_bytes) float reference[tile_lines], sum[tile_lines];
      _mm512_store_ps(reference, softmax.reference);
      _mm512_store_ps(sum, softmax.sum);
      Targets targets;
      for (int64_t j = 0; j < tile_lines; ++j) {
        const int64_t r = panel * panel_length + h * tile_lines + j;
        targets[j] = span_.target(f_.output, r);
        if (!targets[j]) continue;
        lse[span_.lse(r)] = (seen >> j) & 1 ? (reference[j] + std::log2(sum[j])) * static_cast<float>(ln2)
                                            : std::numeric_limits<float>::infinity();
      }
      write_columns(output + h * b_.value_size.columns * tile_bytes, factor, targets, f_.value_size);
    }
  }

  const Forward& f_;
  const QuerySpan& span_;
  const ForwardBuffers& b_;
  const Scale scale_;
  Range seen_{0, 0};
};

}  // namespace
}  // namespace seq1f1b::cpu::amx
