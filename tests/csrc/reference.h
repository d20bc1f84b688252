// Attention as its formulas say, in double precision, one query at a time.
#pragma once
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "attention.h"
#include "guarded_tensor.h"

namespace seq1f1b::fuzz {

// Dense [rows, heads, tokens, size].
struct Dense {
  std::vector<double> numbers;
  int64_t heads, tokens, size;

  Dense(int64_t rows, int64_t heads, int64_t tokens, int64_t size)
      : numbers(size_t(rows * heads * tokens * size)), heads(heads), tokens(tokens), size(size) {}
  explicit Dense(const GuardedTensor& from)
      : Dense(from.shape()[0], from.shape()[1], from.shape()[2], from.shape()[3]) {
    from.each([&](int64_t r, int64_t h, int64_t t, int64_t d) { at(r, h, t, d) = from.get(r, h, t, d); });
  }

  double* row(int64_t row, int64_t head, int64_t token) {
    return numbers.data() + ((row * heads + head) * tokens + token) * size;
  }
  const double* row(int64_t row, int64_t head, int64_t token) const {
    return const_cast<Dense*>(this)->row(row, head, token);
  }
  double& at(int64_t r, int64_t h, int64_t t, int64_t d) { return row(r, h, t)[d]; }
  double at(int64_t r, int64_t h, int64_t t, int64_t d) const { return row(r, h, t)[d]; }
};

struct Inputs {
  Dense query, key, value;
};

inline double dot(const double* a, const double* b, int64_t size) {
  double sum = 0;
  for (int64_t d = 0; d < size; ++d) sum += a[d] * b[d];
  return sum;
}
// to += factor * from
inline void add(double factor, const double* from, int64_t size, double* to) {
  for (int64_t d = 0; d < size; ++d) to[d] += factor * from[d];
}

inline bool sees(const Problem& p, int64_t row, int64_t query, int64_t key) {
  const int64_t position = p.keys - p.queries + query;
  return key <= position && (p.window == 0 || key > position - p.window) &&
         (!p.first_key || key >= p.first_key[row * p.queries + query]) &&
         (!p.key_mask || p.key_mask[row * p.keys + key]);
}

inline double capped(const Problem& p, double score) {
  return p.softcap > 0 ? p.softcap * std::tanh(score / p.softcap) : score;
}

struct ForwardTruth {
  Dense output, lse;
  double largest_score = 0;  // absolute, before the soft-cap

  ForwardTruth(const Problem& p, const Inputs& in)
      : output(p.rows, p.heads, p.queries, p.value_size), lse(p.rows, p.heads, p.queries, 1) {
    std::vector<double> scores;
    std::vector<int64_t> keys;
    for (int64_t r = 0; r < p.rows; ++r) {
      for (int64_t h = 0; h < p.heads; ++h) {
        const int64_t kv_head = h / (p.heads / p.kv_heads);
        for (int64_t i = 0; i < p.queries; ++i) {
          scores.clear(), keys.clear();
          const double* query = in.query.row(r, h, i);
          double top = -std::numeric_limits<double>::infinity(), sum = 0;
          for (int64_t n = 0; n < p.keys; ++n) {
            if (!sees(p, r, i, n)) continue;
            keys.push_back(n);
            const double raw = p.scale * dot(query, in.key.row(r, kv_head, n), p.size);
            scores.push_back(capped(p, raw));
            top = std::max(top, scores.back());
            largest_score = std::max(largest_score, std::fabs(raw));
          }
          for (double score : scores) sum += std::exp(score - top);
          lse.at(r, h, i, 0) = keys.empty() ? std::numeric_limits<double>::infinity() : top + std::log(sum);
          for (size_t j = 0; j < keys.size(); ++j) {
            const double weight = std::exp(scores[j] - top) / sum;
            add(weight, in.value.row(r, kv_head, keys[j]), p.value_size, output.row(r, h, i));
          }
        }
      }
    }
  }
};

// The gradients for a given output and log-sum-exp, which need not be exact nor of these keys alone.
struct BackwardTruth {
  Dense query, key, value;

  BackwardTruth(const Problem& p, const Inputs& in, const Dense& gradient, const Dense& output, const Dense& lse)
      : query(p.rows, p.heads, p.queries, p.size),
        key(p.rows, p.kv_heads, p.keys, p.size),
        value(p.rows, p.kv_heads, p.keys, p.value_size) {
    for (int64_t r = 0; r < p.rows; ++r) {
      for (int64_t h = 0; h < p.heads; ++h) {
        const int64_t kv_head = h / (p.heads / p.kv_heads);
        for (int64_t i = 0; i < p.queries; ++i) {
          const double* asked = in.query.row(r, h, i);
          const double* pull = gradient.row(r, h, i);
          const double mean = dot(pull, output.row(r, h, i), p.value_size);
          for (int64_t n = 0; n < p.keys; ++n) {
            if (!sees(p, r, i, n)) continue;
            const double* seen = in.key.row(r, kv_head, n);
            const double score = capped(p, p.scale * dot(asked, seen, p.size));
            const double weight = std::exp(score - lse.at(r, h, i, 0));
            const double along = dot(pull, in.value.row(r, kv_head, n), p.value_size);
            const double slope = p.softcap > 0 ? 1 - score / p.softcap * (score / p.softcap) : 1;
            const double through = p.scale * weight * slope * (along - mean);
            add(weight, pull, p.value_size, value.row(r, kv_head, n));
            add(through, seen, p.size, query.row(r, h, i));
            add(through, asked, p.size, key.row(r, kv_head, n));
          }
        }
      }
    }
  }
};

}  // namespace seq1f1b::fuzz
