// The backward: for a super-block of queries, block after block of keys, block after block of the queries.
//
// Scores and weights are computed again, transposed as in the forward. `P^T` and `dS^T` then are the left operands of
// dV += P^T dO and dK += dS^T Q as they lie, and of dQ += (dS^T)^T K read by columns. The sums of a key block stay in
// scratch for a whole super-block and are added to the caller's accumulators once.
#pragma once
#include <cstdint>

#include "columns.h"
#include "keys.h"
#include "kernels.h"
#include "simd.h"
#include "storage.h"
#include "tiles.h"
#include "workspace.h"

namespace seq1f1b::cpu {
namespace {

// weights = 2^(scores - lse)
template <class Real>
struct Recall {
  const Real* lse;
  Real* weights;
  int64_t stride;
  template <int rows, int vectors>
  [[gnu::always_inline]] void operator()(int64_t row, const Vector<Real> (&scores)[rows][vectors]) const {
#pragma GCC unroll 4
    for (int j = 0; j < vectors; ++j) {
      const Vector<Real> by = load(lse + j * lanes<Real>);
#pragma GCC unroll 8
      for (int i = 0; i < rows; ++i) {
        store(weights + (row + i) * stride + j * lanes<Real>, exp2(scores[i][j] - by));
      }
    }
  }
};

// score_gradients = slopes * (weight_gradients - mean), where slopes are the weights, times the soft-cap's derivative.
template <class Real>
struct Slope {
  const Real* mean;
  const Real* slopes;
  Real* score_gradients;
  int64_t stride;
  template <int rows, int vectors>
  [[gnu::always_inline]] void operator()(int64_t row, const Vector<Real> (&weight_gradients)[rows][vectors]) const {
#pragma GCC unroll 4
    for (int j = 0; j < vectors; ++j) {
      const Vector<Real> by = load(mean + j * lanes<Real>);
#pragma GCC unroll 8
      for (int i = 0; i < rows; ++i) {
        const int64_t at = (row + i) * stride + j * lanes<Real>;
        store(score_gradients + at, load(slopes + at) * (weight_gradients[i][j] - by));
      }
    }
  }
};

template <class Real>
class BackwardPass {
 public:
  static constexpr int64_t key_block = 128;
  static constexpr int64_t query_block = round_up(128, strip<Real>);
  static constexpr int64_t stride = query_block + lanes<Real>;  // no power of two, which would crowd a few cache sets

  BackwardPass(const Backward& problem, Part which, Arena arena)
      : p(problem), part(which), type(storage<Real>(problem.dtype)) {
    columns_at_most = super_block(p);
    width = round_up(p.size, lanes<Real>);
    value_width = round_up(p.value_size, lanes<Real>);
    columns.cut(arena, columns_at_most);
    keys.cut(arena, p, key_block);
    queries_across = arena.take<Real>(columns_at_most * p.size);
    gradients_across = arena.take<Real>(columns_at_most * p.value_size);
    queries = arena.take<Real>(columns_at_most * width);
    gradients = arena.take<Real>(columns_at_most * value_width);
    query_gradients = arena.take<Real>(columns_at_most * width);
    lse = arena.take<Real>(columns_at_most);
    mean = arena.take<Real>(columns_at_most);
    key_gradients = arena.take<Real>(key_block * width);
    value_gradients = arena.take<Real>(key_block * value_width);
    weights = arena.take<Real>(key_block * stride);
    slopes = p.softcap > 0 ? arena.take<Real>(key_block * stride) : weights;
    score_gradients = arena.take<Real>(key_block * stride);
    scratch_bytes = arena.used();
  }

  // As many packed columns as have room in 1.25 MiB with their queries and gradients, each in two orders, and the sums
  // for the queries; or one block. What belongs to a block of keys comes on top: for heads of up to 256 entries the
  // scratch is of 1.5 to 2 MiB, in float64 of up to 2.7 MiB, however long the sequence.
  static int64_t super_block(const Problem& p) {
    constexpr int64_t budget = 1280 * 1024;
    const int64_t bytes = int64_t(sizeof(Real)) * (3 * p.size + 2 * p.value_size);
    const int64_t fitting = budget / bytes / query_block * query_block;
    return larger(query_block, smaller(fitting, round_up(packed_columns(p), query_block)));
  }

