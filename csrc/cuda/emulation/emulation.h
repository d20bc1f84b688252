// The CUDA language and the instructions of hardware.cuh, on the CPU.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "../numbers.h"
#include "grid.h"

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
// Variables of the language that name another thread's each time they are read.
#define threadIdx (::seq1f1b::emulation::thread_index)
#define blockIdx (::seq1f1b::emulation::block_index)

enum { cudaSuccess = 0, cudaErrorInvalidValue = 1 };

namespace seq1f1b::cuda {

using emulation::Place;
using std::max;
using std::min;

inline void __syncthreads(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  emulation::meet_block(false, {file, line});
}

inline int __syncthreads_or(int predicate, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  return emulation::meet_block(predicate != 0, {file, line});
}

inline void __syncwarp(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  emulation::meet_warp(nullptr, nullptr, {file, line});
}

inline char* shared_memory() { return emulation::shared_memory(); }

inline float exp2_approximate(float x) { return std::exp2(x); }

inline float log2_approximate(float x) { return std::log2(x); }

template <class V>
V shuffle_xor(V value, int lanes, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  struct Lane {
    V in, out;
    int lanes;
  } own{value, value, lanes};
  const auto exchange = [](void* const* brought) {
    for (int i = 0; i < emulation::warp_size; ++i) {
      Lane& lane = *static_cast<Lane*>(brought[i]);
      lane.out = static_cast<const Lane*>(brought[i ^ lane.lanes])->in;
    }
  };
  emulation::meet_warp(&own, exchange, {file, line});
  return own.out;
}

inline bool any_lane(bool predicate, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  const auto combine = [](void* const* brought) {
    bool any = false;
    for (int i = 0; i < emulation::warp_size; ++i) any |= *static_cast<const bool*>(brought[i]);
    for (int i = 0; i < emulation::warp_size; ++i) *static_cast<bool*>(brought[i]) = any;
  };
  emulation::meet_warp(&predicate, combine, {file, line});
  return predicate;
}

inline void copy_async(void* shared, const void* global, int bytes) { emulation::start_copy(shared, global, bytes); }

inline void commit_copies() { emulation::close_copies(); }

template <int Pending>
void wait_for_copies() {
  emulation::await_copies(Pending);
}

// Numbers, rounded to the nearest, halves to even, as cvt.rn does.

inline float of_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float to_float(float x) { return x; }

inline float to_float(BFloat16 x) { return of_bits(static_cast<uint32_t>(x.bits) << 16); }

inline float to_float(Float16 x) {
  const uint32_t sign = (x.bits & 0x8000u) << 16, magnitude = x.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return of_bits(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  return of_bits(sign | bits_of(of_bits(magnitude << 13) * 0x1p112f));
}

inline void round_to(float x, BFloat16& to) {
  const uint32_t bits = bits_of(x);
  to.bits = static_cast<uint16_t>(std::isnan(x) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline void round_to(float x, Float16& to) {
  const uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  uint32_t rounded;
  if (std::isnan(x)) {
    rounded = 0x7fff;
  } else if (magnitude < bits_of(0x1p-14f)) {  // a multiple of 2^-24
    rounded = static_cast<uint32_t>(std::nearbyint(of_bits(magnitude) * 0x1p24f));
  } else {
    rounded = std::min(0x7c00u, (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13);
  }
  to.bits = static_cast<uint16_t>(sign | rounded);
}

template <class T>
uint32_t pack(float low, float high) {
  T halves[2];
  round_to(low, halves[0]);
  round_to(high, halves[1]);
  return halves[0].bits | static_cast<uint32_t>(halves[1].bits) << 16;
}

// What a lane brings to ldmatrix: lane 4 g + t receives entries 2t and 2t + 1 of row g of each matrix, or of column g.
struct MatrixLane {
  uint32_t* to;
  const uint16_t* row;
};

template <bool Transposed>
void exchange_matrices(void* const* brought) {
  const auto lane_at = [&](int i) -> const MatrixLane& { return *static_cast<const MatrixLane*>(brought[i]); };
  for (int lane = 0; lane < emulation::warp_size; ++lane)
    for (int matrix = 0; matrix < 4; ++matrix) {
      uint16_t pair[2];
      for (int e = 0; e < 2; ++e) {
        const int group = lane / 4, entry = lane % 4 * 2 + e;
        pair[e] = lane_at(8 * matrix + (Transposed ? entry : group)).row[Transposed ? group : entry];
      }
      lane_at(lane).to[matrix] = pair[0] | static_cast<uint32_t>(pair[1]) << 16;
    }
}

inline void ldmatrix(uint32_t (&to)[4], const void* row, const char* file = __builtin_FILE(),
                     int line = __builtin_LINE()) {
  emulation::check_shared(row, 16, "ldmatrix");
  MatrixLane own{to, static_cast<const uint16_t*>(row)};
  emulation::meet_warp(&own, exchange_matrices<false>, {file, line});
}

inline void ldmatrix_transposed(uint32_t (&to)[4], const void* row, const char* file = __builtin_FILE(),
                                int line = __builtin_LINE()) {
  emulation::check_shared(row, 16, "ldmatrix.trans");
  MatrixLane own{to, static_cast<const uint16_t*>(row)};
  emulation::meet_warp(&own, exchange_matrices<true>, {file, line});
}

// What a lane 4 g + t brings to mma.m16n8k16: of a rows g and g + 8, columns 2t, 2t + 1 and those plus 8; of b column
// g, rows 2t, 2t + 1 and those plus 8; of the sum rows g and g + 8, columns 2t and 2t + 1.
struct ProductLane {
  float* sum;
  const uint32_t *a, *b;
};

template <class T>
void multiply_fragments(void* const* brought) {
  const auto half = [](uint32_t both, int which) {
    return to_float(T{static_cast<uint16_t>(which ? both >> 16 : both)});
  };
  float a[16][16], b[16][8], sum[16][8];
  for (int i = 0; i < emulation::warp_size; ++i) {
    const ProductLane& lane = *static_cast<const ProductLane*>(brought[i]);
    const int g = i / 4, t = i % 4;
    for (int e = 0; e < 8; ++e) a[g + e / 2 % 2 * 8][2 * t + e % 2 + e / 4 * 8] = half(lane.a[e / 2], e % 2);
    for (int e = 0; e < 4; ++e) b[2 * t + e % 2 + e / 2 * 8][g] = half(lane.b[e / 2], e % 2);
    for (int e = 0; e < 4; ++e) sum[g + e / 2 * 8][2 * t + e % 2] = lane.sum[e];
  }
  for (int row = 0; row < 16; ++row)
    for (int k = 0; k < 16; ++k)
      for (int column = 0; column < 8; ++column) sum[row][column] += a[row][k] * b[k][column];
  for (int i = 0; i < emulation::warp_size; ++i)
    for (int e = 0; e < 4; ++e)
      static_cast<const ProductLane*>(brought[i])->sum[e] = sum[i / 4 + e / 2 * 8][i % 4 * 2 + e % 2];
}

template <class T>
void mma(float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const char* file = __builtin_FILE(),
         int line = __builtin_LINE()) {
  ProductLane own{sum, a, b};
  emulation::meet_warp(&own, multiply_fragments<T>, {file, line});
}

template <class... Parameters, class... Arguments>
int launch(void (*kernel)(Parameters...), int64_t blocks, int threads, int shared_bytes, void*,
           const Arguments&... arguments) {
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  return emulation::run_grid(blocks, threads, shared_bytes, [&] { kernel(arguments...); });
}

}  // namespace seq1f1b::cuda
