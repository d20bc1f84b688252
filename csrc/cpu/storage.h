// Rows of numbers as a tensor stores them, to and from the type the kernels compute in.
#pragma once
#include <cstdint>
#include <cstring>

#include "../attention.h"
#include "simd.h"

namespace seq1f1b::cpu {
namespace {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

inline float as_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}
inline uint32_t as_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline double widen(double x) { return x; }
inline float widen(float x) { return x; }
inline float widen(BFloat16 x) { return as_float(uint32_t(x.bits) << 16); }
inline float widen(Float16 x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, magnitude = x.bits & 0x7fff;
  if (magnitude >= 0x7c00) return as_float(sign | 0x7f800000 | magnitude << 13);
  if (magnitude >= 0x0400) return as_float(sign | ((magnitude << 13) + (112u << 23)));
  const float denormal = float(magnitude) * as_float(103u << 23);  // in units of 2^-24
  return sign ? -denormal : denormal;
}

// To the nearest, ties to even.
inline void narrow(float x, float& to) { to = x; }
inline void narrow(double x, double& to) { to = x; }
inline void narrow(float x, BFloat16& to) {
  const uint32_t bits = as_bits(x), rounded = bits + 0x7fff + (bits >> 16 & 1);
  to.bits = x != x ? uint16_t(bits >> 16 | 0x40) : uint16_t(rounded >> 16);
}
inline void narrow(float x, Float16& to) {
  const uint32_t bits = as_bits(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) {
    to.bits = uint16_t(sign | 0x7e00);
  } else if (magnitude >= 0x477ff000) {  // rounds to 65536 or more
    to.bits = uint16_t(sign | 0x7c00);
  } else if (magnitude >= 0x38800000) {
    to.bits = uint16_t(sign | ((magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13));
  } else {
    // Adding 1/2 leaves the multiple of 2^-24 in the last bits.
    to.bits = uint16_t(sign | (as_bits(as_float(magnitude) + 0.5f) - as_bits(0.5f)));
  }
}

// How many of the first numbers of a row the hardware's own conversion has done.
template <class From, class To>
inline int64_t convert_most(const From*, int64_t, To*) {
  return 0;
}
#if defined(SEQ1F1B_AVX512) || defined(SEQ1F1B_AVX2)
inline int64_t convert_most(const Float16* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  }
  return i;
}
inline int64_t convert_most(const float* from, int64_t count, Float16* to) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i narrowed = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), narrowed);
  }
  return i;
}
#endif

template <class Stored, class Real>
void load_row(const void* from, int64_t index, int64_t count, Real* __restrict to) {
  const Stored* row = static_cast<const Stored*>(from) + index;
  for (int64_t i = convert_most(row, count, to); i < count; ++i) to[i] = widen(row[i]);
}

template <class Stored, class Real>
void store_row(const Real* __restrict from, int64_t count, void* to, int64_t index) {
  Stored* row = static_cast<Stored*>(to) + index;
  for (int64_t i = convert_most(from, count, row); i < count; ++i) narrow(from[i], row[i]);
}

// What the kernels for `Real` know of a tensor's dtype. `index` and `count` are in elements.
template <class Real>
struct Storage {
  void (*load)(const void* from, int64_t index, int64_t count, Real* to);
  void (*store)(const Real* from, int64_t count, void* to, int64_t index);
  int64_t bytes;  // of an element
};

template <class Real>
inline Storage<Real> storage(DType dtype);
template <>
inline Storage<double> storage(DType) {
  return {load_row<double, double>, store_row<double, double>, 8};
}
template <>
inline Storage<float> storage(DType dtype) {
  switch (dtype) {
    case DType::bfloat16:
      return {load_row<BFloat16, float>, store_row<BFloat16, float>, 2};
    case DType::float16:
      return {load_row<Float16, float>, store_row<Float16, float>, 2};
    default:
      return {load_row<float, float>, store_row<float, float>, 4};
  }
}

}  // namespace
}  // namespace seq1f1b::cpu