  // Packed columns [begin, end) over the keys [key_begin, key_end), a multiple of key_block at its beginning.
  void run(int64_t row, int64_t kv_head, int64_t begin, int64_t end, int64_t key_begin, int64_t key_end) {
    if (part == Part::key_value && out_of_sight(begin, end, key_begin, key_end)) return;
    columns.set(p, row, begin, end, query_block);
    const int64_t seen_end = smaller(key_end, columns.all.end);
    int64_t n = larger(key_begin, columns.all.begin / key_block * key_block);
    if (n >= seen_end && part == Part::key_value) return;
    open(row, kv_head);
    for (; n < seen_end; n += key_block) {
      keys.load(p, type, p.key, p.value, row, kv_head, n, smaller(n + key_block, seen_end));
      if (!keys.any_shown) continue;
      if (part != Part::query) clear();
      for (int64_t block = 0; block < columns.strips * strip<Real>; block += query_block) step(block);
      if (part != Part::query) add_to_accumulators(row, kv_head);
    }
    if (part != Part::key_value) close(row, kv_head);
  }

  size_t scratch_bytes;

 private:
  const Backward& p;
  const Part part;
  const Storage<Real> type;
  int64_t columns_at_most, width, value_width;
  Columns<Real> columns;
  KeyBlock<Real> keys;
  Real* queries_across;    // [strips, size, strip], times the factor of the scores
  Real* gradients_across;  // [strips, value_size, strip]
  Real* queries;           // [columns, width]
  Real* gradients;         // [columns, value_width]
  Real* query_gradients;   // [columns, width]
  Real* lse;               // [columns], in units of log2
  Real* mean;              // [columns], of the gradients of a column's weights: the output times its gradient
  Real* key_gradients;     // [key_block, width]
  Real* value_gradients;   // [key_block, value_width]
  Real* weights;           // [key_block, stride], as are the next two
  Real* slopes;
  Real* score_gradients;

  // Whether position and window alone hide the keys from the columns. A task of keys comes by all columns, and with a
  // window almost all are out of sight: this tells without looking at each.
  bool out_of_sight(int64_t begin, int64_t end, int64_t key_begin, int64_t key_end) const {
    const int64_t first = position(p, begin / group(p)), last = position(p, (end - 1) / group(p));
    return last < key_begin || (p.window > 0 && first - p.window + 1 >= key_end);
  }

  void open(int64_t row, int64_t kv_head) {
    const int64_t padded = columns.strips * strip<Real>;
    const Real factor = Real(p.softcap > 0 ? p.scale / p.softcap : p.scale * log2e);
    columns.load(p, type, p.query, row, kv_head, p.size, width, 0, padded, queries);
    columns.load(p, type, p.gradient, row, kv_head, p.value_size, value_width, 0, padded, gradients);
    for (int64_t s = 0; s < columns.strips; ++s) {
      const int64_t c = s * strip<Real>;
      transpose(queries + c * width, p.size, width, factor, queries_across + c * p.size);
      transpose(gradients + c * value_width, p.value_size, value_width, Real(1), gradients_across + c * p.value_size);
      for (int64_t i = c; i < c + strip<Real>; ++i) describe(row, kv_head, i);
    }
    for (int64_t i = 0; i < padded * width; ++i) query_gradients[i] = 0;
  }

  // A column's log-sum-exp and the mean of the gradients of its weights.
  void describe(int64_t row, int64_t kv_head, int64_t column) {
    Real* output = value_gradients;  // not in use yet; the outputs are needed for this product alone
    columns.load(p, type, p.output, row, kv_head, p.value_size, value_width, column, 1, output);
    Vector<Real> product{};
    for (int64_t d = 0; d < value_width; d += lanes<Real>) {
      product = multiply_add(load(output + d), load(gradients + column * value_width + d), product);
    }
    mean[column] = 0;
    for (int l = 0; l < lanes<Real>; ++l) mean[column] += product[l];
    // What pads a strip gets no weights.
    lse[column] = infinity<Real>;
    if (column >= columns.count) return;
    const int64_t head = columns.head(p, kv_head, column), query = columns.query(p, column);
    lse[column] = Real(static_cast<const Real*>(p.lse)[(row * p.heads + head) * p.queries + query] * log2e);
  }

  void clear() {
    for (int64_t i = 0; i < key_block * width; ++i) key_gradients[i] = 0;
    for (int64_t i = 0; i < key_block * value_width; ++i) value_gradients[i] = 0;
  }

  void step(int64_t block) {
    int64_t begin = keys.end, end = keys.begin;
    for (int64_t j = 0; j < query_block; j += strip<Real>) {
      const Span span = seen(keys, columns.visible[(block + j) / strip<Real>]);
      if (span.begin >= span.end) continue;
      begin = smaller(begin, span.begin);
      end = larger(end, span.end);
    }
    if (begin >= end) return;
    const int64_t first = begin - keys.begin, count = end - begin;
    for (int64_t j = 0; j < query_block; j += strip<Real>) {
      const Span span = seen(keys, columns.visible[(block + j) / strip<Real>]);
      const bool empty = span.begin >= span.end;
      if (!empty) differentiate(block + j, j, span);
      if (part == Part::query) continue;
      // The products below take whole rows.
      zero(first, (empty ? end : span.begin) - keys.begin, j);
      zero((empty ? end : span.end) - keys.begin, first + count, j);
    }
    if (part == Part::query) return;
    add_product<Left::rows>(count, value_width, query_block, weights + first * stride, stride,
                            gradients + block * value_width, value_gradients + first * value_width);
    add_product<Left::rows>(count, width, query_block, score_gradients + first * stride, stride,
                            queries + block * width, key_gradients + first * width);
  }

