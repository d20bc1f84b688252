// The forward: for a super-block of queries, block after block of keys, strip after strip of queries.
//
// Scores are computed transposed, keys down and queries across, so that all the softmax needs is vertical: a vector
// holds one key's scores for many queries, and a strip's maxima, sums and bounds are vectors of the same shape. They
// come in units of log2, the factor being part of the packed queries.
//
// The softmax subtracts a shift that need not be the maximum, only near enough for the powers to stay in range. Once a
// strip has a shift, weights are computed from scores while these are still in registers; where a block's sum shows
// that the shift is too small (rare), the block is done again the long way, by its maximum.
#pragma once
#include <cmath>
#include <cstdint>

#include "columns.h"
#include "keys.h"
#include "simd.h"
#include "storage.h"
#include "tiles.h"
#include "workspace.h"

namespace seq1f1b::cpu {
namespace {

// weights = 2^(scores - shift), and their sums added to `sums`.
template <class Real>
struct Weigh {
  const Real* shift;
  Real* sums;
  Real* weights;  // [keys, strip]
  template <int rows, int vectors>
  [[gnu::always_inline]] void operator()(int64_t row, const Vector<Real> (&scores)[rows][vectors]) const {
#pragma GCC unroll 4
    for (int j = 0; j < vectors; ++j) {
      const Vector<Real> by = load(shift + j * lanes<Real>);
      Vector<Real> sum{};
#pragma GCC unroll 8
      for (int i = 0; i < rows; ++i) {
        const Vector<Real> weight = exp2(scores[i][j] - by);
        sum += weight;
        store(weights + (row + i) * strip<Real> + j * lanes<Real>, weight);
      }
      store(sums + j * lanes<Real>, load(sums + j * lanes<Real>) + sum);
    }
  }
};

template <class Real>
class ForwardPass {
 public:
  static constexpr int64_t key_block = 128;

  ForwardPass(const Forward& problem, Arena arena) : p(problem), type(storage<Real>(problem.dtype)) {
    columns_at_most = super_block(p);
    value_width = round_up(p.value_size, lanes<Real>);
    columns.cut(arena, columns_at_most);
    keys.cut(arena, p, key_block);
    staging = arena.take<Real>(strip<Real> * round_up(p.size, lanes<Real>));
    queries = arena.take<Real>(columns_at_most * p.size);
    outputs = arena.take<Real>(columns_at_most * value_width);
    shift = arena.take<Real>(columns_at_most);
    total = arena.take<Real>(columns_at_most);
    settled = arena.take<bool>(columns_at_most / strip<Real>);
    weights = arena.take<Real>(key_block * strip<Real>);
    sums = arena.take<Real>(strip<Real>);
    rescale = arena.take<Real>(strip<Real>);
    scratch_bytes = arena.used();
  }

  // As many packed columns as have room in 512 KiB with their queries and outputs, or one strip. A block of keys and
  // its weights come on top: for heads of up to 256 entries it is 0.6 to 1.1 MiB in all, however long the sequence.
  static int64_t super_block(const Problem& p) {
    constexpr int64_t budget = 512 * 1024;
    const int64_t bytes = int64_t(sizeof(Real)) * (p.size + p.value_size);
    const int64_t fitting = budget / bytes / strip<Real> * strip<Real>;
    return larger(strip<Real>, smaller(fitting, round_up(packed_columns(p), strip<Real>)));
  }

  void run(int64_t row, int64_t kv_head, int64_t begin, int64_t end) {
    open(row, kv_head, begin, end);
    for (int64_t n = columns.all.begin / key_block * key_block; n < columns.all.end; n += key_block) {
      keys.load(p, type, p.key, p.value, row, kv_head, n, smaller(n + key_block, columns.all.end));
      if (!keys.any_shown) continue;
      for (int64_t s = 0; s < columns.strips; ++s) {
        const Span span = seen(keys, columns.visible[s]);
        if (span.begin < span.end) step(s, span);
      }
    }
    close(row, kv_head);
  }

  size_t scratch_bytes;

 private:
  const Forward& p;
  const Storage<Real> type;
  int64_t columns_at_most, value_width;
  Columns<Real> columns;
  KeyBlock<Real> keys;
  Real* staging;
  Real* queries;  // [strips, size, strip], times the factor of the scores
  Real* outputs;  // [columns, value_width], sums of weighted values
  Real* shift;    // [columns], -infinity before the first key
  Real* total;    // [columns], sums of weights
  bool* settled;  // [strips], whether all columns have a shift
  Real* weights;  // [key_block, strip]
  Real* sums;
  Real* rescale;

  void open(int64_t row, int64_t kv_head, int64_t begin, int64_t end) {
    columns.set(p, row, begin, end, strip<Real>);
    const Real factor = Real(p.softcap > 0 ? p.scale / p.softcap : p.scale * log2e);
    const int64_t width = round_up(p.size, lanes<Real>);
    for (int64_t s = 0; s < columns.strips; ++s) {
      columns.load(p, type, p.query, row, kv_head, p.size, width, s * strip<Real>, strip<Real>, staging);
      transpose(staging, p.size, width, factor, queries + s * strip<Real> * p.size);
      settled[s] = false;
    }
    for (int64_t c = 0; c < columns.strips * strip<Real>; ++c) {
      shift[c] = c < columns.count ? -infinity<Real> : Real(0);
      total[c] = 0;
    }
    for (int64_t i = 0; i < columns.strips * strip<Real> * value_width; ++i) outputs[i] = 0;
  }

