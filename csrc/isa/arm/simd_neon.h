// 128-bit vectors of 64-bit Arm. Two macros of the variant say what it may use: QUIRE_ARM_DOT the dot products of
// bytes (FEAT_DotProd), QUIRE_ARM_I8MM also products of matrices of bytes and of bf16 (FEAT_I8MM, FEAT_BF16).
#pragma once

#include <arm_neon.h>

namespace quire::QUIRE_ISA {

constexpr int W = 4;
typedef float f32 __attribute__((vector_size(16)));
typedef int32_t i32 __attribute__((vector_size(16)));
typedef uint16_t u16x4 __attribute__((vector_size(8)));

QUIRE_INLINE f32 widen(u16x4 v) { return (f32)vshll_n_u16((uint16x4_t)v, 16); }

QUIRE_INLINE u16x4 narrow(f32 v) {
#if defined(QUIRE_ARM_I8MM)
  return (u16x4)vcvt_bf16_f32((float32x4_t)v);
#else
  const uint32x4_t bits = (uint32x4_t)v, odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
  const uint32x4_t is_number = vceqq_f32((float32x4_t)v, (float32x4_t)v);
  return (u16x4)vshrn_n_u32(vbslq_u32(is_number, rounded, quiet), 16);
#endif
}

QUIRE_INLINE f32 set1(float v) { return f32{v, v, v, v}; }
QUIRE_INLINE f32 load(const float* p) { return (f32)vld1q_f32(p); }
QUIRE_INLINE f32 load(const bf16* p) { return widen((u16x4)vld1_u16(&p->bits)); }
QUIRE_INLINE f32 load_n(const float* p, int64_t n) {
  float lanes[W] = {};
  for (int64_t i = 0; i < n; ++i) lanes[i] = p[i];
  return load(lanes);
}
QUIRE_INLINE f32 load_n(const bf16* p, int64_t n) {
  bf16 lanes[W] = {};
  for (int64_t i = 0; i < n; ++i) lanes[i] = p[i];
  return load(lanes);
}
QUIRE_INLINE void store(float* p, f32 v) { vst1q_f32(p, (float32x4_t)v); }
QUIRE_INLINE void store(bf16* p, f32 v) { vst1_u16(&p->bits, (uint16x4_t)narrow(v)); }
QUIRE_INLINE void store_n(float* p, f32 v, int64_t n) {
  float lanes[W];
  store(lanes, v);
  for (int64_t i = 0; i < n; ++i) p[i] = lanes[i];
}
QUIRE_INLINE void store_n(bf16* p, f32 v, int64_t n) {
  bf16 lanes[W];
  store(lanes, v);
  for (int64_t i = 0; i < n; ++i) p[i] = lanes[i];
}

QUIRE_INLINE f32 fma(f32 a, f32 b, f32 c) { return (f32)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
QUIRE_INLINE f32 max(f32 a, f32 b) { return a > b ? a : b; }

QUIRE_INLINE float reduce_add(f32 v) { return (v[0] + v[2]) + (v[1] + v[3]); }
QUIRE_INLINE float reduce_max(f32 v) {
  const float a = v[0] > v[2] ? v[0] : v[2], b = v[1] > v[3] ? v[1] : v[3];
  return a > b ? a : b;
}

QUIRE_INLINE i32 multiply_pairs(i32 a, i32 b) {
  const int16x8_t left = (int16x8_t)a, right = (int16x8_t)b;
  return (i32)vpaddq_s32(vmull_s16(vget_low_s16(left), vget_low_s16(right)), vmull_high_s16(left, right));
}

// A byte for each byte of an index below 16.
struct ByteTable {
  uint8x16_t bytes;

  QUIRE_MEMBER explicit ByteTable(const uint8_t* sixteen) : bytes(vld1q_u8(sixteen)) {}
  QUIRE_MEMBER i32 look_up(i32 indices) const { return (i32)vqtbl1q_u8(bytes, (uint8x16_t)indices); }
};

// Eight bytes of a row, and those of two rows one behind the other (in each 128 bits).
typedef int8x8_t Eight;
QUIRE_INLINE Eight eight_of(uint64_t bits) { return vcreate_s8(bits); }
QUIRE_INLINE i32 side_by_side(Eight a, Eight b) { return (i32)vcombine_s8(a, b); }

// What is added to each lane, or to a matrix of 2 x 2 in each 128 bits:
//   add_signed_fours(sum, a, b)   four products of signed bytes
//   add_fours(sum, a, b)          four products of unsigned and signed bytes
//   add_four<kFour>(sum, a, b)    the same, where the signed ones are the first or the second four of eight
//   add_matrices(sums, a, b)      a of 2 x 8 unsigned bytes times b of 8 x 2 signed ones; or 2 x 4 bf16 times 4 x 2;
//                                 b's columns lie one behind the other
//   add_pairs(sum, a, b)          two products of bf16
#if defined(QUIRE_ARM_DOT)
QUIRE_INLINE i32 add_signed_fours(i32 sum, i32 a, i32 b) {
  return (i32)vdotq_s32((int32x4_t)sum, (int8x16_t)a, (int8x16_t)b);
}
#endif
#if defined(QUIRE_ARM_I8MM)
QUIRE_INLINE i32 add_fours(i32 sum, i32 a, i32 b) {
  return (i32)vusdotq_s32((int32x4_t)sum, (uint8x16_t)a, (int8x16_t)b);
}
template <int kFour>
QUIRE_INLINE i32 add_four(i32 sum, i32 a, Eight b) {
  return (i32)vusdotq_lane_s32((int32x4_t)sum, (uint8x16_t)a, b, kFour);
}
QUIRE_INLINE i32 add_matrices(i32 sums, i32 a, i32 b) {
  return (i32)vusmmlaq_s32((int32x4_t)sums, (uint8x16_t)a, (int8x16_t)b);
}
QUIRE_INLINE f32 add_matrices(f32 sums, i32 a, i32 b) {
  return (f32)vbfmmlaq_f32((float32x4_t)sums, (bfloat16x8_t)a, (bfloat16x8_t)b);
}
QUIRE_INLINE f32 add_pairs(f32 sum, i32 a, i32 b) {
  return (f32)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
}
#endif

}  // namespace quire::QUIRE_ISA
