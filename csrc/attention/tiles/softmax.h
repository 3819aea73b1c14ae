// The softmax of scores: by itself, and beside the products of other rows, in their loops. It needs ports that products
// leave idle, so that beside these its additions, maxima and roundings cost next to nothing.
#pragma once

#include "attention/tiles/exp2.h"
#include "attention/tiles/tile.h"
#include "isa/rows.h"

namespace quire::QUIRE_ISA {

// The largest of vectors [vector, end) of a row of scores.
QUIRE_INLINE float largest_score(const float* scores, int64_t vector, int64_t end) {
  f32 largest = load(scores + vector * W);
  for (int64_t v = vector + 1; v < end; ++v) largest = max(largest, load(scores + v * W));
  return reduce_max(largest);
}

// With the maxima of rows over the keys so far, and over a tile in `references`: the new maxima, what scores of the
// tile are relative to, and what sums so far shrink by. The sums of a row that has seen no key, only -inf, shrink by 1.
static inline void update_maxima(int64_t rows, float* maxima, float* references, float* decay) {
  for_parts(rows, [&](int64_t r, int64_t n) {
    const f32 before = load_some(maxima + r, n), now = max(before, load_some(references + r, n));
    const f32 none = set1(0.0f);
    store_some(maxima + r, now, n);
    store_some(references + r, select(now > set1(-kInfinity), now, none), n);
    store_some(decay + r, exp2_negative(select(now > before, before - now, none)), n);
  });
}

// Turn vectors [vector, end) of a row of scores, times `factor` (1 but on tiles), into probabilities relative to
// `reference`, in place but as narrow as Prob; sums = sums * decay + all of them. On tiles, two lines for each vector
// are fetched ahead meanwhile, if `ahead` is not null and takes keys and values in turns.
template <typename Prob, typename Ahead>
QUIRE_INLINE void softmax_row(Ahead* ahead, float* scores, int64_t vector, int64_t end, float factor, float reference,
                              float decay, float* sums) {
  f32 sum = load(sums) * set1(decay);
  for (int64_t v = vector; v < end; ++v) {
    f32 score = load(scores + v * W);
    if constexpr (kAmx) {
      score = score * set1(factor);
      if (ahead != nullptr && ahead->pairs()) ahead->template fetch<128>();
    }
    const f32 prob = exp2_for<Prob>(score - set1(reference));
    store(reinterpret_cast<Prob*>(scores) + v * W, prob);
    sum = sum + prob;
  }
  store(sums, sum);
}

// Finds the largest of vectors [vector, end) of `rows` rows of scores, a row in one of eight turns.
struct MaximaBeside {
  const float* scores;
  float* largest;
  int64_t vector, end, rows;

  template <int kBytes>
  QUIRE_MEMBER void fetch() {}
  QUIRE_MEMBER void end_turn(int64_t i) {
    if (i % 8 == 7 && rows > 0) take_row();
  }
  QUIRE_MEMBER void finish() {
    while (rows > 0) take_row();
  }

 private:
  QUIRE_MEMBER void take_row() {
    *largest = largest_score(scores, vector, end);
    scores += kTileKeys;
    ++largest;
    --rows;
  }
};

// As softmax_row, of vectors [begin, end) of `rows` rows whose sums have shrunk already, two vectors in every second
// turn: with one, each would wait for the sums that the one before has written.
template <typename Prob>
struct SoftmaxBeside {
  float* scores;
  const float* reference;
  float* sums;
  int64_t sums_stride, begin, end, rows, vector;

  template <int kBytes>
  QUIRE_MEMBER void fetch() {}
  QUIRE_MEMBER void end_turn(int64_t i) {
    if (i % 2 == 1 && rows > 0) take_vectors();
  }
  QUIRE_MEMBER void finish() {
    while (rows > 0) take_vectors();
  }

 private:
  QUIRE_MEMBER f32 take(int64_t v) {
    const f32 prob = exp2_for<Prob>(load(scores + v * W) - set1(*reference));
    store(reinterpret_cast<Prob*>(scores) + v * W, prob);
    return prob;
  }
  QUIRE_MEMBER void take_vectors() {
    f32 sum = load(sums) + take(vector);
    if (vector + 1 < end) sum = sum + take(vector + 1);
    store(sums, sum);
    vector += 2;
    if (vector < end) return;
    vector = begin;
    --rows;
    scores += kTileKeys;
    ++reference;
    sums += sums_stride;
  }
};

}  // namespace quire::QUIRE_ISA
