// The ops on CUDA: on torch's current stream and out of torch's memory pool. Built only with CUDA, and then loadable
// everywhere: on a torch without CUDA nothing ever dispatches to it.
#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "../cuda/launch.h"
#include "checked_problems.h"

// Lives in the CUDA part of torch; weak, so that a torch without that part loads this file.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void** stream);

namespace seq1f1b::bindings {
namespace {

using torch::stable::accelerator::DeviceGuard;

void* current_stream(const Tensor& tensor) {
  void* stream = nullptr;
  if (!aoti_torch_get_current_cuda_stream ||
      aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream) != TORCH_SUCCESS)
    throw std::runtime_error("lightning_seq1f1b: torch gives no current CUDA stream for " + device_name(tensor));
  return stream;
}

void check_launch(const char* op, int status) {
  if (status != cudaSuccess)
    throw std::runtime_error(
        std::string("lightning_seq1f1b::") + op + ": " + cudaGetErrorString(static_cast<cudaError_t>(status)));
}

void check_supported(const Demands& demands, const Problem& problem, const Tensor& query) {
  if (problem.dtype != DType::bfloat16 && problem.dtype != DType::float16)
    demands.fail("on CUDA query must be bfloat16 or float16, but is ", dtype_name(query.scalar_type()));
  if (problem.size > cuda::largest_head || problem.value_size > cuda::largest_head)
    demands.fail("on CUDA heads have at most ", cuda::largest_head, " entries, but those of query have ", problem.size,
                 " and those of value ", problem.value_size);
}

std::tuple<Tensor, Tensor> attend(
    const Tensor& query, const Tensor& key, const Tensor& value, double scale, int64_t window, double softcap,
    const std::optional<Tensor>& first_key, const std::optional<Tensor>& key_mask) {
  const Demands demands("attend", query);
  const CheckedForward checked =
      checked_forward(demands, query, key, value, scale, window, softcap, first_key, key_mask);
  check_supported(demands, checked.problem, query);
  const DeviceGuard guard(query.get_device_index());
  if (!has_no_queries(checked.problem))
    check_launch("attend", seq1f1b_cuda_forward(&checked.problem, current_stream(query)));
  return {checked.output, checked.lse};
}

Tensor attend_backward(
    const Tensor& gradient, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& attended,
    const Tensor& lse, const Tensor& key_gradient, const Tensor& value_gradient, double scale, int64_t window,
    double softcap, const std::optional<Tensor>& first_key, const std::optional<Tensor>& key_mask) {
  const Demands demands("attend_backward", query);
  const CheckedBackward checked =
      checked_backward(demands, gradient, query, key, value, attended, lse, key_gradient, value_gradient, scale,
                       window, softcap, first_key, key_mask);
  check_supported(demands, checked.problem, query);
  const DeviceGuard guard(query.get_device_index());
  if (has_no_queries(checked.problem)) return checked.query_gradient;
  const Tensor delta = new_per_query(query, ScalarType::Float);
  float* scratch = static_cast<float*>(delta.mutable_data_ptr());
  check_launch("attend_backward", seq1f1b_cuda_backward(&checked.problem, scratch, current_stream(query)));
  return checked.query_gradient;
}

void append(const Tensor& buffer, const Tensor& chunk, int64_t start) {
  const Demands demands("append", buffer);
  check_append(demands, buffer, chunk, start);
  if (chunk.numel() == 0) return;
  const DeviceGuard guard(buffer.get_device_index());
  check_launch("append", seq1f1b_cuda_append(
      output(buffer), input(chunk), chunk.size(0), chunk.size(1), chunk.size(2), chunk.size(3),
      static_cast<int64_t>(buffer.element_size()), start, current_stream(buffer)));
}

void accumulate(const Tensor& total, const Tensor& part) {
  const Demands demands("accumulate", total);
  check_accumulate(demands, total, part);
  const DType dtype = demands.kernel_dtype("part", part);
  if (total.scalar_type() == ScalarType::Double || dtype == DType::float64)
    demands.fail("on CUDA neither total nor part may be float64, but they are ", dtype_name(total.scalar_type()),
                 " and ", dtype_name(part.scalar_type()));
  if (part.numel() == 0) return;
  const DeviceGuard guard(total.get_device_index());
  check_launch("accumulate", seq1f1b_cuda_accumulate(
      output(total), input(part), dtype, part.size(0), part.size(1), part.size(2), part.size(3),
      current_stream(total)));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lightning_seq1f1b, CUDA, library) {
  library.impl("attend", TORCH_BOX(&attend));
  library.impl("attend_backward", TORCH_BOX(&attend_backward));
  library.impl("append", TORCH_BOX(&append));
  library.impl("accumulate", TORCH_BOX(&accumulate));
}

}  // namespace seq1f1b::bindings
