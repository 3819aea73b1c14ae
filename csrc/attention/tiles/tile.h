// The inner loops of paged attention: scores, softmax and weighted sums of one tile of keys for a few rows at a time.
//
// A number depends on its own row and key alone, never on how many rows or vectors are computed beside it.
#pragma once

#include <utility>

#include "attention/plan.h"
#include "attention/tiles/int8_lanes.h"
#include "isa/rows.h"
#include "isa/simd.h"
#include "isa/x86/amx.h"
#if defined(QUIRE_ARM_I8MM)
#include "attention/tiles/arm_keys.h"
#endif

namespace quire::QUIRE_ISA {

constexpr float kInfinity = __builtin_inff();
constexpr float kTiny = 1e-30f;  // what is no larger is taken for zero, so that its inverse is finite

#if defined(QUIRE_SIMD_AVX512) || defined(QUIRE_ARM)
constexpr bool kHas32Registers = true;
#else
constexpr bool kHas32Registers = false;
#endif
// Whether twelve of 16 registers hold accumulators. Of eight two multiply-adds a cycle wait for one as soon as anything
// delays it; vectors of an int8 cache become two each, which leaves room for eight.
#if defined(QUIRE_SIMD_AVX2)
template <typename C>
constexpr bool kHoldsTwelve = sizeof(C) > 1;
#else
template <typename C>
constexpr bool kHoldsTwelve = false;
#endif

// Rows of a block, and vectors of keys or head dimensions: as many accumulators as the registers hold. Up to
// kMostAttentionRows rows are one block; more are blocks of at most kAttentionRows.
template <typename C>
constexpr int kAttentionRows = W == 16 || kHoldsTwelve<C> ? 6 : 4;
template <typename C>
constexpr int kMostAttentionRows = W == 16 ? 8 : kAttentionRows<C>;
template <typename C, int R>
constexpr int kScoreVectors = (kHas32Registers && R <= 6) || (kHoldsTwelve<C> && R <= 2) ? 4
                              : kHoldsTwelve<C> && R == 3                                ? 3
                                                                                         : 2;
template <typename C, int R>
constexpr int kValueVectors = kHoldsTwelve<C> && R == 4 ? 3 : kScoreVectors<C, R>;

// Into the second-level cache: the few lines that the first level can wait for would hold up the loads of this tile.
QUIRE_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }
QUIRE_INLINE void prefetch_nearest(const void* p) { __builtin_prefetch(p, 0, 3); }

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
struct PlainKeyLane : Lane<C> {
  using Query = C;
  using Sum = f32;
  static constexpr int64_t kPack = 4 / sizeof(C), kScaleLanes = 0;
  QUIRE_INLINE f32 score(f32 sum, f32 scale, const float*) { return sum * scale; }
};
template <typename C>
struct KeyLane : PlainKeyLane<C> {};

#if defined(QUIRE_ARM_I8MM)
template <>
struct KeyLane<int8_t> : ByteKeys {};
#else
// Queries are int16, fours of them in the order of the key's byte pairs.
template <>
struct KeyLane<int8_t> {
  using Query = int16_t;
  using Vector = BytePairs;
  using Sum = i32;
  static constexpr int64_t kPack = 4, kScaleLanes = 2;
  QUIRE_INLINE void store_query(int16_t* query, int64_t i, int32_t value) {
    query[i / 4 * 4 + i % 4 / 2 + i % 2 * 2] = int16_t(value);
  }
  QUIRE_INLINE Vector load(const int8_t* p) { return load_byte_pairs(p); }
  QUIRE_INLINE Vector broadcast(const int16_t* p) { return {set1_lane(p), set1_lane(p + 2)}; }
  QUIRE_INLINE i32 dot(i32 acc, const Vector& a, const Vector& b) {
    return add_pairs(add_pairs(acc, a.even, b.even), a.odd, b.odd);
  }
  QUIRE_INLINE f32 score(i32 sum, f32 scale, const float* key_scales) {
    return __builtin_convertvector(sum, f32) * (scale * quire::QUIRE_ISA::load(key_scales));
  }
};
#endif

