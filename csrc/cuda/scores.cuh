// From products q.k to weights. Scores are kept in units of log 2, so that a weight is one exp2.
#pragma once
#include <cmath>

#include "masks.cuh"

namespace seq1f1b::cuda {

constexpr double log2_e = 1.4426950408889634;
constexpr float log_2 = 0.6931471805599453f;

// weight = exp2(factor * score - ...); the score is the product itself or, when not `plain`, what finish() makes of it.
struct Scores {
  float factor;  // positive
  bool plain;
  float inner;  // the tanh takes inner * product; without a cap the score is inner * product
  float cap;    // of scores in units of log 2; 0: none

  static Scores of(const Problem& p) {
    if (p.softcap > 0)
      return {1, false, static_cast<float>(p.scale / p.softcap), static_cast<float>(p.softcap * log2_e)};
    const float scale = static_cast<float>(p.scale * log2_e);
    // Taking the largest product for the largest score needs a positive factor.
    return scale > 0 ? Scores{scale, true, 1, 0} : Scores{1, false, scale, 0};
  }
};

__device__ __forceinline__ float tanh_approximate(float x) {
  return 1 - 2 / (exp2_approximate(static_cast<float>(2 * log2_e) * x) + 1);
}

template <int RowTiles, int Columns>
__device__ __forceinline__ void finish(Accumulator<RowTiles, Columns>& products, const Scores& scores) {
  if (scores.plain) return;
#pragma unroll
  for (int r = 0; r < RowTiles; ++r)
#pragma unroll
    for (int c = 0; c < Columns / 8; ++c)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float product = scores.inner * products.at[r][c][e];
        products.at[r][c][e] = scores.cap > 0 ? scores.cap * tanh_approximate(product) : product;
      }
}

// The running softmax of the rows that a lane holds entries of: two for each row tile.
template <int RowTiles>
struct Softmax {
  float largest[RowTiles][2];  // score so far; minus infinity before the first visible key
  float total[RowTiles][2];    // of the lane's own weights

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int r = 0; r < RowTiles; ++r)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        largest[r][half] = invisible;
        total[r][half] = 0;
      }
  }

  // Turns the scores of one more tile of keys into weights, and rescales what was summed with the weights before.
  template <int Keys, int Columns>
  __device__ __forceinline__ void take(
      Accumulator<RowTiles, Keys>& scores, Accumulator<RowTiles, Columns>& sum, float factor) {
#pragma unroll
    for (int r = 0; r < RowTiles; ++r)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float now = largest[r][half];
#pragma unroll
        for (int c = 0; c < Keys / 8; ++c)
#pragma unroll
          for (int e = 0; e < 2; ++e) now = fmaxf(now, scores.at[r][c][2 * half + e]);
        now = fmaxf(now, shuffle_xor(now, 1));
        now = fmaxf(now, shuffle_xor(now, 2));
        const float offset = now == invisible ? 0 : factor * now;
        const float shrink = exp2_approximate(fmaf(factor, largest[r][half], -offset));
        largest[r][half] = now;
        float added = 0;
#pragma unroll
        for (int c = 0; c < Keys / 8; ++c)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& score = scores.at[r][c][2 * half + e];
            score = exp2_approximate(fmaf(factor, score, -offset));
            added += score;
          }
        total[r][half] = fmaf(shrink, total[r][half], added);
        if (!any_lane(shrink < 1)) continue;  // the more keys a row has seen, the rarer is a larger one
#pragma unroll
        for (int c = 0; c < Columns / 8; ++c)
#pragma unroll
          for (int e = 0; e < 2; ++e) sum.at[r][c][2 * half + e] *= shrink;
      }
  }

  // Divides the sums by the weights and returns the log-sum-exp of each row: infinity, and zero sums, without keys.
  template <int Columns>
  __device__ __forceinline__ void close(
      Accumulator<RowTiles, Columns>& sum, float factor, float (&lse)[RowTiles][2]) const {
#pragma unroll
    for (int r = 0; r < RowTiles; ++r)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float whole = total[r][half];
        whole += shuffle_xor(whole, 1);
        whole += shuffle_xor(whole, 2);
        const bool sees = whole > 0;
        lse[r][half] = sees ? (factor * largest[r][half] + log2_approximate(whole)) * log_2 : INFINITY;
        const float share = sees ? 1 / whole : 0;
#pragma unroll
        for (int c = 0; c < Columns / 8; ++c)
#pragma unroll
          for (int e = 0; e < 2; ++e) sum.at[r][c][2 * half + e] *= share;
      }
  }
};

template <bool Capped, int RowTiles, int Columns, class At>
__device__ __forceinline__ void weigh(Accumulator<RowTiles, Columns>& scores, Accumulator<RowTiles, Columns>& gradients,
                                      const Scores& form, At at) {
#pragma unroll
  for (int r = 0; r < RowTiles; ++r)
#pragma unroll
    for (int c = 0; c < Columns / 8; ++c)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float &score = scores.at[r][c][e], &gradient = gradients.at[r][c][e];
        const Pair query = at(r, c, e);
        const float weight = exp2_approximate(fmaf(form.factor, score, -query.first));
        gradient = weight * (gradient - query.second);
        if (Capped) {
          const float tanh = fmaxf(score / form.cap, -1);  // of an invisible score, minus infinity, the weight is zero
          gradient *= 1 - tanh * tanh;
        }
        score = weight;
      }
}

// In place: scores -> weights, gradients of weights -> gradients of products over `scale`. `at(r, c, e)` gives, of the
// query of that entry, the log-sum-exp in units of log 2 and delta = rowsum(dO O).
template <int RowTiles, int Columns, class At>
__device__ __forceinline__ void weigh_gradients(Accumulator<RowTiles, Columns>& scores,
                                                Accumulator<RowTiles, Columns>& gradients, const Scores& form, At at) {
  if (form.cap > 0) {
    weigh<true>(scores, gradients, form, at);
  } else {
    weigh<false>(scores, gradients, form, at);
  }
}

}  // namespace seq1f1b::cuda
