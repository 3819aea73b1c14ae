// Sums of four products of bytes: weights in [0, 255] times x in [-127, 127], in int32. Every variant gives the same.
#pragma once

#include "isa/simd.h"

namespace quire::QUIRE_ISA {

#if defined(__AVX512VNNI__)
constexpr bool kOverlaps = true;  // whether registers suffice to unpack, multiply and scale at the same time
using XValue = int8_t;
using Quads = i32;

QUIRE_INLINE Quads weight_quads(i32 bytes) { return bytes; }
QUIRE_INLINE Quads set1_quad(const XValue* four) { return set1_lane(four); }
QUIRE_INLINE void store_values(XValue* to, i32 values) {
  _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)values));
}
// acc + w[0] x[0] + ... + w[3] x[3] in each lane.
QUIRE_INLINE i32 dot4(i32 acc, Quads w, Quads x) {
  return (i32)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)x);
}
#else
constexpr bool kOverlaps = false;
using XValue = int16_t;  // fours are kept in the order 0, 2, 1, 3
struct Quads {
  i32 even, odd;  // two int16 in each lane
};

QUIRE_INLINE Quads weight_quads(i32 bytes) { return {bytes & 0x00ff00ff, (bytes >> 8) & 0x00ff00ff}; }
QUIRE_INLINE Quads set1_quad(const XValue* four) { return {set1_lane(four), set1_lane(four + 2)}; }
QUIRE_INLINE void store_values(XValue* to, i32 values) {
  for (int lane = 0; lane < W; lane += 4) {
    to[lane] = XValue(values[lane]);
    to[lane + 1] = XValue(values[lane + 2]);
    to[lane + 2] = XValue(values[lane + 1]);
    to[lane + 3] = XValue(values[lane + 3]);
  }
}
QUIRE_INLINE i32 dot4(i32 acc, const Quads& w, const Quads& x) {
  return acc + multiply_pairs(w.even, x.even) + multiply_pairs(w.odd, x.odd);
}
#endif

}  // namespace quire::QUIRE_ISA
