// From products q.k to softmax weights, in place. Scores lie transposed: a line holds 16 queries at one key, so that
// maxima and sums over keys are of whole vectors.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <limits>

#include "../attention.h"
#include "amx_keys.h"
#include "amx_vectors.h"

namespace seq1f1b::cpu::amx {
namespace {

// How a product x = q.k becomes a score in units of ln 2, so that a weight is 2^score: factor * bend(x), where `bend`
// is the identity when it can be, and never turns the order of scores around.
struct Scale {
  enum { identity, linear, tanh } shape;
  float inner, factor;  // bend(x) is x, inner * x, or tanh(inner * x); factor > 0

  explicit Scale(const Problem& p) {
    shape = p.softcap > 0 ? tanh : p.scale > 0 ? identity : linear;
    inner = static_cast<float>(shape == tanh ? p.scale / p.softcap : p.scale);
    factor = static_cast<float>((shape == tanh ? p.softcap : shape == identity ? p.scale : 1.0) * log2e);
  }
  bool bends() const { return shape != identity; }
  __m512 bend(__m512 x) const {
    if (shape == identity) return x;
    x = _mm512_mul_ps(x, _mm512_set1_ps(inner));
    return shape == tanh ? amx::tanh(x) : x;
  }
};

// Which keys of a group each of 16 queries sees; no index: all of them.
struct Sight {
  const int32_t* index;
  __m512i first_key, last_key;

  __mmask16 of(int64_t n) const { return sees(first_key, last_key, index[n]); }
};

// Bends the products of 16 queries with a group of keys and puts -infinity where a query does not see the key. Returns
// the largest ones, `largest` included.
inline __m512 bend_and_hide(char* products, const Scale& scale, const Sight& sight, __m512 largest) {
  if (!scale.bends() && !sight.index) {
    __m512 other = largest;  // two chains, since each maximum waits for the one before
    for (int64_t n = 0; n < panel_length; n += 2) {
      largest = _mm512_max_ps(largest, _mm512_load_ps(products + n * line_bytes));
      other = _mm512_max_ps(other, _mm512_load_ps(products + (n + 1) * line_bytes));
    }
    return _mm512_max_ps(largest, other);
  }
  const __m512 hidden = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  for (int64_t n = 0; n < panel_length; ++n) {
    __m512 x = scale.bend(_mm512_load_ps(products + n * line_bytes));
    if (sight.index) x = _mm512_mask_mov_ps(hidden, sight.of(n), x);
    _mm512_store_ps(products + n * line_bytes, x);
    largest = _mm512_max_ps(largest, x);
  }
  return largest;
}

// The softmax of 16 queries over the keys so far.
struct Running {
  // How far scores may exceed the reference before it is raised. Rarely raising it saves most of the work of scaling
  // the output so far; weights of up to 2^8 are no less exact than weights of up to 1.
  static constexpr float slack = 8.0f;

  __m512 reference;  // the score whose weight is 1: the largest one, but for a few units
  __m512 sum;        // of the weights
  __m512 rounded;    // of the weights as rounded to bfloat16, with their rests where these are kept: of what multiplies
                     // the values. Dividing by it takes the common part of the rounding errors out of the output

  static Running none() {
    // Not -infinity, so that a query which has seen no key yet does not subtract two infinities.
    return {_mm512_set1_ps(std::numeric_limits<float>::lowest()), _mm512_setzero_ps(), _mm512_setzero_ps()};
  }

  // Bent products of `pairs` pairs of keys, of which `most` are the largest, become weights: the right operand of a
  // product over keys, in the same memory, from `weights` on, which is not beyond `products`. What rounding took from
  // them goes to `rests`, if that is not null. Returns what the output so far is to be multiplied with.
  __m512 step(const char* products, int64_t pairs, __m512 most, float factor, char* weights, char* rests) {
    const __m512i interleave = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,  //
                                                23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512bh ones = reinterpret_cast<__m512bh>(_mm512_set1_epi16(0x3f80));
    const __m512 unit = _mm512_set1_ps(factor), before = reference, score = _mm512_mul_ps(most, unit);
    const __mmask16 outgrown = _mm512_cmp_ps_mask(score, _mm512_add_ps(reference, _mm512_set1_ps(slack)), _CMP_GT_OQ);
    reference = _mm512_mask_mov_ps(reference, outgrown, score);
    __m512 sums[2], rounded_sums[2];  // two chains, since each addition waits for the one before
    sums[0] = sums[1] = rounded_sums[0] = rounded_sums[1] = _mm512_setzero_ps();
    for (int64_t pair = 0; pair < pairs; pair += 2) {
      for (int64_t i = 0; i < 2; ++i) {
        const char* const lines = products + 2 * (pair + i) * line_bytes;
        const __m512 even = exp2(_mm512_fmsub_ps(_mm512_load_ps(lines), unit, reference));
        const __m512 odd = exp2(_mm512_fmsub_ps(_mm512_load_ps(lines + line_bytes), unit, reference));
        const __m512i both = to_bfloat16(even, odd), weight = _mm512_permutexvar_epi16(interleave, both);
        sums[i] = _mm512_add_ps(sums[i], _mm512_add_ps(even, odd));
        rounded_sums[i] = _mm512_dpbf16_ps(rounded_sums[i], reinterpret_cast<__m512bh>(weight), ones);
        _mm512_store_si512(weights + (pair + i) * line_bytes, weight);
        if (rests) {
          const __m512i rest = _mm512_permutexvar_epi16(interleave, rest_of(even, odd, both));
          rounded_sums[i] = _mm512_dpbf16_ps(rounded_sums[i], reinterpret_cast<__m512bh>(rest), ones);
          _mm512_store_si512(rests + (pair + i) * line_bytes, rest);
        }
      }
    }
    const __m512 fade = exp2<6>(_mm512_sub_ps(before, reference));
    sum = _mm512_fmadd_ps(sum, fade, _mm512_add_ps(sums[0], sums[1]));
    rounded = _mm512_fmadd_ps(rounded, fade, _mm512_add_ps(rounded_sums[0], rounded_sums[1]));
    return fade;
  }
};

}  // namespace
}  // namespace seq1f1b::cpu::amx