// Of a W x W square of lanes, those of rows i and i + kDistance are exchanged where the other's diagonal says so: done
// for every power of two below W, rows become columns.
template <int kDistance, size_t... kLanes>
QUIRE_INLINE void exchange_lanes(i32& a, i32& b, std::index_sequence<kLanes...>) {
  const i32 upper = __builtin_shufflevector(a, b, ((kLanes & kDistance) ? W + kLanes - kDistance : kLanes)...);
  b = __builtin_shufflevector(a, b, ((kLanes & kDistance) ? W + kLanes : kLanes + kDistance)...);
  a = upper;
}

template <int kDistance = W / 2>
QUIRE_INLINE void transpose(i32 (&rows)[W]) {
  QUIRE_UNROLL
  for (int i = 0; i < W; ++i) {
    if ((i & kDistance) == 0) {
      exchange_lanes<kDistance>(rows[i], rows[i | kDistance], std::make_index_sequence<W>());
    }
  }
  if constexpr (kDistance > 1) transpose<kDistance / 2>(rows);
}

// The lanes of W rows, each `count` lanes in one piece -> out[lane][row], lanes `stride` apart.
template <typename C>
static inline void lanes_of_rows(const C* const* rows, int64_t count, int64_t stride, C* out) {
  constexpr int64_t kPack = KeyLane<C>::kPack;
  int64_t lane = 0;
  for (; lane + W <= count; lane += W) {
    i32 square[W];
    QUIRE_UNROLL
    for (int i = 0; i < W; ++i) square[i] = load_lanes(rows[i] + lane * kPack);
    transpose(square);
    QUIRE_UNROLL
    for (int i = 0; i < W; ++i) store_lanes(out + (lane + i) * stride * kPack, square[i]);
  }
  for (; lane < count; ++lane) {
    for (int i = 0; i < W; ++i) std::memcpy(out + (lane * stride + i) * kPack, rows[i] + lane * kPack, 4);
  }
}

// What the loops of products do beside them, in a turn (fetch) and at the end of the i-th: here nothing.
struct NoAhead {
  template <int kBytes>
  QUIRE_MEMBER void fetch() {}
  QUIRE_MEMBER void end_turn(int64_t) {}
};

// e^v becomes 2^(v log2 e): the scale of scores takes the factor.
constexpr float kLog2E = 1.44269504f;

// Calls call.operator()<rows>() for the number of rows, at most R.
template <int R, typename Call>
static inline void with_rows(int64_t rows, const Call& call) {
  if (rows == R) {
    call.template operator()<R>();
  } else if constexpr (R > 1) {
    with_rows<R - 1>(rows, call);
  }
}

// acc[r][v] += key v * query r, of one lane. As many lines as are read are fetched ahead.
template <typename C, int R, int V, typename Ahead>
QUIRE_INLINE void add_lane(typename KeyLane<C>::Sum (&acc)[R][V], const C* const (&keys)[V], int64_t offset,
                           const RowAddresses<R>& queries, Ahead& ahead) {
#if defined(QUIRE_SIMD_AVX2)
  if constexpr (sizeof(C) == sizeof(bf16)) {
    ahead.template fetch<V * W * 4>();
    return add_pairs_apart(acc, keys, offset * int64_t(sizeof(C)), queries);
  }
#endif
  using Lane = KeyLane<C>;
  typename Lane::Vector key[V];
  QUIRE_UNROLL
  for (int v = 0; v < V; ++v) key[v] = Lane::load(keys[v] + offset);
  ahead.template fetch<V * W * 4>();
  QUIRE_UNROLL
  for (int r = 0; r < R; ++r) {
    const auto query = Lane::broadcast(reinterpret_cast<const typename Lane::Query*>(queries[r]));
    QUIRE_UNROLL
    for (int v = 0; v < V; ++v) acc[r][v] = Lane::dot(acc[r][v], key[v], query);
  }
}

