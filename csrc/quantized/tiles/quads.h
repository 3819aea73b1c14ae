// Sums of four products of bytes: weights in [0, 255] times x in [-127, 127], in int32. Every variant gives the same.
#pragma once

#include <cstring>
#include <utility>

#include "isa/rows.h"
#include "isa/simd.h"
#include "matmul/tiles/tile.h"

namespace quire::QUIRE_ISA {

// A way to sum them, in `kParts` parts one after the other: a part's `weights` are made of W lanes of four weights, its
// `values` are those of four of x that it multiplies, the same in all lanes. `add` adds the part's products of each
// lane to the lane's sum; sums begin with what x's row says (lack_of), and `total` makes int32 of a finished one.

// All four at once, values of x being bytes.
struct WholeQuads {
  static constexpr int kParts = 1;
  using Value = int8_t;
  template <int kPart>
  QUIRE_INLINE i32 values(const Value* four) {
    return set1_lane(four);
  }
};

// By pairs, which are multiplied as int16. With AVX2 alone this takes less time than `vpmaddubsw`, whose products would
// have to fit an int16 by pairs: that takes a third multiplication, as some processors count `vpsignb`.
struct PairSums {
  static constexpr int kParts = 2, kZero = 0;  // kZero: what `weights` subtracts from each weight
  using Value = int16_t;                       // fours are kept in the order 0, 2, 1, 3
  template <int kPart>
  QUIRE_INLINE i32 values(const Value* four) {
    return set1_lane(four + 2 * kPart);
  }
  template <int kPart = 0>
  QUIRE_INLINE i32 weights(i32 bytes) {
    typedef uint16_t halves __attribute__((vector_size(sizeof(i32))));
    return kPart == 0 ? bytes & 0x00ff00ff : (i32)((halves)bytes >> 8);
  }
  QUIRE_INLINE i32 add(i32 sum, i32 w, i32 x) {
    i32 added = sum + multiply_pairs(w, x);
#if defined(QUIRE_SIMD_AVX2)
    asm("" : "+x"(added));  // GCC would multiply for many sums first, and run out of registers
#endif
    return added;
  }
  QUIRE_INLINE i32 total(i32 sum, i32) { return sum; }
};

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
struct ByteSums : WholeQuads {
  static constexpr int kZero = 0;
  template <int = 0>
  QUIRE_INLINE i32 weights(i32 bytes) {
    return bytes;
  }
  QUIRE_INLINE i32 add(i32 sum, i32 w, i32 x) {
#if defined(__AVX512VNNI__)
    return (i32)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
#else
    return (i32)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)x);
#endif
  }
  QUIRE_INLINE i32 total(i32 sum, i32) { return sum; }
};

template <int, bool>
using SumsOf = ByteSums;

#elif defined(QUIRE_SIMD_AVX2)
using ByteSums = PairSums;

// All pairs of a group are added as int16 where weights have 4, 5 or 6 bits. Less 8, 16 or 32 they are in [-32, 31] at
// most, and so the sums of the 8 (6 bits: groups of 16) or 16 products of each int16 are within 8 * 32 * 127 = 16 * 16
// * 127 = 32512. The sum of what is subtracted comes first (halves of lack_of); on the way sums may wrap around.
// kIsWhole: in the end it is added again, since the format subtracts nothing.
template <int kBits, bool kIsWhole>
struct SmallSums : WholeQuads {
  static_assert(2 * ((1 << kBits) - 1) * 127 <= 32767);
  template <int = 0>
  QUIRE_INLINE i32 weights(i32 bytes) {
    return bytes;
  }
  QUIRE_INLINE i32 add(i32 sum, i32 w, i32 x) {
    __m256i added = _mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16((__m256i)w, (__m256i)x));
    asm("" : "+x"(added));  // as above
    return (i32)added;
  }
  QUIRE_INLINE i32 total(i32 sum, i32 lack) {
    const i32 all = multiply_pairs(sum, i32{} + 0x10001);
    return kIsWhole ? all - multiply_pairs(lack, i32{} + 0x10001) : all;
  }
};

// What such sums begin with: of the values of x (their sums in each fourth lane) that each half is made of, -zero times
// the sum.
QUIRE_INLINE int32_t start_of_halves(f32 values, int zero) {
  const i32 sums = __builtin_convertvector(values, i32) * -zero;
  const int32_t first = sums[0] + sums[1] + sums[4] + sums[5], second = sums[2] + sums[3] + sums[6] + sums[7];
  return (first & 0xffff) | second << 16;
}

template <int kBits, bool kIsWhole>
using SumsOf = SmallSums<kBits, kIsWhole>;

