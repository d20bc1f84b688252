// The problems that the kernels are given and the tensors that the ops give back, made of arguments that were checked.
#pragma once
#include <optional>

#include "arguments.h"
#include "results.h"

namespace seq1f1b::bindings {

struct CheckedForward {
  Tensor output, lse;
  Forward problem;
};

inline CheckedForward checked_forward(
    const Demands& demands, const Tensor& query, const Tensor& key, const Tensor& value, double scale, int64_t window,
    double softcap, const std::optional<Tensor>& first_key, const std::optional<Tensor>& key_mask) {
  const Problem problem = checked_problem(demands, query, key, value, scale, window, softcap, first_key, key_mask);
  Tensor attended = new_head_outputs(query, problem.value_size);
  Tensor lse = new_per_query(query, accumulator_dtype(query));
  return {attended, lse,
          {problem, input(query), input(key), input(value), output(attended), lse.mutable_data_ptr()}};
}

struct CheckedBackward {
  Tensor query_gradient;
  Backward problem;
};

inline CheckedBackward checked_backward(
    const Demands& demands, const Tensor& gradient, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& attended, const Tensor& lse, const Tensor& key_gradient, const Tensor& value_gradient, double scale,
    int64_t window, double softcap, const std::optional<Tensor>& first_key, const std::optional<Tensor>& key_mask) {
  const Problem problem = checked_problem(demands, query, key, value, scale, window, softcap, first_key, key_mask);
  check_backward(demands, problem, gradient, query, attended, lse, key_gradient, value_gradient);
  Tensor query_gradient = new_head_outputs(query, problem.size);
  return {query_gradient,
          {problem, input(gradient), input(query), input(key), input(value), input(attended), lse.const_data_ptr(),
           output(query_gradient), output(key_gradient), output(value_gradient)}};
}

// Nothing to compute.
inline bool has_no_queries(const Problem& problem) { return problem.rows == 0 || problem.queries == 0; }

}  // namespace seq1f1b::bindings
