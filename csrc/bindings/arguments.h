// What the ops demand of their arguments, and the kernels' problem made of them. Every demand is checked before the
// first pointer into a tensor is taken; a message says what was expected and what came.
#pragma once
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>

#include "../attention.h"
#include "overlap.h"

namespace seq1f1b::bindings {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// A tensor's axis and the size it must have.
struct Axis {
  const char* name;
  int64_t size;
};

inline std::string dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float: return "float32";
    case ScalarType::Double: return "float64";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Half: return "float16";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::Bool: return "bool";
    default: return torch::headeronly::toString(dtype);
  }
}

inline std::string listed(torch::headeronly::IntHeaderOnlyArrayRef numbers) {
  std::ostringstream text;
  for (size_t i = 0; i < numbers.size(); ++i) text << (i ? ", " : "[") << numbers[i];
  text << (numbers.empty() ? "[]" : "]");
  return text.str();
}

inline std::string device_name(const Tensor& tensor) {
  if (tensor.is_cpu()) return "cpu";
  const std::string index = std::to_string(tensor.get_device_index());
  return tensor.is_cuda() ? "cuda:" + index : "another device (" + index + ")";
}

// The demands of one call of one op, whose tensors all live where its first one lives.
class Demands {
 public:
  Demands(const char* op, const Tensor& first) : op_(op), first_(first) {}

  template <class... Parts>
  [[noreturn]] void fail(const Parts&... parts) const {
    std::ostringstream message;
    message << "lightning_seq1f1b::" << op_ << ": ";
    (message << ... << parts);
    throw std::invalid_argument(message.str());
  }

  // Four axes, of any size.
  void four_axes(const char* name, const Tensor& tensor, const char* axes) const {
    if (tensor.dim() != 4) fail(name, " must have four axes ", axes, ", but is of shape ", listed(tensor.sizes()));
  }

  void matches(const char* name, const Tensor& tensor, ScalarType dtype, std::initializer_list<Axis> axes) const {
    bool same = tensor.scalar_type() == dtype && same_device(tensor) &&
                tensor.dim() == static_cast<int64_t>(axes.size());
    int64_t axis = 0;
    for (const Axis& wanted : axes) same = same && tensor.size(axis++) == wanted.size;
    if (same) return;
    std::ostringstream shape;
    for (const Axis& wanted : axes) shape << (shape.tellp() > 0 ? ", " : "") << wanted.name << " " << wanted.size;
    fail(name, " must be ", dtype_name(dtype), " [", shape.str(), "] on ", device_name(first_), ", but is ",
         dtype_name(tensor.scalar_type()), " ", listed(tensor.sizes()), " on ", device_name(tensor));
  }

  // The entries of a head lie side by side.
  void unit_last_stride(const char* name, const Tensor& tensor) const {
    const int64_t last = tensor.dim() - 1;
    if (tensor.size(last) > 1 && tensor.stride(last) != 1)
      fail(name, " must have 1 as its last stride, but has strides ", listed(tensor.strides()));
  }

  // No two entries share memory: threads write to them.
  void writable(const char* name, const Tensor& tensor) const {
    for (int64_t axis = 0; axis < tensor.dim(); ++axis)
      if (tensor.size(axis) > 1 && tensor.stride(axis) == 0)
        fail(name, " is written to, so it must not be expanded, but has shape ", listed(tensor.sizes()),
             " and strides ", listed(tensor.strides()));
  }

  void contiguous(const char* name, const Tensor& tensor) const {
    if (!tensor.is_contiguous())
      fail(name, " must be contiguous, but has shape ", listed(tensor.sizes()), " and strides ",
           listed(tensor.strides()));
  }

  // Threads write to one of them while others read from, or write to, the other.
  void apart(const char* name, const Memory& memory, const char* other_name, const Memory& other) const {
    if (overlap(memory, other))
      fail(name, " must not share memory with ", other_name, ", but the two overlap; make one of them a copy");
  }