// scores[r][key] = scales[r] * (queries[r] . key) for R rows, head_dim apart, and the V vectors of keys from `vector`
// on. As many lines as are read are fetched ahead meanwhile. Not inlined, as add_values below: what is around them
// would decide how the compiler uses registers in their loops.
template <int V, typename C, int R, typename Ahead>
__attribute__((noinline)) static void score_keys(const KeyTile<C>& tile, Ahead& ahead, int64_t vector, int64_t head_dim,
                                                 const typename KeyLane<C>::Query* queries, const float* scales,
                                                 float* scores) {
  using Lane = KeyLane<C>;
  typename Lane::Sum acc[R][V];
  QUIRE_UNROLL
  for (int r = 0; r < R; ++r) {
    QUIRE_UNROLL
    for (int v = 0; v < V; ++v) acc[r][v] = typename Lane::Sum{};
  }
  const int64_t lanes = head_dim / Lane::kPack, lane_stride = tile.lane_stride;
  const C* keys[V];
  QUIRE_UNROLL
  for (int v = 0; v < V; ++v) keys[v] = tile.vectors[vector + v];
  RowAddresses<R> rows(reinterpret_cast<const char*>(queries), head_dim * int64_t(sizeof(*queries)));
  for (int64_t i = 0; i < lanes; ++i) {
    add_lane<C>(acc, keys, i * lane_stride, rows, ahead);
    rows += Lane::kPack * int64_t(sizeof(*queries));
    ahead.end_turn(i);
  }
  for (int64_t i = 0; i < Lane::kScaleLanes; ++i) ahead.template fetch<V * W * 4>();
  QUIRE_UNROLL
  for (int r = 0; r < R; ++r) {
    QUIRE_UNROLL
    for (int v = 0; v < V; ++v) {
      const auto* key_scales = reinterpret_cast<const float*>(tile.vectors[vector + v] + lanes * tile.lane_stride);
      store(scores + r * kTileKeys + (vector + v) * W, Lane::score(acc[r][v], set1(scales[r]), key_scales));
    }
  }
}

// The same of all vectors that hold keys [first, last): one at a time where less than half of V are left.
template <typename C, int R, typename Ahead>
static inline void score_range(const KeyTile<C>& tile, Ahead& ahead, int64_t first, int64_t last, int64_t head_dim,
                               const typename KeyLane<C>::Query* queries, const float* scales, float* scores) {
  constexpr int V = kScoreVectors<C, R>;
  static_assert(KeyTile<C>::kVectors % V <= V / 2);
  int64_t v = first / W / V * V;
  for (; (v + V / 2) * W < last; v += V) score_keys<V, C, R>(tile, ahead, v, head_dim, queries, scales, scores);
  for (; v * W < last; ++v) score_keys<1, C, R>(tile, ahead, v, head_dim, queries, scales, scores);
}

// Four-byte lanes in which values are multiplied, each a dimension of kKeys keys, and probabilities to match: a float
// of one key, or a pair of int16 of two. `make` makes kVectors of them, `n` dimensions and zeros.
template <typename C>
struct ValueLane {
  using Prob = float;
  using Vector = f32;
  using Sum = f32;
  static constexpr int64_t kKeys = 1, kVectors = 1;
  QUIRE_INLINE void make(const C* const* values, int64_t dim, int64_t n, Vector* out) {
    out[0] = load_some(values[0] + dim, n);
  }
  QUIRE_INLINE void store(float* p, Vector v) { quire::QUIRE_ISA::store(p, v); }
  QUIRE_INLINE Vector load(const float* p) { return quire::QUIRE_ISA::load(p); }
  QUIRE_INLINE Vector broadcast(const float* p) { return set1(*p); }
  QUIRE_INLINE f32 begin(f32 before) { return before; }
  QUIRE_INLINE f32 dot(f32 acc, Vector value, Vector prob) { return fma(prob, value, acc); }
  QUIRE_INLINE f32 end(f32 acc, f32, f32) { return acc; }
};

// What lanes of two keys have in common.
struct ValuePairs {
  using Vector = i32;
  static constexpr int64_t kKeys = 2, kVectors = 2;
  QUIRE_INLINE void store(float* p, Vector v) { quire::QUIRE_ISA::store(p, as_float(v)); }
  QUIRE_INLINE Vector load(const float* p) { return load_lanes(p); }
  QUIRE_INLINE Vector broadcast(const float* p) { return set1_lane(p); }
};

