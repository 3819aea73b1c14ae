// The inner loops of paged attention: scores, softmax and weighted sums of one tile of keys for a few rows at a time.
//
// A number depends on its own row and key alone, never on how many rows or vectors are computed beside it.
#pragma once

#include "attention_plan.h"
#include "int8_lanes.h"
#include "simd.h"

namespace quire::QUIRE_ISA {

constexpr float kInfinity = __builtin_inff();
constexpr float kTiny = 1e-30f;  // what is no larger is taken for zero, so that its inverse is finite

// Rows at once, and vectors (of keys, then of head dimensions) at once: as many accumulators as the registers hold. A
// few more rows than suit many blocks of rows are better taken in one than in two.
#if defined(QUIRE_SIMD_AVX512)
constexpr int kAttentionRows = 6, kMostAttentionRows = 8;
#else
constexpr int kAttentionRows = 4, kMostAttentionRows = 4;
#endif
template <int R>
constexpr int kAttentionVectors = W == 16 && R <= 6 ? 4 : 2;

// Into the second-level cache: the few lines that the first level can wait for would hold up the loads of this tile.
QUIRE_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// Where the keys and values of one tile lie. Entries for keys that no row sees repeat another key's.
template <typename C>
struct KeyTile {
  static constexpr int64_t kVectors = kTileKeys / W;
  int64_t start;               // position of the first key
  const C* vectors[kVectors];  // W keys each, their first lane
  int64_t lane_stride;         // elements from one lane of a key to its next
  const C* values[kTileKeys];
};

// The four-byte lane of the key layout: one float, a pair of bf16, or four int8, where keys have two more lanes.
template <typename C>
struct KeyLane;

template <>
struct KeyLane<float> {
  using Query = float;
  using Vector = f32;
  using Sum = f32;
  static constexpr int64_t kPack = 1, kScaleLanes = 0;
  QUIRE_INLINE Vector load(const float* p) { return quire::QUIRE_ISA::load(p); }
  QUIRE_INLINE Vector broadcast(const float* p) { return set1(*p); }
  QUIRE_INLINE f32 dot(f32 acc, Vector a, Vector b) { return fma(a, b, acc); }
  QUIRE_INLINE f32 score(f32 sum, f32 scale, const float*) { return sum * scale; }
};

template <>
struct KeyLane<bf16> {
  using Query = bf16;
  using Vector = pairs;
  using Sum = f32;
  static constexpr int64_t kPack = 2, kScaleLanes = 0;
  QUIRE_INLINE Vector load(const bf16* p) { return load_pairs(p); }
  QUIRE_INLINE Vector broadcast(const bf16* p) { return set1_pair(p); }
  QUIRE_INLINE f32 dot(f32 acc, Vector a, Vector b) { return dot2(acc, a, b); }
  QUIRE_INLINE f32 score(f32 sum, f32 scale, const float*) { return sum * scale; }
};

// Queries are int16, fours of them in the order of the key's byte pairs.
template <>
struct KeyLane<int8_t> {
  using Query = int16_t;
  using Vector = BytePairs;
  using Sum = i32;
  static constexpr int64_t kPack = 4, kScaleLanes = 2;
  QUIRE_INLINE Vector load(const int8_t* p) { return load_byte_pairs(p); }
  QUIRE_INLINE Vector broadcast(const int16_t* p) { return {set1_int16_pair(p), set1_int16_pair(p + 2)}; }
  QUIRE_INLINE i32 dot(i32 acc, const Vector& a, const Vector& b) {
    return add_pairs(add_pairs(acc, a.even, b.even), a.odd, b.odd);
  }
  QUIRE_INLINE f32 score(i32 sum, f32 scale, const float* key_scales) {
    return __builtin_convertvector(sum, f32) * (scale * quire::QUIRE_ISA::load(key_scales));
  }
};

// scores[r][key] = scales[r] * (queries[r] . key) for R rows and the V vectors of keys from `vector` on. Meanwhile the
// same vectors of the tile `next` (may be null) are fetched.
template <int V, typename C, int R>
static inline void score_keys(const KeyTile<C>& tile, const KeyTile<C>* next, int64_t vector, int64_t head_dim,
                              const void* const* queries, const float* scales, float* scores) {
  using Lane = KeyLane<C>;
  typename Lane::Sum acc[R][V];
  QUIRE_UNROLL
  for (int r = 0; r < R; ++r) {
    QUIRE_UNROLL
    for (int v = 0; v < V; ++v) acc[r][v] = typename Lane::Sum{};
  }
  const int64_t lanes = head_dim / Lane::kPack;
  for (int64_t i = 0; i < lanes; ++i) {
    typename Lane::Vector key[V];
    QUIRE_UNROLL
    for (int v = 0; v < V; ++v) key[v] = Lane::load(tile.vectors[vector + v] + i * tile.lane_stride);
    if (next) {
      QUIRE_UNROLL
      for (int v = 0; v < V; ++v) prefetch(next->vectors[vector + v] + i * next->lane_stride);
    }
    QUIRE_UNROLL
    for (int r = 0; r < R; ++r) {
      const auto query = Lane::broadcast(static_cast<const typename Lane::Query*>(queries[r]) + i * Lane::kPack);
      QUIRE_UNROLL
      for (int v = 0; v < V; ++v) acc[r][v] = Lane::dot(acc[r][v], key[v], query);
    }
  }
  for (int64_t i = lanes; next && i < lanes + Lane::kScaleLanes; ++i) {
    for (int v = 0; v < V; ++v) prefetch(next->vectors[vector + v] + i * next->lane_stride);
  }
  QUIRE_UNROLL
  for (int r = 0; r < R; ++r) {
    QUIRE_UNROLL
    for (int v = 0; v < V; ++v) {
      const auto* key_scales = reinterpret_cast<const float*>(tile.vectors[vector + v] + lanes * tile.lane_stride);
      store(scores + r * kTileKeys + (vector + v) * W, Lane::score(acc[r][v], set1(scales[r]), key_scales));
    }
  }
}

// Turn R rows of scores into probabilities relative to each row's new maximum; decay[r] is what the row's sums so far
// shrink by. A row that sees no key of the tile has only -inf: its probabilities are 0, its decay is 1.
template <int R>
static inline void softmax_rows(float* scores, float* const* maxima, float* const* sums, float* decay) {
  constexpr int kVectors = kTileKeys / W;
  alignas(64) float new_max[kMaxBlockRows], change[kMaxBlockRows] = {}, shrink[kMaxBlockRows];
  for (int r = 0; r < R; ++r) {
    f32 largest = load(scores + r * kTileKeys);
    QUIRE_UNROLL
    for (int v = 1; v < kVectors; ++v) largest = max(largest, load(scores + r * kTileKeys + v * W));
    const float tile_max = reduce_max(largest), old_max = *maxima[r];
    new_max[r] = tile_max > old_max ? tile_max : old_max;
    change[r] = old_max == new_max[r] ? 0.0f : old_max - new_max[r];
  }
  for (int r = 0; r < kMaxBlockRows; r += W) store(shrink + r, exp_negative(load(change + r)));
  for (int r = 0; r < R; ++r) {
    const f32 reference = set1(new_max[r] == -kInfinity ? 0.0f : new_max[r]);
    f32 sum = set1(0.0f);
    QUIRE_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      float* score = scores + r * kTileKeys + v * W;
      const f32 prob = exp_negative(load(score) - reference);
      store(score, prob);
      sum = sum + prob;
    }
    *sums[r] = *sums[r] * shrink[r] + reduce_add(sum);
    *maxima[r] = new_max[r];
    decay[r] = shrink[r];
  }
}