  void step(int64_t s, Span span) {
    const Real* key = keys.key + (span.begin - keys.begin) * keys.key_width;
    const Real* query = queries + s * strip<Real> * p.size;
    const int64_t count = span.end - span.begin;
    const bool direct = settled[s] && !span.masked && !(p.softcap > 0);
    if (!direct || !weigh(s, count, key, query)) {
      panel<Left::rows, tile_vectors>(count, p.size, key, keys.key_width, query, strip<Real>,
                                      Store<Real>{weights, strip<Real>});
      weigh_by_maximum(s, span);
    }
    add_product<Left::columns>(strip<Real>, value_width, count, weights, strip<Real>,
                               keys.value + (span.begin - keys.begin) * value_width,
                               outputs + s * strip<Real> * value_width);
  }

  // False: the weights of some column may be out of range (or no numbers).
  bool weigh(int64_t s, int64_t count, const Real* key, const Real* query) {
    constexpr Real limit = 65536;
    for (int c = 0; c < strip<Real>; ++c) sums[c] = 0;
    panel<Left::rows, tile_vectors>(count, p.size, key, keys.key_width, query, strip<Real>,
                                    Weigh<Real>{shift + s * strip<Real>, sums, weights});
    bool in_range = true;
    for (int c = 0; c < strip<Real>; ++c) in_range = in_range & (sums[c] < limit);
    if (!in_range) return false;
    for (int c = 0; c < strip<Real>; ++c) total[s * strip<Real> + c] += sums[c];
    return true;
  }

  // From scores to weights in `weights`, by the maximum of all keys so far.
  void weigh_by_maximum(int64_t s, Span span) {
    const Integer<Real>* ids = keys.ids + (span.begin - keys.begin);
    const int64_t count = span.end - span.begin;
    for (int j = 0; j < strip<Real>; j += lanes<Real>) {
      const int64_t column = s * strip<Real> + j;
      if (p.softcap > 0) cap(count, weights + j);
      if (span.masked) hide(count, ids, column, weights + j);
      const Vector<Real> before = load(shift + column);
      Vector<Real> top = before;
      for (int64_t n = 0; n < count; ++n) top = larger_lanes(load(weights + n * strip<Real> + j), top);
      // Without any key yet nothing is subtracted, for infinity minus itself is no number.
      const Vector<Real> base = top == -infinity<Real> ? Vector<Real>{} : top;
      Vector<Real> sum{};
      for (int64_t n = 0; n < count; ++n) {
        Real* at = weights + n * strip<Real> + j;
        const Vector<Real> weight = exp2(load(at) - base);
        sum += weight;
        store(at, weight);
      }
      const Vector<Real> shrink = exp2(before - base);
      store(shift + column, top);
      store(total + column, multiply_add(load(total + column), shrink, sum));
      store(rescale + j, shrink);
    }
    settled[s] = true;
    for (int c = 0; c < strip<Real>; ++c) {
      const int64_t column = s * strip<Real> + c;
      if (shift[column] == -infinity<Real>) settled[s] = false;
      Real* output = outputs + column * value_width;
      if (rescale[c] != 1) {
        for (int64_t d = 0; d < value_width; ++d) output[d] *= rescale[c];
      }
    }
  }

  void cap(int64_t count, Real* scores) const {
    const Real to_log2 = Real(p.softcap * log2e);
    for (int64_t n = 0; n < count; ++n) {
      store(scores + n * strip<Real>, tanh<Real>(load(scores + n * strip<Real>)).value * to_log2);
    }
  }

  void hide(int64_t count, const Integer<Real>* ids, int64_t column, Real* scores) const {
    const Vector<Real> hidden = broadcast(-infinity<Real>);
    const Integers<Real> first = load_integers<Real>(columns.first + column);
    const Integers<Real> last = load_integers<Real>(columns.last + column);
    for (int64_t n = 0; n < count; ++n) {
      Real* at = scores + n * strip<Real>;
      store(at, ((ids[n] >= first) & (ids[n] <= last)) ? load(at) : hidden);
    }
  }

  void close(int64_t row, int64_t kv_head) {
    for (int64_t c = 0; c < columns.count; ++c) {
      const int64_t head = columns.head(p, kv_head, c), query = columns.query(p, c);
      const bool none = total[c] == 0;
      const Real inverse = none ? Real(0) : 1 / total[c];
      Real* output = outputs + c * value_width;
      for (int64_t d = 0; d < value_width; ++d) output[d] *= inverse;
      type.store(output, p.value_size, p.output.data,
                 row * p.output.row + head * p.output.head + query * p.output.token);
      const double logarithm = (double(shift[c]) + ::log2(double(total[c]))) * ln2;
      static_cast<Real*>(p.lse)[(row * p.heads + head) * p.queries + query] =
          none ? infinity<Real> : Real(logarithm);
    }
  }
};

}  // namespace
}  // namespace seq1f1b::cpu
