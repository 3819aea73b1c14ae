// The scores and sums of attention over latents (DeepSeek-AI 2024), where all heads of a token read the same rows: the
// queries are in the lanes, so that rows are read as they lie in the cache, and values are paired for all heads at
// once. Each number is the chain of operations that it is in attention/tiles/tile.h.
#pragma once

#include "attention/look_ahead.h"
#include "attention/plan.h"
#include "attention/tiles/tile.h"

namespace quire::QUIRE_ISA {

// As score_keys, of W rows with W keys, each in one piece: `queries` are the rows' lanes, side by side. Scores of the
// first `count` rows are kept. Nothing of the keys is arranged for it. As many bytes as the keys have are fetched from
// `ahead` on meanwhile, if it is not null. Not inlined, and without calls: sums and addresses stay in registers.
template <typename C>
__attribute__((noinline)) static void score_rows(const C* const* keys, const char* ahead, int64_t head_dim,
                                                 const C* queries, const float* scales, int64_t count, float* scores) {
  using Lane = KeyLane<C>;
  f32 acc[W];
  QUIRE_UNROLL
  for (int k = 0; k < W; ++k) acc[k] = f32{};
  const int64_t step = ahead == nullptr ? 0 : 4 * W;
  for (int64_t i = 0; i < head_dim; i += Lane::kPack, ahead += step) {
    const auto query = Lane::load(queries + i * W);
    prefetch(ahead);
    QUIRE_UNROLL
    for (int k = 0; k < W; ++k) acc[k] = Lane::dot(acc[k], Lane::broadcast(keys[k] + i), query);
  }
  i32 square[W];
  QUIRE_UNROLL
  for (int k = 0; k < W; ++k) square[k] = as_int(acc[k]);
  transpose(square);
  QUIRE_UNROLL
  for (int r = 0; r < W; ++r) {
    if (r < count) store(scores + r * kTileKeys, as_float(square[r]) * set1(scales[r]));
  }
}

// The lanes of the queries of rows [r, r + W), r being a multiple of W.
template <typename C>
QUIRE_INLINE C* query_lanes(const AttentionArgs& args, const AttentionScratch& scratch, int64_t r) {
  return reinterpret_cast<C*>(scratch.packed_keys) + r * args.head_dim;
}

// Make them of the queries, row by row. Rows after the last repeat it.
template <typename C>
static inline void arrange_queries(const AttentionArgs& args, const AttentionScratch& scratch, int64_t rows,
                                   const C* queries) {
  for (int64_t r = 0; r < rows; r += W) {
    const C* from[W];
    for (int64_t i = 0; i < W; ++i) from[i] = queries + min_of(r + i, rows - 1) * args.head_dim;
    lanes_of_rows(from, key_lanes<C>(args), W, query_lanes<C>(args, scratch, r));
  }
}

// Scores of rows [begin, end), of which `begin` is a multiple of W.
template <typename C>
static inline void score_latents(const AttentionArgs& args, const AttentionScratch& scratch, const KeyTile<C>& tile,
                                 int64_t begin, int64_t end, LookAhead<C>* ahead) {
  for (int64_t row = begin; row < end; row += W) {
    const int64_t rows = min_of(W, end - row);
    const KeyRange keys = seen_by(scratch, tile, row, row + rows);
    for (int64_t v = keys.first / W; v * W < keys.last; ++v) {
      const char* next = ahead == nullptr ? nullptr : ahead->take(W * args.head_dim * int64_t(sizeof(C)));
      score_rows<C>(tile.values + v * W, next, args.head_dim, query_lanes<C>(args, scratch, row),
                    scratch.query_scales + row, rows, scratch.scores + (row - begin) * kTileKeys + v * W);
    }
    ahead = nullptr;
  }
}

// Add the values to rows [begin, end) of `out`: some dimensions at a time, whose lanes stay in the first-level cache.
template <typename C>
static inline void add_latents(const AttentionArgs& args, const AttentionScratch& scratch, const KeyTile<C>& tile,
                               int64_t begin, int64_t end, float* out) {
  constexpr int kMostVectors = ValueLane<C>::kKeys == 1 ? 2 : 4;
  const KeyRange all = seen_by(scratch, tile, begin, end);
  for (int64_t dim = 0; dim < args.value_dim; dim += kMostVectors * W) {
    const int64_t dims = min_of(kMostVectors * W, args.value_dim - dim);
    NoAhead none;
    stage_values<C, NoAhead>(tile, nullptr, all.first, all.last, dim, dim + dims, args.row_stride, scratch.values);
    for (int64_t row = begin; row < end; row += kMostAttentionRows<C>) {
      const int64_t rows = min_of(kMostAttentionRows<C>, end - row);
      const KeyRange keys = seen_by(scratch, tile, row, row + rows);
      with_rows<kMostAttentionRows<C>>(rows, [&]<int R>() {
        constexpr int kVectors = kValueVectors<C, R> < kMostVectors ? kValueVectors<C, R> : kMostVectors;
        const auto add = [&]<int V>(int64_t d) {
          add_values<V, C, R, true>(scratch.values + d, tile, none, dim + d, keys.first, keys.last,
                                    scratch.scores + (row - begin) * kTileKeys, scratch.decay + row,
                                    scratch.steps + row, out + row * args.row_stride, args.row_stride);
        };
        int64_t d = 0;
        for (; d + kVectors * W <= dims; d += kVectors * W) add.template operator()<kVectors>(d);
        for (; d < dims; d += W) add.template operator()<1>(d);
      });
    }
  }
}

}  // namespace quire::QUIRE_ISA