#if defined(QUIRE_MULTIPLIES_PAIRS)
// A pair of bf16: probabilities are rounded to it too, as in FlashAttention (Dao et al. 2022), which halves the work.
template <>
struct ValueLane<bf16> : ValuePairs {
  using Prob = bf16;
  using Sum = f32;
  QUIRE_INLINE void make(const bf16* const* values, int64_t dim, int64_t n, Vector* out) {
    pair_rows(values[0] + dim, values[1] + dim, n, out[0], out[1]);
  }
  QUIRE_INLINE f32 begin(f32 before) { return before; }
  QUIRE_INLINE f32 dot(f32 acc, Vector value, Vector prob) { return dot2(acc, value, prob); }
  QUIRE_INLINE f32 end(f32 acc, f32, f32) { return acc; }
};
#endif

template <>
struct ValueLane<int8_t> : ValuePairs {
  using Prob = float;  // and then int16
  using Sum = i32;
  QUIRE_INLINE void make(const int8_t* const* values, int64_t dim, int64_t n, Vector* out) {
    pair_rows(values[0] + dim, values[1] + dim, n, out[0], out[1]);
    in_order(out[0], out[1]);
  }
  QUIRE_INLINE i32 begin(f32) { return i32{}; }
  QUIRE_INLINE i32 dot(i32 acc, Vector value, Vector prob) { return add_pairs(acc, value, prob); }
  QUIRE_INLINE f32 end(i32 acc, f32 before, f32 step) { return fma(__builtin_convertvector(acc, f32), step, before); }
};

// staged[i][d], rows `stride` apart: lane i of the values' dimensions [begin, end), for keys [first, last); what pads
// them becomes 0. As many lines as are read are fetched ahead meanwhile, if `ahead` is not null.
template <typename C, typename Ahead>
static inline void stage_values(const KeyTile<C>& tile, Ahead* ahead, int64_t first, int64_t last, int64_t begin,
                                int64_t end, int64_t stride, float* staged) {
  using Lane = ValueLane<C>;
  constexpr int64_t kDims = Lane::kVectors * W;
  for (int64_t i = first / Lane::kKeys; i * Lane::kKeys < last; ++i) {
    const auto stage = [&](int64_t dim, int64_t n) {
      typename Lane::Vector value[Lane::kVectors];
      Lane::make(tile.values + i * Lane::kKeys, dim, n, value);
      if (ahead != nullptr) ahead->template fetch<kDims * Lane::kKeys* int(sizeof(C))>();
      for (int64_t v = 0; v < Lane::kVectors; ++v) Lane::store(staged + i * stride + dim - begin + v * W, value[v]);
    };
    int64_t dim = begin;
    for (; dim + kDims <= end; dim += kDims) stage(dim, kDims);
    if (dim < end) stage(dim, end - dim);
  }
}

// Scores of vectors [vector, end) of a row become -inf but for keys [first, last).
QUIRE_INLINE void mask_scores(float* scores, int64_t vector, int64_t end, int64_t first, int64_t last) {
  const i32 lanes = lane_indices();
  for (int64_t v = vector; v < end; ++v) {
    const i32 key = lanes + int32_t(v * W);
    const i32 is_visible = (key >= int32_t(first)) & (key < int32_t(last));
    store(scores + v * W, select(is_visible, load(scores + v * W), set1(-kInfinity)));
  }
}

// Scores of vectors [vector, end) of a row become cap * tanh(score / cap).
QUIRE_INLINE void cap_scores(float* scores, int64_t vector, int64_t end, float cap) {
  const f32 most = set1(cap), inverse = set1(1.0f / cap);
  for (int64_t v = vector; v < end; ++v) store(scores + v * W, most * tanh(load(scores + v * W) * inverse));
}

