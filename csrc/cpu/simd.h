// The widest vectors of the instruction set a file is compiled for, and what the attention kernels compute with them.
//
// Every kernel file includes this under other compiler flags. All of it, and all that is built on it, has internal
// linkage: the linker must never take one file's copy of a function for another's.
#pragma once
#include <cstdint>
#include <limits>
#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "logarithms.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define SEQ1F1B_AVX512 1
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define SEQ1F1B_AVX2 1
#endif

namespace seq1f1b::cpu {
namespace {

#if defined(SEQ1F1B_AVX512)
constexpr int vector_bytes = 64, vector_registers = 32;
#elif defined(SEQ1F1B_AVX2)
constexpr int vector_bytes = 32, vector_registers = 16;
#elif defined(__aarch64__)
constexpr int vector_bytes = 16, vector_registers = 32;
#else
constexpr int vector_bytes = 16, vector_registers = 16;
#endif

template <class Real>
struct Simd;
template <>
struct Simd<float> {
  typedef float Vector __attribute__((vector_size(vector_bytes), may_alias));
  typedef int32_t Integer;
  typedef int32_t Integers __attribute__((vector_size(vector_bytes), may_alias));
  typedef uint32_t Bits __attribute__((vector_size(vector_bytes), may_alias));
};
template <>
struct Simd<double> {
  typedef double Vector __attribute__((vector_size(vector_bytes), may_alias));
  typedef int64_t Integer;
  typedef int64_t Integers __attribute__((vector_size(vector_bytes), may_alias));
  typedef uint64_t Bits __attribute__((vector_size(vector_bytes), may_alias));
};
template <class Real>
using Vector = typename Simd<Real>::Vector;
template <class Real>
using Integers = typename Simd<Real>::Integers;
template <class Real>
using Bits = typename Simd<Real>::Bits;
template <class Real>
using Integer = typename Simd<Real>::Integer;
using Floats = Vector<float>;
using Doubles = Vector<double>;

template <class Real>
constexpr int lanes = vector_bytes / int(sizeof(Real));

template <class Real>
constexpr Real infinity = std::numeric_limits<Real>::infinity();

constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
constexpr int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// Pointers are aligned to a whole vector: all of these read and write scratch.
template <class Real>
inline Vector<Real> load(const Real* from) {
  return *reinterpret_cast<const Vector<Real>*>(from);
}
template <class Real>
inline Integers<Real> load_integers(const Integer<Real>* from) {
  return *reinterpret_cast<const Integers<Real>*>(from);
}
template <class Real>
inline void store(Real* to, Vector<Real> v) {
  *reinterpret_cast<Vector<Real>*>(to) = v;
}
template <class Real>
inline Vector<Real> broadcast(Real x) {
  return x - Vector<Real>{};
}

// a * b + c
inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(SEQ1F1B_AVX512)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(SEQ1F1B_AVX2)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}
inline Doubles multiply_add(Doubles a, Doubles b, Doubles c) {
#if defined(SEQ1F1B_AVX512)
  return _mm512_fmadd_pd(a, b, c);
#elif defined(SEQ1F1B_AVX2)
  return _mm256_fmadd_pd(a, b, c);
#else
  return a * b + c;
#endif
}

// Not a number only where `b` is.
template <class V>
inline V larger_lanes(V a, V b) {
  return a > b ? a : b;
}

// c[0] + x c[1] + x^2 c[2] ...
template <class Real, int terms>
inline Vector<Real> polynomial(Vector<Real> x, const Real (&c)[terms]) {
  Vector<Real> y = broadcast(c[terms - 1]);
#pragma GCC unroll 16
  for (int i = terms - 2; i >= 0; --i) y = multiply_add(y, x, broadcast(c[i]));
  return y;
}

// x = whole + part with |part| <= 1/2, and 2^whole as what to add to the bits of a number; for |x| below 2^20.
template <class Real>
struct Split {
  Vector<Real> part;
  Bits<Real> exponent;
};
template <class Real>
inline Split<Real> split(Vector<Real> x) {
  constexpr bool single = sizeof(Real) == 4;
  constexpr Real ones = Real(single ? 0x1.8p23 : 0x1.8p52);  // added to it, the last bit of a sum counts ones
  const Vector<Real> sum = x + ones;
  return {x - (sum - ones), reinterpret_cast<const Bits<Real>&>(sum) << (single ? 23 : 52)};
}
template <class Real>
inline Vector<Real> scale_exponent(Vector<Real> x, Bits<Real> exponent) {
  const Bits<Real> bits = reinterpret_cast<const Bits<Real>&>(x) + exponent;
  return reinterpret_cast<const Vector<Real>&>(bits);
}

// 2^x to the rounding of the type; zero where it is no normal number, so that weights are never denormal (slow).
#if defined(SEQ1F1B_AVX512)
inline Floats exp2(Floats x) {
  constexpr float c[] = {1.0f, 0.6931513118f, 0.2401644501f, 0.05579991315f, 0.009017030284f, 0.001867130082f};
  const Floats fraction = _mm512_reduce_ps(x, 0x09);  // x - floor(x)
  const __mmask16 normal = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  return _mm512_maskz_scalef_ps(normal, polynomial<float>(fraction, c), x);
}
inline Doubles exp2(Doubles x) {
  constexpr double c[] = {1.0,
                          0.6931471805599459284,
                          0.2402265069590633031,
                          0.05550410866560223872,
                          0.009618129099550895613,
                          0.001333355862956267594,
                          0.0001540351230973394875,
                          0.00001525317505379524616,
                          1.320836730822004935e-6,
                          1.025321230405209001e-7,
                          6.559529835517271218e-9,
                          6.263465273422590274e-10};
  const Doubles fraction = _mm512_reduce_pd(x, 0x09);
  const __mmask8 normal = _mm512_cmp_pd_mask(x, _mm512_set1_pd(-1022.0), _CMP_NLT_UQ);
  return _mm512_maskz_scalef_pd(normal, polynomial<double>(fraction, c), x);
}
#else
inline Floats exp2(Floats x) {
  constexpr float c[] = {1.0f,            0.693147215f,   0.2402265278f,  0.05550310551f,
                         0.009617692973f, 0.00134066439f, 0.0001559467816f};
  x = x > 128.0f ? broadcast(128.0f) : x;
  const Split<float> s = split<float>(x);
  const Floats y = scale_exponent<float>(polynomial<float>(s.part, c), s.exponent);
  return x < -126.0f ? Floats{} : y;
}
inline Doubles exp2(Doubles x) {
  constexpr double c[] = {1.0,
                          0.6931471805599456968,
                          0.2402265069591009801,
                          0.05550410866479039455,
                          0.00961812910760700238,
                          0.001333355815343996475,
                          0.0001540353044157213033,
                          0.0000152527273851938682,
                          1.321544267532982214e-6,
                          1.018064765923413889e-7,
                          7.07257041281442351e-9,
                          4.078071929588336665e-10};
  x = x > 1024.0 ? broadcast(1024.0) : x;
  const Split<double> s = split<double>(x);
  const Doubles y = scale_exponent<double>(polynomial<double>(s.part, c), s.exponent);
  return x < -1022.0 ? Doubles{} : y;
}
#endif

// (2^x - 1) / x for |x| <= 1/2
inline Floats exp2_minus_one_slope(Floats x) {
  constexpr float c[] = {0.6931471806f,   0.2402265092f,    0.05550410728f, 0.009618057037f,
                         0.001333366945f, 0.0001546132989f, 1.525271968e-5f};
  return polynomial<float>(x, c);
}
inline Doubles exp2_minus_one_slope(Doubles x) {
  constexpr double c[] = {0.6931471805599453094,
                          0.2402265069591007123,
                          0.05550410866482158004,
                          0.009618129107628483,
                          0.001333355814642840546,
                          0.0001540353039336287794,
                          0.0000152527338041206415,
                          1.321548681588776645e-6,
                          1.017808596751131016e-7,
                          7.054894431255667008e-9,
                          4.445549407604678791e-10,
                          2.573350296218180077e-11,
                          1.369148205100243712e-12};
  return polynomial<double>(x, c);
}

// tanh and its derivative: e / (e + 2) and 4 (e + 1) / (e + 2)^2 with e = exp(2|x|) - 1, which keep their digits near
// zero and where tanh saturates.
template <class Real>
struct Tanh {
  Vector<Real> value, slope;
};
template <class Real>
inline Tanh<Real> tanh(Vector<Real> x) {
  constexpr Real two_log2e = Real(2 * log2e), saturated = sizeof(Real) == 4 ? 10 : 20;
  const Vector<Real> magnitude = x < Real(0) ? -x : x;
  const Vector<Real> bounded = magnitude > saturated ? broadcast(saturated) : magnitude;
  const Split<Real> s = split<Real>(bounded * two_log2e);
  const Vector<Real> power = scale_exponent<Real>(broadcast(Real(1)), s.exponent);
  const Vector<Real> e = multiply_add(power, s.part * exp2_minus_one_slope(s.part), power - Real(1));
  const Vector<Real> y = e / (e + Real(2));
  return {x < Real(0) ? -y : y, Real(4) * (e + Real(1)) / ((e + Real(2)) * (e + Real(2)))};
}

}  // namespace
}  // namespace seq1f1b::cpu