// out[r][0:N * W] = out[r] * decay[r] + sum of probs[r][key] * value[key][dim:dim + N * W], key from first to last in
// order. `out` points at dimension `dim` of its first row. Meanwhile the same values of the tile `next` are fetched.
template <int N, typename C, int R>
static inline void add_values(const KeyTile<C>& tile, const KeyTile<C>* next, int64_t dim, int64_t first, int64_t last,
                              const float* probs, const float* decay, float* out, int64_t row_stride) {
  f32 acc[R][N];
  QUIRE_UNROLL
  for (int r = 0; r < R; ++r) {
    QUIRE_UNROLL
    for (int v = 0; v < N; ++v) acc[r][v] = load(out + r * row_stride + v * W) * set1(decay[r]);
  }
  for (int64_t key = first; key < last; ++key) {
    f32 value[N];
    QUIRE_UNROLL
    for (int v = 0; v < N; ++v) value[v] = load(tile.values[key] + dim + v * W);
    if (next) {
      constexpr int64_t kLine = 64 / sizeof(C);
      QUIRE_UNROLL
      for (int64_t i = 0; i < N * W; i += kLine) prefetch(next->values[key] + dim + i);
    }
    QUIRE_UNROLL
    for (int r = 0; r < R; ++r) {
      const f32 prob = set1(probs[r * kTileKeys + key]);
      QUIRE_UNROLL
      for (int v = 0; v < N; ++v) acc[r][v] = fma(prob, value[v], acc[r][v]);
    }
  }
  QUIRE_UNROLL
  for (int r = 0; r < R; ++r) {
    QUIRE_UNROLL
    for (int v = 0; v < N; ++v) store(out + r * row_stride + v * W, acc[r][v]);
  }
}

