// Weights and their gradients for 32 queries and 32 keys, from the products K Q^T and V dO^T, both transposed.
#pragma once
#include <immintrin.h>

#include <cstdint>

#include "amx_keys.h"
#include "amx_softmax.h"
#include "amx_tiles.h"
#include "amx_vectors.h"

namespace seq1f1b::cpu::amx {
namespace {

// What is known of a panel of queries before any key, 16 queries to a vector.
struct PanelState {
  __m512 lse[2];    // in units of ln 2
  __m512 delta[2];  // dO . O
  __m512i first_key[2], last_key[2];
};

// 32 x 32 products of each kind: [2 halves of the queries][32 keys] lines.
struct Products {
  const char *scores, *values;

  static constexpr int64_t half_bytes() { return panel_length * line_bytes; }
  static constexpr int64_t bytes() { return 2 * half_bytes(); }
};

// Where the results go. `weights` and `gradients`: left operands of products over queries, a key to a line;
// `pairs`: the gradients again, as the right operand of a product over keys; `rests`: likewise what rounding to
// bfloat16 took from them, null when not wanted.
struct Results {
  char *weights, *gradients;
  int64_t second;  // bytes to the tiles of keys 16 .. 31
  char *pairs, *rests;
  int64_t second_pairs;  // bytes to the other half of the queries
};

// In `pairs` the columns of a panel's two tiles stand in the order in which two lines interleave without crossing the
// quarters of a vector.
inline int64_t query_of_column(int64_t tile, int64_t column) { return column / 4 * 8 + tile * 4 + column % 4; }

inline void store_pairs(__m512i even, __m512i odd, char* line, int64_t second) {
  _mm512_store_si512(line, _mm512_unpacklo_epi16(even, odd));
  _mm512_store_si512(line + second, _mm512_unpackhi_epi16(even, odd));
}

enum class Wanted { keys, queries, both };  // whose gradients

// Weights P = 2^(score - lse) and gradients P (dP - delta), by which the gradients of the products are to be scaled.
template <Wanted wanted, bool bent>
inline void differentiate(const Products& products, const Scale& scale, const PanelState& queries,
                          const int32_t* index, const Results& to) {
  const __m512 unit = _mm512_set1_ps(scale.factor), one = _mm512_set1_ps(1.0f);
  for (int64_t n = 0; n < panel_length; n += 2) {
    __m512i gradients[2], rests[2];
    for (int64_t i = 0; i < 2; ++i) {
      __m512 p[2], g[2];
      for (int64_t h = 0; h < 2; ++h) {
        const int64_t line = h * Products::half_bytes() + (n + i) * line_bytes;
        __m512 x = _mm512_load_ps(products.scores + line);
        if (bent) x = scale.bend(x);
        p[h] = exp2(_mm512_fmsub_ps(x, unit, queries.lse[h]));
        if (index) {
          const Sight sight{index, queries.first_key[h], queries.last_key[h]};
          p[h] = _mm512_maskz_mov_ps(sight.of(n + i), p[h]);
        }
        g[h] = _mm512_mul_ps(p[h], _mm512_sub_ps(_mm512_load_ps(products.values + line), queries.delta[h]));
        if (bent && scale.shape == Scale::tanh) g[h] = _mm512_mul_ps(g[h], _mm512_fnmadd_ps(x, x, one));
      }
      gradients[i] = to_bfloat16(g[0], g[1]);
      if (wanted != Wanted::keys && to.rests) rests[i] = rest_of(g[0], g[1], gradients[i]);
      if (wanted != Wanted::queries) {
        const int64_t line = (n + i) / tile_lines * to.second + (n + i) % tile_lines * line_bytes;
        _mm512_store_si512(to.weights + line, to_bfloat16(p[0], p[1]));
        _mm512_store_si512(to.gradients + line, gradients[i]);
      }
    }
    if (wanted != Wanted::keys) {
      store_pairs(gradients[0], gradients[1], to.pairs + n / 2 * line_bytes, to.second_pairs);
      if (to.rests) store_pairs(rests[0], rests[1], to.rests + n / 2 * line_bytes, to.second_pairs);
    }
  }
}

}  // namespace
}  // namespace seq1f1b::cpu::amx
