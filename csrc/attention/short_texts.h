// Attention of a float32 text without a cache that has no more tokens than a vector has lanes: all keys of a head lie
// in one vector for each dimension, and what belongs to a row stays in registers. Numbers are computed in the order of
// attention/attention.h, and have the same bits.
#pragma once

#include "attention/look_ahead.h"
#include "attention/plan.h"
#include "attention/tiles/amx.h"
#include "attention/tiles/tile.h"
#include "isa/rows.h"

namespace quire::QUIRE_ISA {

constexpr int64_t kMostShortDim = 128;
// Tokens at once.
constexpr int kShortRows = kHas32Registers ? 10 : 5;

// Of R tokens from `token` on and one head. keys: [head_dim, W].
template <int R>
static inline void attend_short(const AttentionArgs& a, int64_t seq, int64_t token, int64_t head, const float* keys,
                                const float* const* values) {
  const float* query = static_cast<const float*>(a.query) + token * a.query_stride + head * a.head_dim;
  f32 scores[R] = {};
  for (int64_t i = 0; i < a.head_dim; ++i) {
    const f32 key = load(keys + i * W);
    QUIRE_UNROLL
    for (int r = 0; r < R; ++r) scores[r] = fma(key, set1(query[r * a.query_stride + i]), scores[r]);
  }
  alignas(64) float probs[R][W];
  f32 inverse[R];
  const i32 lanes = lane_indices();
  QUIRE_UNROLL
  for (int r = 0; r < R; ++r) {
    const int64_t position = context_of(a, seq) + token + r;
    const i32 is_seen = (lanes >= int32_t(a.first_key(position))) & (lanes < int32_t(a.end_key(seq, position)));
    const f32 seen = select(is_seen, scores[r] * set1(a.scale * kLog2E), set1(-kInfinity));
    const f32 prob = exp2_for<float>(seen - set1(reduce_max(seen)));
    store(probs[r], prob);
    inverse[r] = set1(1.0f / reduce_add(prob));
  }
  float* out = static_cast<float*>(a.out) + (token * a.num_heads + head) * a.head_dim;
  for (int64_t dim = 0; dim < a.head_dim; dim += W) {
    f32 sums[R] = {};
    for (int64_t key = 0; key < a.seq_lens[seq]; ++key) {
      const f32 value = load(values[key] + dim);
      QUIRE_UNROLL
      for (int r = 0; r < R; ++r) sums[r] = fma(set1(probs[r][key]), value, sums[r]);
    }
    QUIRE_UNROLL
    for (int r = 0; r < R; ++r) {
      store(out + r * a.num_heads * a.head_dim + dim, without_denormals(sums[r]) * inverse[r] + set1(0.0f));
    }
  }
}

// Computes an item of such a text; false: it is none.
template <typename C>
static bool attends_short_text(const AttentionArgs& a, const AttentionItem& item) {
  if (sizeof(C) != sizeof(float) || a.block_tables != nullptr || a.seq_lens[item.seq] > W) return false;
  if (a.head_dim % W != 0 || a.head_dim > kMostShortDim || a.has_latents() || a.changes_scores()) return false;
  if (a.sinks != nullptr || item.state >= 0) return false;
  alignas(64) float keys[kMostShortDim * W];  // as much as is used is touched
  const float *key_rows[W], *values[W];
  const int64_t group = a.num_heads / a.num_kv_heads, tokens = item.token_end - item.token_begin;
  const int64_t blocks = (tokens + kShortRows - 1) / kShortRows;
  for (int64_t kv_head = item.kv_head; kv_head < item.kv_head + item.num_kv_heads; ++kv_head) {
    for (int64_t key = 0; key < W; ++key) {  // those behind the last one repeat the first, and are not seen
      const BlockSlot<float> slot = find_slot<float>(a, item.seq, kv_head, key < a.seq_lens[item.seq] ? key : 0, 0);
      key_rows[key] = slot.keys;
      values[key] = slot.values;
    }
    lanes_of_rows<float>(key_rows, a.head_dim, W, keys);
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      for (int64_t b = 0; b < blocks; ++b) {
        const int64_t first = tokens * b / blocks, rows = tokens * (b + 1) / blocks - first;
        with_rows<kShortRows>(
            rows, [&]<int R>() { attend_short<R>(a, item.seq, item.token_begin + first, head, keys, values); });
      }
    }
  }
  return true;
}

}  // namespace quire::QUIRE_ISA
