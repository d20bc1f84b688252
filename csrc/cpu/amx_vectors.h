// What the kernels need of vectors of 16 floats.
#pragma once
#include <immintrin.h>

#include <cstdint>

#include "logarithms.h"

namespace seq1f1b::cpu::amx {
namespace {

// While one exists, results too small for a normal float become zero. Otherwise every vector with a weight below
// 2^-126, of which there are many where scores differ a lot, takes sixty times as long.
class TinyIsZero {
 public:
  TinyIsZero() : before_(_mm_getcsr()) { _mm_setcsr(before_ | _MM_FLUSH_ZERO_ON); }
  ~TinyIsZero() { _mm_setcsr(before_); }
  TinyIsZero(const TinyIsZero&) = delete;
  TinyIsZero& operator=(const TinyIsZero&) = delete;

 private:
  unsigned before_;
};

// 2^x; 0 for -infinity. The polynomials are the minimax ones of 2^f for f in [0, 1], by relative error: 2.6e-6 for
// degree 4, which is far below the rounding of a weight to bfloat16, and 8e-8 for degree 6.
template <int Degree = 4>
inline __m512 exp2(__m512 x) {
  static_assert(Degree == 4 || Degree == 6, "no other polynomial is given");
  constexpr int fraction = 0x09;  // x - floor(x), without exceptions
  const __m512 f = _mm512_reduce_ps(x, fraction);
  __m512 y;
  if constexpr (Degree == 4) {
    y = _mm512_fmadd_ps(_mm512_set1_ps(0.0135341678f), f, _mm512_set1_ps(0.0520114601f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.241442755f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.693003833f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.00000262f));
  } else {
    y = _mm512_fmadd_ps(_mm512_set1_ps(0.000217022549f), f, _mm512_set1_ps(0.00124396884f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.00967884064f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.0554833412f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.24022983f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.693147004f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f));
  }
  return _mm512_scalef_ps(y, x);  // y * 2^floor(x)
}

// tanh(x), to a few units in the last place: near zero the minimax polynomial of tanh(x) / x in x^2 (4e-9 for
// |x| <= 0.625), elsewhere 1 - 2 / (e^2|x| + 1), which loses nothing there.
inline __m512 tanh(__m512 x) {
  const __m512 size = _mm512_abs_ps(x), square = _mm512_mul_ps(x, x), one = _mm512_set1_ps(1.0f);
  __m512 small = _mm512_fmadd_ps(_mm512_set1_ps(-0.00565994764f), square, _mm512_set1_ps(0.0205909517f));
  small = _mm512_fmadd_ps(small, square, _mm512_set1_ps(-0.0537210554f));
  small = _mm512_fmadd_ps(small, square, _mm512_set1_ps(0.133311272f));
  small = _mm512_fmadd_ps(small, square, _mm512_set1_ps(-0.333332598f));
  small = _mm512_fmadd_ps(_mm512_mul_ps(small, square), size, size);
  const __m512 e = exp2<6>(_mm512_mul_ps(size, _mm512_set1_ps(static_cast<float>(2 * log2e))));
  const __m512 large = _mm512_sub_ps(one, _mm512_div_ps(_mm512_set1_ps(2.0f), _mm512_add_ps(e, one)));
  const __mmask16 far = _mm512_cmp_ps_mask(size, _mm512_set1_ps(0.625f), _CMP_NLE_UQ);  // a NaN stays one
  const __m512 sign = _mm512_and_ps(x, _mm512_set1_ps(-0.0f));
  return _mm512_or_ps(_mm512_mask_mov_ps(small, far, large), sign);
}

inline __m512i to_bfloat16(__m512 low, __m512 high) {
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
}

inline __m512 from_bfloat16(__m256i bits) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

// What is lost when two vectors become one of bfloat16.
inline __m512i rest_of(__m512 low, __m512 high, __m512i rounded) {
  const __m512 low_part = from_bfloat16(_mm512_castsi512_si256(rounded));
  const __m512 high_part = from_bfloat16(_mm512_extracti64x4_epi64(rounded, 1));
  return to_bfloat16(_mm512_sub_ps(low, low_part), _mm512_sub_ps(high, high_part));
}

// Of 16 rows of 16 numbers of 32 bits: lines[i][j] becomes lines[j][i].
inline void transpose(__m512i (&lines)[16]) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; i += 2) {  // [2 rows] x pairs of columns
    a[i] = _mm512_unpacklo_epi32(lines[i], lines[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32(lines[i], lines[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {  // b[i + c]: column c of each quarter, rows i .. i + 3
    b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
    b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
    b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
  for (int c = 0; c < 4; ++c) {
    const __m512i even_low = _mm512_shuffle_i32x4(b[c], b[c + 4], 0x88);  // quarters 0 and 2 of rows 0 .. 7
    const __m512i odd_low = _mm512_shuffle_i32x4(b[c], b[c + 4], 0xdd);
    const __m512i even_high = _mm512_shuffle_i32x4(b[c + 8], b[c + 12], 0x88);
    const __m512i odd_high = _mm512_shuffle_i32x4(b[c + 8], b[c + 12], 0xdd);
    lines[c] = _mm512_shuffle_i32x4(even_low, even_high, 0x88);
    lines[c + 8] = _mm512_shuffle_i32x4(even_low, even_high, 0xdd);
    lines[c + 4] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
    lines[c + 12] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd);
  }
}

}  // namespace
}  // namespace seq1f1b::cpu::amx
