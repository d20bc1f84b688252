// The tensors that the ops give back.
#pragma once
#include <torch/csrc/stable/ops.h>

#include "arguments.h"

namespace seq1f1b::bindings {

// [rows, heads, queries, size], where the heads of one token lie side by side: the layout that the projection after
// attention reads without a copy.
inline Tensor new_head_outputs(const Tensor& query, int64_t size) {
  Tensor tokens_first = torch::stable::new_empty(query, {query.size(0), query.size(2), query.size(1), size});
  return torch::stable::transpose(tokens_first, 1, 2);
}

// One number for each query of each head.
inline Tensor new_per_query(const Tensor& query, ScalarType dtype) {
  return torch::stable::new_empty(query, {query.size(0), query.size(1), query.size(2)}, dtype);
}

}  // namespace seq1f1b::bindings