  void zero(int64_t from, int64_t to, int64_t j) {
    for (int64_t n = from; n < to; ++n) {
      for (int c = 0; c < strip<Real>; ++c) weights[n * stride + j + c] = score_gradients[n * stride + j + c] = 0;
    }
  }

  // The weights and the gradients of the scores of one strip, which lies at column `j` of the scratch.
  void differentiate(int64_t column, int64_t j, Span span) {
    const int64_t first = span.begin - keys.begin, count = span.end - span.begin, at = first * stride + j;
    const Real* key = keys.key + first * width;
    const Real* value = keys.value + first * value_width;
    const Real* query = queries_across + column * p.size;
    const Real* gradient = gradients_across + column * p.value_size;
    if (span.masked || p.softcap > 0) {
      panel<Left::rows, tile_vectors>(count, p.size, key, width, query, strip<Real>, Store<Real>{weights + at, stride});
      weigh(column, at, first, count, span.masked);
    } else {
      panel<Left::rows, tile_vectors>(count, p.size, key, width, query, strip<Real>,
                                      Recall<Real>{lse + column, weights + at, stride});
    }
    panel<Left::rows, tile_vectors>(count, p.value_size, value, value_width, gradient, strip<Real>,
                                    Slope<Real>{mean + column, slopes + at, score_gradients + at, stride});
    if (part == Part::key_value) return;
    add_product<Left::columns>(strip<Real>, width, count, score_gradients + at, stride, key,
                               query_gradients + column * width);
  }

  // From scores to weights and slopes, with a soft-cap or a mask or both.
  void weigh(int64_t column, int64_t at, int64_t first_row, int64_t count, bool masked) {
    const Real to_log2 = Real(p.softcap * log2e);
    const Integer<Real>* ids = keys.ids + first_row;
    for (int j = 0; j < strip<Real>; j += lanes<Real>) {
      const Integers<Real> first = load_integers<Real>(columns.first + column + j);
      const Integers<Real> last = load_integers<Real>(columns.last + column + j);
      const Vector<Real> by = load(lse + column + j);
      for (int64_t n = 0; n < count; ++n) {
        const int64_t here = at + n * stride + j;
        Vector<Real> score = load(weights + here), slope = broadcast(Real(1));
        if (p.softcap > 0) {
          const Tanh<Real> capped = tanh<Real>(score);
          score = capped.value * to_log2;
          slope = capped.slope;
        }
        Vector<Real> weight = exp2(score - by);
        if (masked) weight = ((ids[n] >= first) & (ids[n] <= last)) ? weight : Vector<Real>{};
        store(weights + here, weight);
        if (p.softcap > 0) store(slopes + here, weight * slope);
      }
    }
  }

  void add_to_accumulators(int64_t row, int64_t kv_head) {
    const Output& dk = p.key_gradient;
    const Output& dv = p.value_gradient;
    const Real factor = Real(p.scale);
    for (int64_t n = keys.begin; n < keys.end; ++n) {
      Real* key = static_cast<Real*>(dk.data) + row * dk.row + kv_head * dk.head + n * dk.token;
      Real* value = static_cast<Real*>(dv.data) + row * dv.row + kv_head * dv.head + n * dv.token;
      const Real* add_key = key_gradients + (n - keys.begin) * width;
      const Real* add_value = value_gradients + (n - keys.begin) * value_width;
      for (int64_t d = 0; d < p.size; ++d) key[d] += factor * add_key[d];
      for (int64_t d = 0; d < p.value_size; ++d) value[d] += add_value[d];
    }
  }

  void close(int64_t row, int64_t kv_head) {
    const Output& to = p.query_gradient;
    const Real factor = Real(p.scale);
    for (int64_t c = 0; c < columns.count; ++c) {
      Real* gradient = query_gradients + c * width;
      for (int64_t d = 0; d < width; ++d) gradient[d] *= factor;
      type.store(gradient, p.size, to.data,
                 row * to.row + columns.head(p, kv_head, c) * to.head + columns.query(p, c) * to.token);
    }
  }
};

}  // namespace
}  // namespace seq1f1b::cpu
