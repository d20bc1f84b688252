// attend and attend_backward on the CPU, over the threads of torch's own pool.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <tuple>

#include "../cpu/dispatch.h"
#include "checked_problems.h"

namespace seq1f1b::bindings {
namespace {

// Threads take tasks as they become free: with a causal mask a late block of queries costs many times an early one, so
// that equal shares of the tasks would not be equal shares of the work.
template <class Run>
void spread(int64_t tasks, const Run& run) {
  const int64_t threads = std::min<int64_t>(torch::stable::get_num_threads(), tasks);
  if (threads <= 1) {
    if (tasks > 0) run(0, tasks);
    return;
  }
  constexpr int64_t turns_per_thread = 8;
  const int64_t turn = std::max<int64_t>(1, tasks / (threads * turns_per_thread));
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t begin = next.fetch_add(turn); begin < tasks; begin = next.fetch_add(turn))
      run(begin, std::min(begin + turn, tasks));
  });
}

// Whether to compute every score once, in few tasks, or twice, in many. `all` takes five matrix products for each block
// of scores, `query` and `key_value` together seven; what counts is the time of the busiest thread.
bool one_pass_is_faster(int64_t tasks, int64_t threads) {
  const int64_t turns = (tasks + threads - 1) / threads;
  return turns * threads * 5 <= tasks * 7;
}

std::tuple<Tensor, Tensor> attend(
    const Tensor& query, const Tensor& key, const Tensor& value, double scale, int64_t window, double softcap,
    const std::optional<Tensor>& first_key, const std::optional<Tensor>& key_mask) {
  const Demands demands("attend", query);
  const CheckedForward checked =
      checked_forward(demands, query, key, value, scale, window, softcap, first_key, key_mask);
  const Forward& forward = checked.problem;
  if (has_no_queries(forward)) return {checked.output, checked.lse};
  const cpu::Kernels& kernels = cpu::kernels(forward.dtype);
  spread(kernels.forward_tasks(forward), [&](int64_t begin, int64_t end) { kernels.forward(forward, begin, end); });
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
  const Backward& backward = checked.problem;
  if (has_no_queries(backward)) return checked.query_gradient;
  const cpu::Kernels& kernels = cpu::kernels(backward.dtype);
  const auto run = [&](cpu::Part part) {
    spread(kernels.backward_tasks(backward, part),
           [&](int64_t begin, int64_t end) { kernels.backward(backward, part, begin, end); });
  };
  if (one_pass_is_faster(kernels.backward_tasks(backward, cpu::Part::all), torch::stable::get_num_threads())) {
    run(cpu::Part::all);
  } else {
    run(cpu::Part::query);
    run(cpu::Part::key_value);
  }
  return checked.query_gradient;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lightning_seq1f1b, CPU, library) {
  library.impl("attend", TORCH_BOX(&attend));
  library.impl("attend_backward", TORCH_BOX(&attend_backward));
}

}  // namespace seq1f1b::bindings
