// Attention in bfloat16 on the tile unit (AMX), with AVX-512 for everything between the products.
#include "kernels.h"

#if defined(__linux__) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512F__) && \
    defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && defined(__AVX512BF16__)
#if defined(__GNUC__) && !defined(__clang__)
// Some versions of GCC report the vectors that their own headers leave undefined on purpose.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include "amx_backward.h"
#include "amx_forward.h"
#include "workspace.h"

namespace seq1f1b::cpu {
namespace amx {
namespace {

// The key head that a task belongs to and its number among that head's tasks.
struct Task {
  int64_t row, kv_head, number;

  Task(const Problem& p, int64_t task, int64_t tasks_of_head)
      : row(task / tasks_of_head / p.kv_heads),
        kv_head(task / tasks_of_head % p.kv_heads),
        number(light_beside_heavy(task % tasks_of_head, tasks_of_head)) {}
};

// Buffers cut from the calling thread's workspace.
template <class Buffers, class... Arguments>
Buffers in_workspace(const Arguments&... arguments) {
  Arena measured(nullptr);
  Buffers(measured, arguments...);
  Arena arena(workspace(measured.used()));
  return Buffers(arena, arguments...);
}

QuerySpan span_of(const Problem& p, const QuerySpans& spans, const Task& task, int64_t number) {
  const int64_t first = number * spans.length;
  return {p, task.row, task.kv_head, spans.group, first, std::min(spans.length, spans.rows - first)};
}

int64_t forward_tasks(const Forward& f) { return f.rows * f.kv_heads * QuerySpans(f, true).count; }

void forward(const Forward& f, int64_t begin, int64_t end) {
  const QuerySpans spans(f, true);
  const auto buffers = in_workspace<ForwardBuffers>(f, spans.length);
  const TileSession session;
  const TinyIsZero rounding;
  for (int64_t i = begin; i < end; ++i) {
    const Task task(f, i, spans.count);
    const QuerySpan span = span_of(f, spans, task, task.number);
    SpanForward(f, span, buffers).run();
  }
}

// Gradients of a span of query rows and, unless only these are wanted, its part of the gradients of the keys.
template <Wanted wanted>
void backward_span(const Backward& b, const QuerySpan& span, const BackwardBuffers& buffers) {
  BlockBackward<wanted> gradients(b, span.row, span.kv_head, buffers);
  const Range seen = gradients.open(span);
  gradients.pack(span);
  for (int64_t start = seen.begin / block_length * block_length; start < seen.end; start += block_length) {
    const GroupedKeys block(b, span.row, start);
    const Range groups = block.groups({seen.begin, seen.end, 0, 0});
    gradients.pack(block, groups, 0);
    for (int64_t rows = 0; rows * block_length < span.count; ++rows) gradients.meet(span, rows, block, 0);
    if (wanted != Wanted::queries) gradients.close(start, groups, 0);
  }
  gradients.close(span);
}

// Gradients of up to `key_blocks` blocks of keys.
void backward_keys(const Backward& b, const Task& task, const QuerySpans& spans, const BackwardBuffers& buffers) {
  BlockBackward<Wanted::keys> gradients(b, task.row, task.kv_head, buffers);
  constexpr Range everything{0, block_groups};
  const int64_t begin = task.number * buffers.key_blocks * block_length;
  const int64_t end = std::min(b.keys, begin + buffers.key_blocks * block_length);
  for (int64_t start = begin; start < end; start += block_length) {
    gradients.pack(GroupedKeys(b, task.row, start), everything, (start - begin) / block_length);
  }
  for (int64_t first = 0; first < spans.rows; first += block_length) {
    const QuerySpan span{b, task.row, task.kv_head, spans.group, first, std::min(block_length, spans.rows - first)};
    // With a window almost all queries are out of sight of these keys; position tells most of them without a look.
    const int64_t oldest = position(b, first / spans.group), newest = position(b, (first + span.count - 1) / spans.group);
    if (newest < begin || (b.window > 0 && oldest - b.window + 1 >= end)) continue;
    const Range seen = gradients.open(span);
    if (seen.end <= begin || seen.begin >= end) continue;
    gradients.pack(span);
    for (int64_t start = begin; start < end; start += block_length) {
      gradients.meet(span, 0, GroupedKeys(b, task.row, start), (start - begin) / block_length);
    }
  }
  for (int64_t start = begin; start < end; start += block_length) {
    gradients.close(start, everything, (start - begin) / block_length);
  }
}

// Blocks of keys of a task that computes their gradients.
int64_t key_blocks(const Problem& p) {
  // More would not save much packing of queries.
  const int64_t most = std::clamp<int64_t>(most_key_blocks * 64 / std::max(p.size, p.value_size), 1, most_key_blocks);
  return std::clamp<int64_t>(p.rows * p.kv_heads * blocks(p.keys, block_length) / tasks_wanted, 1, most);
}

int64_t backward_tasks(const Backward& b, Part part) {
  const int64_t heads = b.rows * b.kv_heads;
  if (part == Part::query) return heads * QuerySpans(b, true).count;
  if (part == Part::key_value) return heads * blocks(b.keys, key_blocks(b) * block_length);
  return heads;
}

void backward(const Backward& b, Part part, int64_t begin, int64_t end) {
  const QuerySpans spans(b, part == Part::query);
  const bool by_keys = part == Part::key_value;
  const auto buffers = in_workspace<BackwardBuffers>(
      BackwardSizes{Extent(b.size), Extent(b.value_size), by_keys ? 1 : spans.length / block_length,
                    by_keys ? key_blocks(b) : 1});
  const TileSession session;
  const TinyIsZero rounding;
  for (int64_t i = begin; i < end; ++i) {
    if (part == Part::query) {
      const Task task(b, i, spans.count);
      backward_span<Wanted::queries>(b, span_of(b, spans, task, task.number), buffers);
    } else if (by_keys) {
      backward_keys(b, Task(b, i, blocks(b.keys, buffers.key_blocks * block_length)), spans, buffers);
    } else {
      const Task task(b, i, 1);
      for (int64_t s = 0; s < spans.count; ++s) backward_span<Wanted::both>(b, span_of(b, spans, task, s), buffers);
    }
  }
}

constexpr Kernels kernels{"amx", forward_tasks, forward, backward_tasks, backward};

}  // namespace
}  // namespace amx

const Kernels* const amx_kernels = &amx::kernels;

}  // namespace seq1f1b::cpu

#else

namespace seq1f1b::cpu {
const Kernels* const amx_kernels = nullptr;
}  // namespace seq1f1b::cpu

#endif
