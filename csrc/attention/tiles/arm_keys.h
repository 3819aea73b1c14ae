// Products of the keys of an int8 cache by dot products of bytes (FEAT_I8MM).
#pragma once

#include "isa/simd.h"

namespace quire::QUIRE_ISA {

// KeyLane<int8_t> of attention/tiles/tile.h. Queries are int16, fours of them as their four lower bytes, unsigned, and
// then their upper ones. Sums may wrap around on the way.
struct ByteKeys {
  using Query = int16_t;
  using Vector = i32;
  using Sum = i32;
  struct Four {
    i32 lower, upper;
  };
  static constexpr int64_t kPack = 4, kScaleLanes = 2;
  QUIRE_INLINE void store_query(int16_t* query, int64_t i, int32_t value) {
    uint8_t* four = reinterpret_cast<uint8_t*>(query + i / 4 * 4);
    four[i % 4] = uint8_t(value);
    four[4 + i % 4] = uint8_t(value >> 8);
  }
  QUIRE_INLINE Vector load(const int8_t* p) { return load_lanes(p); }
  QUIRE_INLINE Four broadcast(const int16_t* p) { return {set1_lane(p), set1_lane(p + 2)}; }
  QUIRE_INLINE i32 dot(i32 acc, Vector key, const Four& query) {
    return add_fours(acc + (add_signed_fours(i32{}, query.upper, key) << 8), query.lower, key);
  }
  QUIRE_INLINE f32 score(i32 sum, f32 scale, const float* key_scales) {
    return __builtin_convertvector(sum, f32) * (scale * quire::QUIRE_ISA::load(key_scales));
  }
};

}  // namespace quire::QUIRE_ISA
