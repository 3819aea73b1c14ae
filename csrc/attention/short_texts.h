// Attention of a text without a cache that has no more tokens than a vector has lanes: all keys of a head lie in one
// vector for each lane, and what belongs to a row stays in registers. Numbers are computed in the order of
// attention/attention.h, and have the same bits.
#pragma once

#include "attention/look_ahead.h"
#include "attention/plan.h"
#include "attention/tiles/amx.h"
#include "attention/tiles/exp2.h"
#include "attention/tiles/tile.h"
#include "isa/rows.h"

namespace quire::QUIRE_ISA {

constexpr int64_t kMostShortDim = 128;
// Tokens at once.
constexpr int kShortRows = kHas32Registers ? 10 : 5;

// Of R tokens from `token` on and one head. keys: [lanes of a key, W].
template <typename C, int R>
static inline void attend_short(const AttentionArgs& a, int64_t seq, int64_t token, int64_t head, const C* keys,
                                const C* const* values) {
  using Lane = KeyLane<C>;
  using Values = ValueLane<C>;
  constexpr int64_t kPack = Lane::kPack, kVectors = Values::kVectors;
  const C* query = static_cast<const C*>(a.query) + token * a.query_stride + head * a.head_dim;
  f32 scores[R] = {};
  for (int64_t i = 0; i < a.head_dim; i += kPack) {
    const auto key = Lane::load(keys + i * W);
    QUIRE_UNROLL
    for (int r = 0; r < R; ++r) scores[r] = Lane::dot(scores[r], key, Lane::broadcast(query + r * a.query_stride + i));
  }
  alignas(64) float probs[R][W];  // or as narrow as Prob
  f32 inverse[R];
  const i32 lanes = lane_indices();
  QUIRE_UNROLL
  for (int r = 0; r < R; ++r) {
    const int64_t position = context_of(a, seq) + token + r;
    const i32 is_seen = (lanes >= int32_t(a.first_key(position))) & (lanes < int32_t(a.end_key(seq, position)));
    const f32 seen = select(is_seen, scores[r] * set1(a.scale * kLog2E), set1(-kInfinity));
    const f32 prob = exp2_for<typename Values::Prob>(seen - set1(reduce_max(seen)));
    store(reinterpret_cast<typename Values::Prob*>(probs[r]), prob);
    inverse[r] = set1(1.0f / reduce_add(prob));
  }
  C* out = static_cast<C*>(a.out) + (token * a.num_heads + head) * a.head_dim;
  for (int64_t dim = 0; dim < a.head_dim; dim += kVectors * W) {
    f32 sums[R][kVectors] = {};
    for (int64_t i = 0; i * Values::kKeys < a.seq_lens[seq]; ++i) {
      typename Values::Vector value[kVectors];
      Values::make(values + i * Values::kKeys, dim, kVectors * W, value);
      QUIRE_UNROLL
      for (int r = 0; r < R; ++r) {
        const auto prob = Values::broadcast(probs[r] + i);
        QUIRE_UNROLL
        for (int v = 0; v < kVectors; ++v) sums[r][v] = Values::dot(sums[r][v], value[v], prob);
      }
    }
    QUIRE_UNROLL
    for (int r = 0; r < R; ++r) {
      QUIRE_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        store(out + r * a.num_heads * a.head_dim + dim + v * W,
              without_denormals(sums[r][v]) * inverse[r] + set1(0.0f));
      }
    }
  }
}

// Queries must be read as they are, and products not be those of tiles.
template <typename C>
constexpr bool kAttendsShortTexts = std::is_same_v<typename KeyLane<C>::Query, C> && !(kAmx && sizeof(C) == 2);

template <typename C>
static void attend_short_text(const AttentionArgs& a, const AttentionItem& item) {
  alignas(64) C keys[kMostShortDim * W];  // as much as is used is touched
  const C *key_rows[W], *values[W];
  const int64_t group = a.num_heads / a.num_kv_heads, tokens = item.token_end - item.token_begin;
  const int64_t blocks = (tokens + kShortRows - 1) / kShortRows;
  for (int64_t kv_head = item.kv_head; kv_head < item.kv_head + item.num_kv_heads; ++kv_head) {
    for (int64_t key = 0; key < W; ++key) {  // those behind the last one repeat the first, and are not seen
      const BlockSlot<C> slot = find_slot<C>(a, item.seq, kv_head, key < a.seq_lens[item.seq] ? key : 0, 0);
      key_rows[key] = slot.keys;
      values[key] = slot.values;
    }
    lanes_of_rows<C>(key_rows, a.head_dim / KeyLane<C>::kPack, W, keys);
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      for (int64_t b = 0; b < blocks; ++b) {
        const int64_t first = tokens * b / blocks, rows = tokens * (b + 1) / blocks - first;
        with_rows<kShortRows>(
            rows, [&]<int R>() { attend_short<C, R>(a, item.seq, item.token_begin + first, head, keys, values); });
      }
    }
  }
}

// Computes an item of such a text; false: it is none.
template <typename C>
static bool attends_short_text(const AttentionArgs& a, const AttentionItem& item) {
  if constexpr (kAttendsShortTexts<C>) {
    if (a.block_tables != nullptr || a.seq_lens[item.seq] > W || a.has_latents() || a.changes_scores()) return false;
    if (a.head_dim % (ValueLane<C>::kVectors * W) != 0 || a.head_dim > kMostShortDim) return false;
    if (a.sinks != nullptr || item.state >= 0) return false;
    attend_short_text<C>(a, item);
    return true;
  }
  return false;
}

}  // namespace quire::QUIRE_ISA