// The same for the last head_dim % W dimensions; the rest of the vector stays zero.
template <typename C, int R>
static inline void add_values_tail(const KeyTile<C>& tile, int64_t dim, int64_t count, int64_t first, int64_t last,
                                   const float* probs, const float* decay, float* out, int64_t row_stride) {
  f32 acc[R];
  QUIRE_UNROLL
  for (int r = 0; r < R; ++r) acc[r] = load(out + r * row_stride) * set1(decay[r]);
  for (int64_t key = first; key < last; ++key) {
    const f32 value = load_n(tile.values[key] + dim, count);
    QUIRE_UNROLL
    for (int r = 0; r < R; ++r) acc[r] = fma(set1(probs[r * kTileKeys + key]), value, acc[r]);
  }
  QUIRE_UNROLL
  for (int r = 0; r < R; ++r) store(out + r * row_stride, acc[r]);
}

// Turn R rows of probabilities, times the scales of their keys' values, into int16 multiples of steps[r].
template <int R>
static inline void quantize_probs(const KeyTile<int8_t>& tile, int64_t head_dim, float* scores, float* steps) {
  constexpr int kVectors = kTileKeys / W;
  constexpr float kLevels = 32767.0f;
  const int64_t offset = (head_dim / KeyLane<int8_t>::kPack + 1) * tile.lane_stride;
  for (int r = 0; r < R; ++r) {
    f32 weights[kVectors], largest = set1(0.0f);
    QUIRE_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const f32 prob = load(scores + r * kTileKeys + v * W);
      const f32 scale = load(reinterpret_cast<const float*>(tile.vectors[v] + offset));
      weights[v] = select(prob > 0.0f, prob * scale, set1(0.0f));  // a slot never written may hold any scale
      largest = max(largest, weights[v]);
    }
    const float most = reduce_max(largest);
    const f32 inverse = set1(most > kTiny ? kLevels / most : 0.0f);
    steps[r] = most / kLevels;
    auto* levels = reinterpret_cast<int16_t*>(scores + r * kTileKeys);
    QUIRE_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      store(levels + v * W, __builtin_convertvector(weights[v] * inverse + set1(0.5f), i32));
    }
  }
}

// As add_values after quantize_probs, for `count` <= 2 W dimensions from `dim` on.
template <int R>
static inline void add_int8_values(const KeyTile<int8_t>& tile, const KeyTile<int8_t>* next, int64_t dim, int64_t count,
                                   int64_t first, int64_t last, const float* probs, const float* steps,
                                   const float* decay, float* out, int64_t row_stride) {
  i32 acc[R][2];
  QUIRE_UNROLL
  for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = i32{};
  for (int64_t key = first / 2 * 2; key < last; key += 2) {
    i32 low, high;
    pair_rows(tile.values[key] + dim, tile.values[key + 1] + dim, count, low, high);
    if (next) {
      prefetch(next->values[key] + dim);
      prefetch(next->values[key + 1] + dim);
    }
    QUIRE_UNROLL
    for (int r = 0; r < R; ++r) {
      const i32 prob = set1_int16_pair(reinterpret_cast<const int16_t*>(probs + r * kTileKeys) + key);
      acc[r][0] = add_pairs(acc[r][0], low, prob);
      acc[r][1] = add_pairs(acc[r][1], high, prob);
    }
  }
  QUIRE_UNROLL
  for (int r = 0; r < R; ++r) {
    in_order(acc[r][0], acc[r][1]);
    for (int v = 0; v < 2 && v * W < count; ++v) {
      float* to = out + r * row_stride + v * W;
      store(to, fma(__builtin_convertvector(acc[r][v], f32), set1(steps[r]), load(to) * set1(decay[r])));
    }
  }
}

}  // namespace quire::QUIRE_ISA
