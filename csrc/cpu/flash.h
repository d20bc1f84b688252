// The table of one instruction set's kernels: how a problem is cut into tasks, and the passes that run them.
#pragma once
#include <cstdint>

#include "backward.h"
#include "forward.h"
#include "kernels.h"
#include "workspace.h"

namespace seq1f1b::cpu {
namespace {

// Tasks that cost most come first: late queries, and early keys.
template <class Real>
struct Flash {
  // Keys of a task of Part::key_value: enough to pay for packing the queries again.
  static constexpr int64_t keys_of_task = 8 * BackwardPass<Real>::key_block;

  static int64_t forward_blocks(const Forward& p) {
    const int64_t block = ForwardPass<Real>::super_block(p);
    return (packed_columns(p) + block - 1) / block;
  }

  static int64_t forward_tasks(const Forward& p) { return p.rows * p.kv_heads * forward_blocks(p); }

  static void forward(const Forward& p, int64_t begin, int64_t end) {
    if (begin >= end) return;
    const size_t bytes = ForwardPass<Real>(p, Arena(nullptr)).scratch_bytes;
    ForwardPass<Real> pass(p, Arena(workspace(bytes)));
    const int64_t blocks = forward_blocks(p), block = ForwardPass<Real>::super_block(p);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t head = task / blocks, first = (blocks - 1 - task % blocks) * block;
      pass.run(head / p.kv_heads, head % p.kv_heads, first, smaller(first + block, packed_columns(p)));
    }
  }

  static int64_t query_blocks(const Backward& p) {
    const int64_t block = BackwardPass<Real>::super_block(p);
    return (packed_columns(p) + block - 1) / block;
  }

  static int64_t key_blocks(const Backward& p) { return (p.keys + keys_of_task - 1) / keys_of_task; }

  static int64_t backward_tasks_of_head(const Backward& p, Part part) {
    return part == Part::all ? 1 : part == Part::query ? query_blocks(p) : key_blocks(p);
  }

  static int64_t backward_tasks(const Backward& p, Part part) {
    return p.rows * p.kv_heads * backward_tasks_of_head(p, part);
  }

  static void backward(const Backward& p, Part part, int64_t begin, int64_t end) {
    if (begin >= end) return;
    const size_t bytes = BackwardPass<Real>(p, part, Arena(nullptr)).scratch_bytes;
    BackwardPass<Real> pass(p, part, Arena(workspace(bytes)));
    const int64_t of_head = backward_tasks_of_head(p, part), blocks = query_blocks(p);
    const int64_t block = BackwardPass<Real>::super_block(p);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t head = task / of_head, index = task % of_head;
      const int64_t first_block = part == Part::query ? blocks - 1 - index : 0;
      const int64_t end_block = part == Part::query ? first_block + 1 : blocks;
      const int64_t key_begin = part == Part::key_value ? index * keys_of_task : 0;
      const int64_t key_end = part == Part::key_value ? smaller(key_begin + keys_of_task, p.keys) : p.keys;
      for (int64_t b = first_block; b < end_block; ++b) {
        pass.run(head / p.kv_heads, head % p.kv_heads, b * block, smaller((b + 1) * block, packed_columns(p)),
                 key_begin, key_end);
      }
    }
  }
};

int64_t forward_tasks(const Forward& p) {
  return p.dtype == DType::float64 ? Flash<double>::forward_tasks(p) : Flash<float>::forward_tasks(p);
}
void forward(const Forward& p, int64_t begin, int64_t end) {
  p.dtype == DType::float64 ? Flash<double>::forward(p, begin, end) : Flash<float>::forward(p, begin, end);
}
int64_t backward_tasks(const Backward& p, Part part) {
  return p.dtype == DType::float64 ? Flash<double>::backward_tasks(p, part) : Flash<float>::backward_tasks(p, part);
}
void backward(const Backward& p, Part part, int64_t begin, int64_t end) {
  p.dtype == DType::float64 ? Flash<double>::backward(p, part, begin, end)
                            : Flash<float>::backward(p, part, begin, end);
}

constexpr Kernels flash(const char* name) { return {name, forward_tasks, forward, backward_tasks, backward}; }

}  // namespace
}  // namespace seq1f1b::cpu
