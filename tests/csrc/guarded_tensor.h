// Tensors of any dtype and layout whose gaps and surroundings are watched.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "attention.h"

namespace seq1f1b::fuzz {

using Random = std::mt19937_64;

inline int64_t between(Random& random, int64_t low, int64_t high) {
  return low + int64_t(random() % uint64_t(high - low + 1));
}
inline bool chance(Random& random, double probability) { return double(random() >> 11) * 0x1p-53 < probability; }
inline double normal(Random& random) {
  const double u = (double(random() >> 11) + 1) * 0x1p-53, v = double(random() >> 11) * 0x1p-53;
  return std::sqrt(-2 * std::log(u)) * std::cos(6.283185307179586 * v);
}

inline int64_t bytes_of(DType dtype) {
  return dtype == DType::float64 ? 8 : dtype == DType::float32 ? 4 : 2;
}

// A number of at most four bytes.
inline double number(DType dtype, uint32_t bits) {
  if (dtype == DType::bfloat16) bits <<= 16;
  if (dtype != DType::float16) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
  }
  const int exponent = int(bits >> 10 & 31), mantissa = int(bits & 1023);
  const double sign = bits >> 15 ? -1 : 1;
  if (exponent == 31) return mantissa ? NAN : sign * INFINITY;
  return sign * (exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24));
}

inline double read(DType dtype, const unsigned char* at) {
  if (dtype == DType::float64) {
    double x;
    std::memcpy(&x, at, 8);
    return x;
  }
  uint32_t bits = 0;
  std::memcpy(&bits, at, dtype == DType::float32 ? 4 : 2);
  return number(dtype, bits);
}

// Exact for a value that the dtype can hold; others lose their last bits.
inline void write(DType dtype, double value, unsigned char* at) {
  if (dtype == DType::float64) {
    std::memcpy(at, &value, 8);
    return;
  }
  const float x = float(value);
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (dtype == DType::bfloat16) bits >>= 16;
  if (dtype == DType::float16) {
    const uint32_t sign = bits >> 16 & 0x8000;
    const double magnitude = std::fabs(double(x));
    if (std::isnan(x)) {
      bits = 0x7e00;
    } else if (magnitude < 0x1p-14) {
      bits = sign | uint32_t(magnitude * 0x1p24);
    } else {
      bits = sign | ((bits & 0x7fffffff) - (112u << 23)) >> 13;
    }
  }
  std::memcpy(at, &bits, size_t(bytes_of(dtype)));
}

// [rows, heads, tokens, size] with the last dimension adjacent, the others in any order and with gaps. Every byte
// that is no entry is set, so that a gap read as an input is no number and a gap written to is seen.
class GuardedTensor {
 public:
  GuardedTensor(DType dtype, std::array<int64_t, 4> shape, Random& random, int64_t guard)
      : dtype_(dtype), shape_(shape) {
    std::array<int, 3> order{0, 1, 2};
    std::shuffle(order.begin(), order.end(), random);
    int64_t extent = shape[3] + (chance(random, 0.5) ? between(random, 0, 5) : 0);
    for (int dimension : order) {
      strides_[size_t(dimension)] = extent;
      extent = extent * shape[size_t(dimension)] + (chance(random, 0.3) ? between(random, 1, 9) : 0);
    }
    const int64_t last = index(shape[0] - 1, shape[1] - 1, shape[2] - 1, shape[3] - 1);
    guard_ = guard;
    bytes_.assign(size_t((last + 1 + 2 * guard) * bytes_of(dtype)), 0xff);
  }

  int64_t index(int64_t row, int64_t head, int64_t token, int64_t d) const {
    return row * strides_[0] + head * strides_[1] + token * strides_[2] + d;
  }
  double get(int64_t row, int64_t head, int64_t token, int64_t d) const {
    return read(dtype_, bytes_.data() + place(row, head, token, d));
  }
  void set(int64_t row, int64_t head, int64_t token, int64_t d, double value) {
    write(dtype_, value, bytes_.data() + place(row, head, token, d));
  }

  const std::array<int64_t, 4>& shape() const { return shape_; }

  template <class Visit>
  void each(Visit visit) const {
    for (int64_t r = 0; r < shape_[0]; ++r) {
      for (int64_t h = 0; h < shape_[1]; ++h) {
        for (int64_t t = 0; t < shape_[2]; ++t) {
          for (int64_t d = 0; d < shape_[3]; ++d) visit(r, h, t, d);
        }
      }
    }
  }
  void fill(Random& random, double scale) {
    each([&](int64_t r, int64_t h, int64_t t, int64_t d) { set(r, h, t, d, scale * normal(random)); });
  }

  Input input() const { return {data(), strides_[0], strides_[1], strides_[2]}; }
  Output output() { return {const_cast<unsigned char*>(data()), strides_[0], strides_[1], strides_[2]}; }

  const std::vector<unsigned char>& bytes() const { return bytes_; }

  // Whether all bytes outside the entries still are as they were set.
  bool gaps_intact() const {
    std::vector<unsigned char> rest = bytes_;
    each([&](int64_t r, int64_t h, int64_t t, int64_t d) {
      std::memset(rest.data() + place(r, h, t, d), 0xff, size_t(bytes_of(dtype_)));
    });
    return std::all_of(rest.begin(), rest.end(), [](unsigned char byte) { return byte == 0xff; });
  }

 private:
  DType dtype_;
  std::array<int64_t, 4> shape_;
  std::array<int64_t, 3> strides_;
  int64_t guard_;
  std::vector<unsigned char> bytes_;

  size_t place(int64_t row, int64_t head, int64_t token, int64_t d) const {
    return size_t((guard_ + index(row, head, token, d)) * bytes_of(dtype_));
  }
  const unsigned char* data() const { return bytes_.data() + guard_ * bytes_of(dtype_); }
};

}  // namespace seq1f1b::fuzz
