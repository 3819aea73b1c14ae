// Blocks of rows of a head that take each step of attention over a tile of keys together.
#pragma once

#include "attention/look_ahead.h"
#include "attention/plan.h"
#include "attention/score_terms.h"
#include "attention/tiles/tile.h"

namespace quire::QUIRE_ISA {

// Rows of which some see keys [first, last) of a tile, and their scores.
struct RowBlock {
  int64_t row, rows, first, last;
  float* scores;

  QUIRE_MEMBER int64_t vector() const { return first / W; }
  QUIRE_MEMBER int64_t vectors_end() const { return (last + W - 1) / W; }
};

// Calls call(block) for the `count` blocks, which `bounds` are between, that see keys of the tile.
template <typename C, typename Call>
QUIRE_INLINE void for_blocks(const AttentionScratch& s, const KeyTile<C>& tile, const int64_t* bounds, int64_t count,
                             const Call& call) {
  for (int64_t b = 0; b < count; ++b) {
    const int64_t row = bounds[b], after = bounds[b + 1];
    const KeyRange keys = seen_by(s, tile, row, after);
    if (keys.first >= keys.last) continue;
    call(RowBlock{row, after - row, keys.first, keys.last, s.scores + (row - bounds[0]) * kTileKeys});
  }
}

template <typename C, typename Ahead>
static inline void score_block(const AttentionArgs& a, const AttentionScratch& s, const KeyTile<C>& tile,
                               const RowBlock& block, Ahead& ahead) {
  const auto* queries = reinterpret_cast<typename KeyLane<C>::Query*>(s.queries) + block.row * a.head_dim;
  with_rows<kMostAttentionRows<C>>(block.rows, [&]<int R>() {
    score_range<C, R>(tile, ahead, block.first, block.last, a.head_dim, queries, s.query_scales + block.row,
                      block.scores);
  });
}

// Changes a block's scores as the model wants it, and hides those of keys that a row does not see.
template <typename C>
static inline void hide_unseen(const AttentionArgs& a, const AttentionItem& item, const AttentionScratch& s,
                               const KeyTile<C>& tile, const RowBlock& block) {
  const int64_t vector = block.vector(), end = block.vectors_end();
  if (a.changes_scores()) change_scores(a, item, s, tile.start, block.row, block.rows, vector, end, block.scores);
  for (int64_t r = 0; r < block.rows; ++r) {
    const int64_t first_seen = s.first_keys[block.row + r] - tile.start;
    const int64_t seen_end = s.end_keys[block.row + r] - tile.start;
    if (first_seen > vector * W || seen_end < end * W) {
      mask_scores(block.scores + r * kTileKeys, vector, end, first_seen, seen_end);
    }
  }
}

// Adds values, times a block's probabilities, to its rows of `out`, which are a.row_stride apart. Floats that are
// fetched meanwhile are added kBytesNear at a time: all dimensions of some keys, before those of the next.
template <typename C, typename Ahead>
static inline void add_block(const AttentionArgs& a, const AttentionScratch& s, const KeyTile<C>& tile,
                             const RowBlock& block, bool is_staged, float* out, Ahead& ahead) {
  with_rows<kMostAttentionRows<C>>(block.rows, [&]<int R>() {
    constexpr int kVectors = kValueVectors<C, R>;
    constexpr bool kInParts = ValueLane<C>::kVectors == 1 && std::is_same_v<Ahead, LookAhead<C>>;
    const int64_t step = kInParts ? max_of(kBytesNear / (a.value_dim * int64_t(sizeof(C))), 1) : kTileKeys;
    for (int64_t first = block.first, last; first < block.last; first = last) {
      last = min_of((first / step + 1) * step, block.last);
      const float* decay = (first == block.first ? s.decay : s.steps) + block.row;  // a step of floats is 1
      const auto add = [&]<int V, bool kStaged>(int64_t dim) {
        add_values<V, C, R, kStaged>(s.values + dim, tile, ahead, dim, first, last, block.scores, decay,
                                     s.steps + block.row, out + block.row * a.row_stride, a.row_stride);
      };
      const auto add_all = [&]<bool kStaged>() {
        int64_t dim = 0;
        for (; dim + kVectors * W <= a.value_dim; dim += kVectors * W) add.template operator()<kVectors, kStaged>(dim);
        if constexpr (kStaged || ValueLane<C>::kVectors == 1) {
          if constexpr (kVectors > 2) {
            for (; dim + 2 * W <= a.value_dim; dim += 2 * W) add.template operator()<2, kStaged>(dim);
          }
          for (; dim < a.value_dim; dim += W) add.template operator()<1, kStaged>(dim);
        }
      };
      is_staged ? add_all.template operator()<true>() : add_all.template operator()<false>();
    }
  });
}

}  // namespace quire::QUIRE_ISA