  DType kernel_dtype(const char* name, const Tensor& tensor) const {
    switch (tensor.scalar_type()) {
      case ScalarType::Float: return DType::float32;
      case ScalarType::Double: return DType::float64;
      case ScalarType::BFloat16: return DType::bfloat16;
      case ScalarType::Half: return DType::float16;
      default:
        fail(name, " must be float32, float64, bfloat16 or float16, but is ", dtype_name(tensor.scalar_type()));
    }
  }

 private:
  bool same_device(const Tensor& tensor) const {
    return tensor.is_cpu() == first_.is_cpu() && tensor.is_cuda() == first_.is_cuda() &&
           tensor.get_device_index() == first_.get_device_index();
  }

  const char* op_;
  const Tensor& first_;
};

// What log-sum-exps and gradients of keys and values are kept in.
inline ScalarType accumulator_dtype(const Tensor& query) {
  return query.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

inline Input input(const Tensor& tensor) {
  return {tensor.const_data_ptr(), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

inline Output output(const Tensor& tensor) {
  return {tensor.mutable_data_ptr(), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

inline Problem checked_problem(
    const Demands& demands, const Tensor& query, const Tensor& key, const Tensor& value, double scale, int64_t window,
    double softcap, const std::optional<Tensor>& first_key, const std::optional<Tensor>& key_mask) {
  demands.four_axes("query", query, "[rows, heads, queries, size]");
  demands.four_axes("key", key, "[rows, kv_heads, keys, size]");
  demands.four_axes("value", value, "[rows, kv_heads, keys, value_size]");
  const DType dtype = demands.kernel_dtype("query", query);
  const int64_t rows = query.size(0), heads = query.size(1), queries = query.size(2), size = query.size(3);
  const int64_t kv_heads = key.size(1), keys = key.size(2), value_size = value.size(3);

  demands.matches("key", key, query.scalar_type(),
                  {{"rows", rows}, {"kv_heads", kv_heads}, {"keys", keys}, {"size", size}});
  demands.matches("value", value, query.scalar_type(),
                  {{"rows", rows}, {"kv_heads", kv_heads}, {"keys", keys}, {"value_size", value_size}});
  if (size < 1 || value_size < 1)
    demands.fail("heads must have at least one entry, but query is of shape ", listed(query.sizes()),
                 " and value of shape ", listed(value.sizes()));
  if (heads < 1 || kv_heads < 1 || heads % kv_heads != 0)
    demands.fail("the heads of query must be a multiple of those of key and value, but are ", heads, " and ", kv_heads);
  if (keys < queries)
    demands.fail("key must hold at least the keys of the queries themselves, but holds ", keys, " for ", queries,
                 " queries");
  demands.unit_last_stride("query", query);
  demands.unit_last_stride("key", key);
  demands.unit_last_stride("value", value);

  if (!std::isfinite(scale)) demands.fail("scale must be finite, but is ", scale);
  if (!std::isfinite(softcap) || softcap < 0)
    demands.fail("softcap must be positive, or 0 for none, but is ", softcap);
  if (window < 0) demands.fail("window must be at least 1, or 0 for none, but is ", window);
  if (first_key) {
    demands.matches("first_key", *first_key, ScalarType::Int, {{"rows", rows}, {"queries", queries}});
    demands.contiguous("first_key", *first_key);
  }
  if (key_mask) {
    demands.matches("key_mask", *key_mask, ScalarType::Bool, {{"rows", rows}, {"keys", keys}});
    demands.contiguous("key_mask", *key_mask);
  }

  Problem problem{};
  problem.dtype = dtype;
  problem.rows = rows;
  problem.heads = heads;
  problem.kv_heads = kv_heads;
  problem.queries = queries;
  problem.keys = keys;
  problem.size = size;
  problem.value_size = value_size;
  problem.scale = scale;
  problem.softcap = softcap;
  problem.window = window;
  problem.first_key = first_key ? static_cast<const int32_t*>(first_key->const_data_ptr()) : nullptr;
  problem.key_mask = key_mask ? static_cast<const bool*>(key_mask->const_data_ptr()) : nullptr;
  return problem;
}

inline void check_backward(
    const Demands& demands, const Problem& problem, const Tensor& gradient, const Tensor& query, const Tensor& output,
    const Tensor& lse, const Tensor& key_gradient, const Tensor& value_gradient) {
  const Axis rows{"rows", problem.rows}, heads{"heads", problem.heads}, queries{"queries", problem.queries};
  const Axis kv_heads{"kv_heads", problem.kv_heads}, keys{"keys", problem.keys};
  const Axis size{"size", problem.size}, value_size{"value_size", problem.value_size};
  const ScalarType accumulator = accumulator_dtype(query);
  demands.matches("gradient", gradient, query.scalar_type(), {rows, heads, queries, value_size});
  demands.matches("output", output, query.scalar_type(), {rows, heads, queries, value_size});
  demands.matches("lse", lse, accumulator, {rows, heads, queries});
  demands.matches("key_gradient", key_gradient, accumulator, {rows, kv_heads, keys, size});
  demands.matches("value_gradient", value_gradient, accumulator, {rows, kv_heads, keys, value_size});
  demands.unit_last_stride("gradient", gradient);
  demands.unit_last_stride("output", output);
  demands.contiguous("lse", lse);
  demands.unit_last_stride("key_gradient", key_gradient);
  demands.unit_last_stride("value_gradient", value_gradient);
  demands.writable("key_gradient", key_gradient);
  demands.writable("value_gradient", value_gradient);
  demands.apart("key_gradient", Memory(key_gradient), "value_gradient", Memory(value_gradient));
}

inline void check_append(const Demands& demands, const Tensor& buffer, const Tensor& chunk, int64_t start) {
  demands.four_axes("buffer", buffer, "[rows, heads, capacity, size]");
  demands.four_axes("chunk", chunk, "[rows, heads, tokens, size]");
  const int64_t capacity = buffer.size(2), tokens = chunk.size(2);
  demands.matches("chunk", chunk, buffer.scalar_type(),
                  {{"rows", buffer.size(0)}, {"heads", buffer.size(1)}, {"tokens", tokens}, {"size", buffer.size(3)}});
  if (start < 0 || tokens > capacity || start > capacity - tokens)
    demands.fail("a chunk of ", tokens, " tokens put at ", start, " does not fit into a buffer of ", capacity,
                 " tokens");
  if (buffer.element_size() > 8)
    demands.fail("buffer must be of a dtype of at most 8 bytes, but is ", dtype_name(buffer.scalar_type()));
  demands.unit_last_stride("buffer", buffer);
  demands.unit_last_stride("chunk", chunk);
  demands.writable("buffer", buffer);
  demands.apart("the part of buffer that is written to", Memory(buffer).tokens(start, tokens), "chunk", Memory(chunk));
}

inline void check_accumulate(const Demands& demands, const Tensor& total, const Tensor& part) {
  demands.four_axes("total", total, "[rows, heads, tokens, size]");
  if (total.scalar_type() != ScalarType::Float && total.scalar_type() != ScalarType::Double)
    demands.fail("total must be float32 or float64, but is ", dtype_name(total.scalar_type()));
  demands.kernel_dtype("part", part);
  demands.matches("part", part, part.scalar_type(),
                  {{"rows", total.size(0)}, {"heads", total.size(1)}, {"tokens", total.size(2)},
                   {"size", total.size(3)}});
  demands.unit_last_stride("total", total);
  demands.unit_last_stride("part", part);
  demands.writable("total", total);
  demands.apart("total", Memory(total), "part", Memory(part));
}

}  // namespace seq1f1b::bindings
