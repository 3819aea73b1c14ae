// Attention over latents (attention/latents.h) on tiles, where the CPU has them. Rows of the cache are rows of a tile
// as they lie, and queries its units: a product of both has the scores of 16 keys and 16 rows, which are transposed.
// Nothing is asked for ahead: a block of latents is so long that the processor's own prefetchers read it as fast.
#pragma once

#include "attention/latents.h"
#include "attention/tiles/amx.h"

namespace quire::QUIRE_ISA {

#if defined(QUIRE_AMX)

// Dimensions of values that are staged at once: they stay in the first-level cache.
constexpr int64_t kStagedLatents = 64;

// As score_latents, of rows [begin, end), at most kAmxMostRows, and all keys that some of them see.
static void score_latents_on_tiles(const AttentionArgs& args, const AttentionScratch& scratch, Tiles& tiles,
                                   const KeyTile<bf16>& tile, int64_t begin, int64_t end) {
  const KeyRange keys = seen_by(scratch, tile, begin, end);
  if (keys.first >= keys.last) return;
  const int64_t head_dim = args.head_dim, key_bytes = head_dim * int64_t(sizeof(bf16));
  const bool in_place = args.block_size % W == 0, has_second = end - begin > W;
  alignas(64) bf16 copied[W * kStepPairs];
  alignas(64) float products[W * W];
  const bf16* type = nullptr;
  // Dimensions from `dim` on of a vector of keys: where they lie, or, if that is in several blocks, copied.
  const auto load_keys = [&]<int kTile>(int64_t v, int64_t dim) __attribute__((always_inline)) {
    if (in_place) {
      const int64_t key = max_of(keys.first, v * W);
      return load_tile<kTile>(tile.values[key] - (key - v * W) * head_dim + dim, key_bytes);
    }
    for (int64_t i = 0; i < W; ++i) {
      std::memcpy(copied + i * kStepPairs, tile.values[v * W + i] + dim, size_t(kStepPairs) * sizeof(bf16));
    }
    load_tile<kTile>(copied, kAmxRowBytes);
  };
  // A product's scores, of a vector of keys and rows from `row` on.
  const auto keep = [&]<int kTile>(int64_t v, int64_t row) __attribute__((always_inline)) {
    store_tile<kTile>(products, kAmxRowBytes);
    i32 square[W];
    QUIRE_UNROLL
    for (int k = 0; k < W; ++k) square[k] = as_int(load(products + k * W));
    transpose(square);
    QUIRE_UNROLL
    for (int r = 0; r < W; ++r) {
      if (row + r >= end) continue;
      store(scratch.scores + (row - begin + r) * kTileKeys + v * W,
            as_float(square[r]) * set1(scratch.query_scales[row + r]));
    }
  };
  tiles.configure(kAmxMostRows);
  const int64_t last = (keys.last + W - 1) / W - 1;
  for (int64_t v = keys.first / W; v <= last; v += 2) {
    const int64_t other = min_of(v + 1, last);  // two vectors of keys: their products overlap
    clear_tile<0>();
    clear_tile<1>();
    clear_tile<2>();
    clear_tile<3>();
    for (int64_t dim = 0; dim < head_dim; dim += kStepPairs) {
      load_keys.template operator()<4>(v, dim);
      load_tile<6>(query_lanes<bf16>(args, scratch, begin) + dim * W, kAmxRowBytes);
      multiply_tiles<0, 4, 6>(type);
      load_keys.template operator()<5>(other, dim);
      multiply_tiles<2, 5, 6>(type);
      if (!has_second) continue;
      load_tile<7>(query_lanes<bf16>(args, scratch, begin + W) + dim * W, kAmxRowBytes);
      multiply_tiles<1, 4, 7>(type);
      multiply_tiles<3, 5, 7>(type);
    }
    keep.template operator()<0>(v, begin);
    keep.template operator()<2>(other, begin);
    if (!has_second) continue;
    keep.template operator()<1>(v, begin + W);
    keep.template operator()<3>(other, begin + W);
  }
}

// As add_latents, of rows [begin, end) of a state.
static void add_latents_on_tiles(const AttentionArgs& args, const AttentionScratch& scratch, Tiles& tiles,
                                 const KeyTile<bf16>& tile, int64_t begin, int64_t end, float* state) {
  const KeyRange keys = seen_by(scratch, tile, begin, end);
  if (keys.first >= keys.last) return;
  const int64_t first = keys.first / kStepPairs * kStepPairs;
  const int64_t last = (keys.last + kStepPairs - 1) / kStepPairs * kStepPairs;
  for (int64_t dim = 0; dim < args.value_dim; dim += kStagedLatents) {
    const int64_t end_dim = min_of(dim + kStagedLatents, args.value_dim);
    stage_values<bf16, LookAhead<bf16>>(tile, nullptr, first, last, dim, end_dim, args.row_stride, scratch.values);
    add_on_tiles(args, scratch, tiles, tile, begin, end, dim, end_dim, state);
  }
}

#endif

// Both ways: on tiles or not.
template <typename C>
static inline void score_latents(const AttentionArgs& args, const AttentionScratch& scratch,
                                 [[maybe_unused]] Tiles& tiles, const KeyTile<C>& tile, int64_t begin, int64_t end,
                                 [[maybe_unused]] bool on_tiles, LookAhead<C>* ahead) {
#if defined(QUIRE_AMX)
  if constexpr (sizeof(C) == sizeof(bf16)) {
    if (on_tiles) return score_latents_on_tiles(args, scratch, tiles, tile, begin, end);
  }
#endif
  score_latents(args, scratch, tile, begin, end, ahead);
}

template <typename C>
static inline void add_latents(const AttentionArgs& args, const AttentionScratch& scratch,
                               [[maybe_unused]] Tiles& tiles, const KeyTile<C>& tile, int64_t begin, int64_t end,
                               [[maybe_unused]] bool on_tiles, float* out) {
#if defined(QUIRE_AMX)
  if constexpr (sizeof(C) == sizeof(bf16)) {
    if (on_tiles) return add_latents_on_tiles(args, scratch, tiles, tile, begin, end, out);
  }
#endif
  add_latents(args, scratch, tile, begin, end, out);
}

}  // namespace quire::QUIRE_ISA