#elif defined(QUIRE_ARM)
// Weights become signed bytes, unless unsigned ones can be multiplied by signed ones: those of 8 bits less 128, the
// others as they are.
template <bool kIsLess>
struct LaneSums : WholeQuads {
  static constexpr int kZero = kIsLess ? 128 : 0;
  template <int = 0>
  QUIRE_INLINE i32 weights(i32 bytes) {
    return kIsLess ? bytes ^ int32_t(0x80808080) : bytes;
  }
  // x: two fours of values, of which `kFour` is multiplied.
  template <int kFour>
  QUIRE_INLINE i32 add_four(i32 sum, i32 w, Eight x) {
#if defined(QUIRE_ARM_I8MM)
    return quire::QUIRE_ISA::add_four<kFour>(sum, w, x);
#elif defined(QUIRE_ARM_DOT)
    return (i32)vdotq_lane_s32((int32x4_t)sum, (int8x16_t)w, x, kFour);
#else  // two products are within 2 * 128 * 127 = 32512
    const int8x16_t quad = (int8x16_t)vdupq_lane_s32((int32x2_t)x, kFour), bytes = (int8x16_t)w;
    const int16x8_t low = vmull_s8(vget_low_s8(bytes), vget_low_s8(quad)), high = vmull_high_s8(bytes, quad);
    return (i32)vpadalq_s16((int32x4_t)sum, vpaddq_s16(low, high));
#endif
  }
  QUIRE_INLINE i32 add(i32 sum, i32 w, i32 x) {
#if defined(QUIRE_ARM_I8MM)
    return add_fours(sum, w, x);
#else
    return add_four<0>(sum, w, vget_low_s8((int8x16_t)x));
#endif
  }
  QUIRE_INLINE i32 total(i32 sum, i32) { return sum; }
};

#if defined(QUIRE_ARM_I8MM)
constexpr bool kBytesAreLess = false;
#else
constexpr bool kBytesAreLess = true;
#endif
using ByteSums = LaneSums<kBytesAreLess>;

template <int, bool>
using SumsOf = LaneSums<false>;

#else
using ByteSums = PairSums;

template <int, bool>
using SumsOf = ByteSums;
#endif

// acc[r][kFirst + g] += these parts of the products of N lanes of weights and four values of R rows of x, from `at` on.
template <typename Sums, int kFirst, int... kParts, int R, int G, int N>
QUIRE_INLINE void add_parts(i32 (&acc)[R][G], const i32 (&bytes)[N], const RowAddresses<R>& x, int64_t at) {
  i32 w[N][sizeof...(kParts)];
  QUIRE_UNROLL
  for (int g = 0; g < N; ++g) {
    int part = 0;
    ((w[g][part++] = Sums::template weights<kParts>(bytes[g])), ...);
  }
  QUIRE_UNROLL
  for (int r = 0; r < R; ++r) {
    const auto* four = reinterpret_cast<const typename Sums::Value*>(x[r]) + at;
    const i32 values[] = {Sums::template values<kParts>(four)...};
    QUIRE_UNROLL
    for (int g = 0; g < N; ++g) {
      QUIRE_UNROLL
      for (int part = 0; part < int(sizeof...(kParts)); ++part) {
        acc[r][kFirst + g] = Sums::add(acc[r][kFirst + g], w[g][part], values[part]);
      }
    }
  }
}

// All parts, of weights whose bytes are load(g): with AVX2, which has few registers, one part for all rows before the
// next, and of many sums those of two vectors of columns at a time.
template <typename Sums, int kFirst = 0, int R, int G, typename Load>
QUIRE_INLINE void add_quads(i32 (&acc)[R][G], const RowAddresses<R>& x, int64_t at, const Load& load) {
  constexpr int N = kIsAvx2 && R * G > 8 ? 2 : G;
  i32 bytes[N];
  QUIRE_UNROLL
  for (int g = 0; g < N; ++g) bytes[g] = load(kFirst + g);
  if constexpr (Sums::kParts > 1 && !kIsAvx2) {
    add_parts<Sums, kFirst, 0, 1>(acc, bytes, x, at);
  } else {
    add_parts<Sums, kFirst, 0>(acc, bytes, x, at);
    if constexpr (Sums::kParts > 1) add_parts<Sums, kFirst, 1>(acc, bytes, x, at);
  }
  if constexpr (kFirst + N < G) {
    keep_order();
    add_quads<Sums, kFirst + N>(acc, x, at, load);
  }
}

// W values of x, which follow each other, in the order of fours that `Value` has (PairSums).
template <typename Value, size_t... kLanes>
QUIRE_INLINE void store_values(Value* to, i32 values, std::index_sequence<kLanes...>) {
  typedef Value narrow __attribute__((vector_size(W * sizeof(Value))));
  constexpr bool kPairs = sizeof(Value) > 1;
  const i32 ordered =
      __builtin_shufflevector(values, values, (kPairs ? kLanes / 4 * 4 + kLanes % 4 / 2 + kLanes % 2 * 2 : kLanes)...);
  const narrow rounded = __builtin_convertvector(ordered, narrow);
  std::memcpy(to, &rounded, sizeof rounded);
}

}  // namespace quire::QUIRE_ISA
