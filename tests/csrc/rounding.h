// That half-precision outputs are the nearest representable numbers, ties to even.
#pragma once
#include <cmath>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

#include "attention.h"
#include "cpu/kernels.h"
#include "guarded_tensor.h"

namespace seq1f1b::fuzz {

// Equal scores make an output the mean of its values. These are two neighbours, so a mean of four lies at a neighbour,
// at a tie or at a quarter between. On AMX a weight is only nearly one, and numbers below the normal ones are zero.
inline void check_rounding(const cpu::Kernels& kernels, DType dtype, Random& random) {
  constexpr int64_t rows = 16, keys = 4, size = 203;
  const uint32_t infinity = dtype == DType::bfloat16 ? 0x7f80 : 0x7c00;
  std::vector<uint16_t> query(rows), key(rows * keys), value(rows * keys * size), output(rows * size);
  std::vector<float> lse(rows);
  std::vector<double> means(rows * size);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t d = 0; d < size; ++d) {
      const uint32_t low = uint32_t(between(random, 0, infinity - 2)), sign = chance(random, 0.5) ? 0x8000 : 0;
      for (int64_t n = 0; n < keys; ++n) {
        const uint32_t bits = sign | (low + (chance(random, 0.5) ? 1 : 0));
        value[size_t((r * keys + n) * size + d)] = uint16_t(bits);
        means[size_t(r * size + d)] += number(dtype, bits) / keys;
      }
    }
  }
  Forward p{};
  p.dtype = dtype;
  p.rows = rows, p.heads = p.kv_heads = p.queries = p.size = 1, p.keys = keys, p.value_size = size, p.scale = 1;
  p.query = {query.data(), 1, 1, 1}, p.key = {key.data(), keys, keys, 1};
  p.value = {value.data(), keys * size, keys * size, size}, p.output = {output.data(), size, size, size};
  p.lse = lse.data();
  kernels.forward(p, 0, kernels.forward_tasks(p));
  for (size_t i = 0; i < means.size(); ++i) {
    const uint32_t bits = output[i], magnitude = bits & 0x7fff;
    const double error = std::fabs(number(dtype, bits) - means[i]);
    const double doubt = &kernels == cpu::amx_kernels ? 1e-5 * std::fabs(means[i]) + 0x1p-126 : 0;
    bool nearest = magnitude < infinity;
    for (uint32_t neighbour : {magnitude - 1, magnitude + 1}) {
      if (magnitude == 0 && neighbour != 1) continue;
      // The sum of two of the largest numbers of bfloat16 leaves float's range, and so do means near them.
      if (neighbour >= infinity) continue;
      const double other = std::fabs(number(dtype, (bits & 0x8000) | neighbour) - means[i]);
      nearest = nearest && (error < other + 2 * doubt || (error == other && bits % 2 == 0));
    }
    if (nearest || (dtype == DType::bfloat16 && std::fabs(means[i]) > 0x1p125)) continue;
    char line[160];
    std::snprintf(line, sizeof line, "%s: the mean %.9g becomes %.9g (bits %04x)", kernels.name, means[i],
                  number(dtype, bits), unsigned(bits));
    throw std::runtime_error(line);
  }
}

}  // namespace seq1f1b::fuzz