// -slope * |key + distance| is added to the scores of vectors [vector, end) of a row, key being its index in the tile.
QUIRE_INLINE void add_slope(float* scores, int64_t vector, int64_t end, float slope, int64_t distance) {
  const i32 first = lane_indices() + int32_t(distance);
  for (int64_t v = vector; v < end; ++v) {
    const f32 keys = __builtin_convertvector(first + int32_t(v * W), f32);
    store(scores + v * W, fma(-abs(keys), set1(slope), load(scores + v * W)));
  }
}

// Turn vectors [vector, end) of rows of probabilities, times the scales of their keys' values, into int16 multiples
// of steps[r].
static inline void quantize_probs(const KeyTile<int8_t>& tile, int64_t head_dim, int64_t rows, float* scores,
                                  int64_t vector, int64_t end, float* steps) {
  constexpr float kLevels = 32767.0f;
  const int64_t offset = (head_dim / KeyLane<int8_t>::kPack + 1) * tile.lane_stride;
  for (int64_t r = 0; r < rows; ++r) {
    f32 weights[kTileKeys / W], largest = set1(0.0f);
    for (int64_t v = vector; v < end; ++v) {
      const f32 prob = load(scores + r * kTileKeys + v * W);
      const f32 scale = load(reinterpret_cast<const float*>(tile.vectors[v] + offset));
      weights[v] = select(prob > 0.0f, prob * scale, set1(0.0f));  // a slot never written may hold any scale
      largest = max(largest, weights[v]);
    }
    const float most = reduce_max(largest);
    const f32 inverse = set1(most > kTiny ? kLevels / most : 0.0f);
    steps[r] = most / kLevels;
    auto* levels = reinterpret_cast<int16_t*>(scores + r * kTileKeys);
    for (int64_t v = vector; v < end; ++v) {
      store(levels + v * W, __builtin_convertvector(weights[v] * inverse + set1(0.5f), i32));
    }
  }
}

// out[r] = out[r] * decay[r] + steps[r] * sum of probs[r] * values over the lanes of keys [first, last) in order, for V
// vectors of dimensions from `dim` on of R rows. `staged` begins with dimension `dim`; without staged values these must
// be whole vectors of the tile's. As many lines as are read are fetched ahead meanwhile.
template <int V, typename C, int R, bool kStaged, typename Ahead>
__attribute__((noinline)) static void add_values(const float* staged, const KeyTile<C>& tile, Ahead& ahead, int64_t dim,
                                                 int64_t first, int64_t last, const float* probs, const float* decay,
                                                 const float* steps, float* out, int64_t row_stride) {
  using Lane = ValueLane<C>;
  typename Lane::Sum acc[R][V];
  QUIRE_UNROLL
  for (int r = 0; r < R; ++r) {
    QUIRE_UNROLL
    for (int v = 0; v < V; ++v) acc[r][v] = Lane::begin(load(out + r * row_stride + dim + v * W) * set1(decay[r]));
  }
  for (int64_t i = first / Lane::kKeys; i * Lane::kKeys < last; ++i) {
    typename Lane::Vector value[V];
    if constexpr (kStaged) {
      QUIRE_UNROLL
      for (int v = 0; v < V; ++v) value[v] = Lane::load(staged + i * row_stride + v * W);
    } else {
      QUIRE_UNROLL
      for (int v = 0; v < V; v += Lane::kVectors) {
        Lane::make(tile.values + i * Lane::kKeys, dim + v * W, Lane::kVectors * W, value + v);
      }
    }
    ahead.template fetch<V * W * Lane::kKeys* int(sizeof(C))>();
    QUIRE_UNROLL
    for (int r = 0; r < R; ++r) {
      const auto prob = Lane::broadcast(probs + r * kTileKeys + i);
      QUIRE_UNROLL
      for (int v = 0; v < V; ++v) acc[r][v] = Lane::dot(acc[r][v], value[v], prob);
    }
    ahead.end_turn(i);
  }
  QUIRE_UNROLL
  for (int r = 0; r < R; ++r) {
    QUIRE_UNROLL
    for (int v = 0; v < V; ++v) {
      float* to = out + r * row_stride + dim + v * W;
      store(to, Lane::end(acc[r][v], load(to) * set1(decay[r]), set1(steps[r])));
    }
  }
}

}  // namespace quire::QUIRE_ISA
