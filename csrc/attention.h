// The attention of a chunk's queries over the keys and values of its prefix and itself, as the kernels see it.
//
// Query i stands at key `keys - queries + i`, its position. It sees key n when all of this holds:
//   n <= position;  window == 0 or n > position - window;  first_key == null or n >= first_key[row, i];
//   key_mask == null or key_mask[row, n].
// Scores are scale * q.k, or softcap * tanh(scale * q.k / softcap) when softcap > 0. A query that sees no key gives a
// zero output and a log-sum-exp of +infinity, so that every weight exp(score - lse) is zero in the backward.
#pragma once
#include <cstdint>

namespace seq1f1b {

enum class DType : int32_t { float32, float64, bfloat16, float16 };

// [rows, heads, tokens, size]. Strides count elements; the entries of one head are adjacent.
template <class Pointer>
struct Strided {
  Pointer data;
  int64_t row, head, token;
};
using Input = Strided<const void*>;
using Output = Strided<void*>;

struct Problem {
  DType dtype;
  int64_t rows, heads, kv_heads, queries, keys;
  int64_t size;        // of a query's and a key's head
  int64_t value_size;  // of a value's and an output's head
  double scale;
  double softcap;            // 0: none
  int64_t window;            // 0: none
  const int32_t* first_key;  // [rows, queries], contiguous; null: 0 everywhere
  const bool* key_mask;      // [rows, keys], contiguous; null: true everywhere
};

struct Forward : Problem {
  Input query, key, value;  // of `dtype`
  Output output;            // of `dtype`
  void* lse;                // [rows, heads, queries], contiguous, float; double for float64
};

struct Backward : Problem {
  Input gradient, query, key, value, output;  // of `dtype`
  const void* lse;                            // as the forward gave it, or merged with more terms (sinks)
  Output query_gradient;                      // of `dtype`, overwritten
  Output key_gradient, value_gradient;        // [rows, kv_heads, keys, size], float (double for float64), added to
};

}  // namespace seq1f1b
