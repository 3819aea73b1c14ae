// Queries as products of keys read them: made once for all keys.
#pragma once

#include "attention/tiles/tile.h"
#include "isa/rows.h"
#include "quantized/rotation.h"

namespace quire::QUIRE_ISA {

#if !defined(QUIRE_MULTIPLIES_PAIRS)
// Of bf16 they are float32: to take a pair apart and spread both over a vector takes longer than to read two floats.
template <>
struct KeyLane<bf16> : PlainKeyLane<bf16> {
  using Query = float;
  struct Pair {
    f32 lower, upper;
  };
  using PlainKeyLane<bf16>::broadcast, PlainKeyLane<bf16>::dot;
  QUIRE_INLINE Pair broadcast(const float* p) { return {set1(p[0]), set1(p[1])}; }
  QUIRE_INLINE f32 dot(f32 acc, Vector key, const Pair& query) {
    return fma(upper(key), query.upper, fma(lower(key), query.lower, acc));
  }
};
#endif

// Calls call(begin, count, rotated) for blocks of a query, rotated as the keys of an int8 cache are.
template <typename T, typename Call>
static inline void for_rotated_blocks(const T* from, int64_t head_dim, const Call& call) {
  alignas(64) float rotated[256];
  for (int64_t begin = 0, count; begin < head_dim; begin += count) {
    count = rotation_width(head_dim - begin);
    const T* block = from + begin;
    const f32 factor = set1(1 / rotation_root(count));
    rotate_values(count, [=](int64_t i, int64_t n) { return load_some(block + i, n) * factor; }, rotated);
    call(begin, count, rotated);
  }
}

// Makes a query int16 multiples of a step, which is returned. The number of multiples is such that no sum overflows.
template <typename T>
static inline float quantize_query(const T* from, int64_t head_dim, int16_t* to) {
  constexpr int64_t kMostSum = int64_t{1} << 24;
  const float levels = float(kMostSum / head_dim < 32767 ? kMostSum / head_dim : 32767);
  f32 largest = set1(0.0f);
  for_rotated_blocks(from, head_dim, [&](int64_t, int64_t count, const float* rotated) {
    for_parts(count, [&](int64_t i, int64_t n) { largest = max(largest, abs(load_some(rotated + i, n))); });
  });
  const float most = reduce_max(largest);
  const f32 inverse = set1(most > kTiny ? levels / most : 0.0f), shifter = set1(12582912.0f);
  for_rotated_blocks(from, head_dim, [&](int64_t begin, int64_t count, const float* rotated) {
    for_parts(count, [&](int64_t i, int64_t n) {
      const i32 v = __builtin_convertvector(load_some(rotated + i, n) * inverse + shifter - shifter, i32);
      for (int64_t j = 0; j < n; ++j) KeyLane<int8_t>::store_query(to, begin + i + j, v[j]);
    });
  });
  return most / levels;
}

}  // namespace quire::QUIRE_ISA
