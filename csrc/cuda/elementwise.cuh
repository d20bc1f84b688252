// Copying and adding [rows, heads, tokens, size] tensors: a block takes a run of tokens of one head, a thread one
// unit at a time.
#pragma once
#include <algorithm>

#include "tiles.cuh"

namespace seq1f1b::cuda {

constexpr int unit_threads = 256;
constexpr int units_per_block = 4 * unit_threads;

// Strides in elements of the pointer's type.
template <class To, class From>
struct Units {
  Strided<To*> to;
  Strided<const From*> from;
  int64_t heads, tokens, runs;  // runs of tokens in a head
  int run;                      // tokens of a block
  int units;                    // of a token
};

// `act(to, from)` for every unit, of `Width` elements of the pointers' types.
template <int Width, class To, class From, class Act>
__device__ __forceinline__ void for_each_unit(const Units<To, From>& u, Act act) {
  const int64_t line = blockIdx.x / u.runs, first = blockIdx.x % u.runs * u.run;
  const int64_t row = line / u.heads, head = line % u.heads;
  To* const to = u.to.data + row * u.to.row + head * u.to.head + first * u.to.token;
  const From* const from = u.from.data + row * u.from.row + head * u.from.head + first * u.from.token;
  const int tokens = static_cast<int>(min(static_cast<int64_t>(u.run), u.tokens - first));
  for (int token = threadIdx.x / u.units, unit = threadIdx.x % u.units; token < tokens;) {
    act(to + token * u.to.token + unit * Width, from + token * u.from.token + unit * Width);
    const int ahead = unit + unit_threads;
    token += ahead / u.units;
    unit = ahead % u.units;
  }
}

template <class Unit>
__global__ void __launch_bounds__(unit_threads) copy_kernel(const Units<Unit, Unit> units) {
  for_each_unit<1>(units, [](Unit* to, const Unit* from) { *to = *from; });
}

// `Width` is 1, or as many elements as one load holds.
template <class T, int Width>
__global__ void __launch_bounds__(unit_threads) add_kernel(const Units<float, T> units) {
  for_each_unit<Width>(units, [](float* total, const T* part) {
    if (Width == 1) {
      *total += to_float(*part);
    } else {
      const Vector parts = *reinterpret_cast<const Vector*>(part);
#pragma unroll
      for (int i = 0; i < Width; i += 4) {
        Vector sums = *reinterpret_cast<const Vector*>(total + i);
#pragma unroll
        for (int k = 0; k < 4; ++k)
          sums.words[k] = bits_of(of_bits(sums.words[k]) + element_of<T>(parts, i + k));
        *reinterpret_cast<Vector*>(total + i) = sums;
      }
    }
  });
}

// Completes the units and gives the number of blocks.
template <class To, class From>
int64_t blocks_of(Units<To, From>& u, int64_t rows, int64_t heads, int64_t tokens, int64_t units_of_token) {
  u.heads = heads;
  u.tokens = tokens;
  u.units = static_cast<int>(units_of_token);
  u.run = std::max(1, units_per_block / std::max(1, u.units));
  u.runs = (tokens + u.run - 1) / u.run;
  return u.units == 0 ? 0 : rows * heads * u.runs;
}

// Copies units of sizeof(Unit) bytes; addresses and strides, here in elements, must be multiples of it.
template <class Unit>
int launch_copy(const Output& to, const Input& from, int64_t rows, int64_t heads, int64_t tokens, int64_t size,
                int64_t element_bytes, void* stream) {
  const auto scaled = [&](int64_t stride) { return stride * element_bytes / static_cast<int64_t>(sizeof(Unit)); };
  Units<Unit, Unit> units{};
  units.to = {static_cast<Unit*>(to.data), scaled(to.row), scaled(to.head), scaled(to.token)};
  units.from = {static_cast<const Unit*>(from.data), scaled(from.row), scaled(from.head), scaled(from.token)};
  const int64_t blocks = blocks_of(units, rows, heads, tokens, scaled(size));
  return launch(copy_kernel<Unit>, blocks, unit_threads, 0, stream, units);
}

template <class T, int Width>
int launch_add(const Output& total, const Input& part, int64_t rows, int64_t heads, int64_t tokens, int64_t size,
               void* stream) {
  Units<float, T> units{};
  units.to = {static_cast<float*>(total.data), total.row, total.head, total.token};
  units.from = {static_cast<const T*>(part.data), part.row, part.head, part.token};
  const int64_t blocks = blocks_of(units, rows, heads, tokens, size / Width);
  return launch(add_kernel<T, Width>, blocks, unit_threads, 0, stream, units);
}

}  // namespace seq1f1b::cuda
