// The products of attention on tiles (isa/x86/amx.h): blocks of keys lie in the cache as tiles want units, and values
// in pairs of keys are such units too. Up to kAmxMostRows rows at once.
//
// A step adds up 32 dimensions of a score, or 32 keys of an output, at absolute places. What a row does not see has
// probability 0 and changes nothing, so that a row has the same sums beside any others.
#pragma once

#include "attention/look_ahead.h"
#include "attention/plan.h"
#include "attention/tiles/tile.h"
#include "isa/x86/amx.h"

#if !defined(QUIRE_AMX)

namespace quire::QUIRE_ISA {

QUIRE_INLINE f32 without_denormals(f32 v) { return v; }

}  // namespace quire::QUIRE_ISA

#else

namespace quire::QUIRE_ISA {

constexpr int64_t kStepPairs = 32;  // elements of k in a step of bf16
static_assert(kPassRows >= kAmxMostRows && kTileKeys % kStepPairs == 0);

// Tiles flush denormals to zero where they add zeros to them, which depends on the batch: so what is read of a state
// has none.
QUIRE_INLINE f32 without_denormals(f32 v) { return select(abs(v) < set1(0x1p-126f), set1(0.0f), v); }

// As score_keys, of rows [first_row, end_row) and all keys that some of them see. Without their scales unless `scales`.
static void score_on_tiles(const AttentionArgs& args, const AttentionScratch& scratch, Tiles& tiles,
                           const KeyTile<bf16>& tile, int64_t first_row, int64_t end_row, const bf16* queries,
                           bool scales, LookAhead<bf16>* ahead) {
  const KeyRange keys = seen_by(scratch, tile, first_row, end_row);
  const int64_t head_dim = args.head_dim, rows = end_row - first_row;
  float* scores = scratch.scores;
  const bf16* type = nullptr;
  const int64_t begin = keys.first / W / 2 * 2, end = (keys.last + W - 1) / W;
  const int64_t query_stride = head_dim * int64_t(sizeof(bf16)), key_stride = tile.lane_stride * int64_t(sizeof(bf16));
  constexpr int64_t kStride = kTileKeys * sizeof(float);
  tiles.configure(rows);
  for (int64_t v = begin; v < end; v += 2) {
    clear_tile<0>();
    clear_tile<1>();
    clear_tile<2>();
    clear_tile<3>();
    for (int64_t dim = 0; dim < head_dim; dim += kStepPairs) {
      const int64_t at = dim / 2 * tile.lane_stride;
      load_tile<4>(queries + dim, query_stride);
      load_tile<6>(tile.vectors[v] + at, key_stride);
      multiply_tiles<0, 4, 6>(type);
      load_tile<7>(tile.vectors[v + 1] + at, key_stride);
      multiply_tiles<1, 4, 7>(type);
      if (rows > kAmxRows) {
        load_tile<5>(queries + kAmxRows * head_dim + dim, query_stride);
        multiply_tiles<2, 5, 6>(type);
        multiply_tiles<3, 5, 7>(type);
      }
      if (ahead != nullptr && ahead->pairs()) {
        // Half of what is read here: the rest is asked for beside the softmax and while values are staged.
        for (int64_t i = 0; i < 4; ++i) ahead->template fetch<256>();
      } else if (ahead != nullptr) {
        ahead->template fetch<1024>();
        ahead->template fetch<1024>();
      }
    }
    float* to = scores + v * W;
    store_tile<0>(to, kStride);
    store_tile<1>(to + W, kStride);
    if (rows > kAmxRows) {
      store_tile<2>(to + kAmxRows * kTileKeys, kStride);
      store_tile<3>(to + kAmxRows * kTileKeys + W, kStride);
    }
  }
  for (int64_t r = 0; r < rows && scales; ++r, scores += kTileKeys) {
    const f32 scale = set1(scratch.query_scales[first_row + r]);
    for (int64_t v = begin; v < end; ++v) store(scores + v * W, load(scores + v * W) * scale);
  }
}

// Makes probabilities of rows [row, end) zero that softmax_row has not made, since the rows see no such keys, but that
// steps over the keys seen by rows [first_row, end_row) find.
static void clear_unseen(const AttentionScratch& scratch, const KeyTile<bf16>& tile, int64_t first_row, int64_t end_row,
                         int64_t row, int64_t end) {
  const KeyRange all = seen_by(scratch, tile, first_row, end_row), own = seen_by(scratch, tile, row, end);
  const bool is_seen = own.first < own.last;
  const int64_t first = all.first / kStepPairs * 2, last = (all.last + kStepPairs - 1) / kStepPairs * 2;
  for (int64_t v = first; v < last; ++v) {
    if (is_seen && v >= own.first / W && v * W < own.last) continue;
    for (int64_t r = row; r < end; ++r) {
      store(reinterpret_cast<bf16*>(scratch.scores + (r - first_row) * kTileKeys) + v * W, set1(0.0f));
    }
  }
}

// As add_values, of rows [first_row, end_row) of a state and dimensions [first_dim, end_dim), of which values are
// staged for whole steps.
static void add_on_tiles(const AttentionArgs& args, const AttentionScratch& scratch, Tiles& tiles,
                         const KeyTile<bf16>& tile, int64_t first_row, int64_t end_row, int64_t first_dim,
                         int64_t end_dim, float* state) {
  const KeyRange keys = seen_by(scratch, tile, first_row, end_row);
  if (keys.first >= keys.last) return;
  const int64_t rows = end_row - first_row, row_stride = args.row_stride, dims = end_dim - first_dim;
  const float *staged = scratch.values, *probs = scratch.scores, *decay = scratch.decay + first_row;
  float* out = state + first_row * row_stride + first_dim;
  const bf16* type = nullptr;
  const int64_t stride = row_stride * int64_t(sizeof(float));
  constexpr int64_t kProbStride = kTileKeys * sizeof(float);
  const int64_t first = keys.first / kStepPairs, last = (keys.last + kStepPairs - 1) / kStepPairs;
  for (int64_t r = 0; r < rows; ++r) {
    if (decay[r] == 1.0f) continue;
    const f32 factor = set1(decay[r]);
    float* sums = out + r * row_stride;
    for (int64_t dim = 0; dim < dims; dim += W) store(sums + dim, load(sums + dim) * factor);
  }
  tiles.configure(rows);
  float* second = out + kAmxRows * row_stride;
  for (int64_t dim = 0; dim < dims; dim += 2 * W) {
    load_tile<0>(out + dim, stride);
    load_tile<1>(out + dim + W, stride);
    if (rows > kAmxRows) {
      load_tile<2>(second + dim, stride);
      load_tile<3>(second + dim + W, stride);
    }
    for (int64_t step = first; step < last; ++step) {
      const float* units = staged + step * kAmxUnits * row_stride + dim;
      load_tile<4>(probs + step * kAmxUnits, kProbStride);
      load_tile<6>(units, stride);
      multiply_tiles<0, 4, 6>(type);
      load_tile<7>(units + W, stride);
      multiply_tiles<1, 4, 7>(type);
      if (rows > kAmxRows) {
        load_tile<5>(probs + kAmxRows * kTileKeys + step * kAmxUnits, kProbStride);
        multiply_tiles<2, 5, 6>(type);
        multiply_tiles<3, 5, 7>(type);
      }
    }
    store_tile<0>(out + dim, stride);
    store_tile<1>(out + dim + W, stride);
    if (rows > kAmxRows) {
      store_tile<2>(second + dim, stride);
      store_tile<3>(second + dim + W, stride);
    }
  }
}

}  // namespace quire::QUIRE_ISA

#endif
