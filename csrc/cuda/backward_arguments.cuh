// What the kernels of the backward are given.
#pragma once
#include "scores.cuh"
#include "tiles.cuh"

namespace seq1f1b::cuda {

struct BackwardArguments : Backward {
  Rule rule;
  Scores scores;
  const float* delta;  // rowsum(dO O), [rows, heads, queries]
  int tiles;           // of queries, or of keys
  bool gradient_vectors, query_vectors, key_vectors, value_vectors, query_gradient_vectors;
  bool key_gradient_vectors, value_gradient_vectors;
};

template <class T>
BackwardArguments backward_arguments(const Backward& p, const float* delta) {
  const auto starts = [](const auto& tensor, int64_t rows, int64_t heads, int64_t tokens, int64_t element_bytes) {
    return starts_at_multiples(tensor, rows, heads, tokens, element_bytes, vector_bytes);
  };
  return {p,
          Rule::of(p),
          Scores::of(p),
          delta,
          0,
          starts(p.gradient, p.rows, p.heads, p.queries, sizeof(T)),
          starts(p.query, p.rows, p.heads, p.queries, sizeof(T)),
          starts(p.key, p.rows, p.kv_heads, p.keys, sizeof(T)),
          starts(p.value, p.rows, p.kv_heads, p.keys, sizeof(T)),
          starts(p.query_gradient, p.rows, p.heads, p.queries, sizeof(T)),
          starts(p.key_gradient, p.rows, p.kv_heads, p.keys, sizeof(float)),
          starts(p.value_gradient, p.rows, p.kv_heads, p.keys, sizeof(float))};
}

}  // namespace seq1f1b::cuda
