// 256-bit vectors of 64-bit Arm's Scalable Vector Extension (SVE), for processors whose vectors are that long and that
// have products of matrices of bytes and of bf16 (FEAT_I8MM, FEAT_BF16). Compiled with -msve-vector-bits=256.
#pragma once

#include <arm_sve.h>

namespace quire::QUIRE_ISA {

constexpr int W = __ARM_FEATURE_SVE_BITS / 32;
typedef float f32 __attribute__((vector_size(4 * W)));
typedef int32_t i32 __attribute__((vector_size(4 * W)));

QUIRE_INLINE svbool_t all_lanes() { return svptrue_b32(); }
QUIRE_INLINE svbool_t first_lanes(int64_t n) { return svwhilelt_b32(int64_t{0}, n); }

// Lanes of 32 bits with a bf16 in the lower half.
QUIRE_INLINE f32 widen(svuint32_t v) { return (f32)svlsl_n_u32_x(all_lanes(), v, 16); }
QUIRE_INLINE svuint32_t narrow(f32 v) { return svreinterpret_u32_bf16(svcvt_bf16_f32_x(all_lanes(), (svfloat32_t)v)); }

QUIRE_INLINE f32 set1(float v) { return (f32)svdup_n_f32(v); }
QUIRE_INLINE f32 load(const float* p) { return (f32)svld1_f32(all_lanes(), p); }
QUIRE_INLINE f32 load(const bf16* p) { return widen(svld1uh_u32(all_lanes(), &p->bits)); }
QUIRE_INLINE f32 load_n(const float* p, int64_t n) { return (f32)svld1_f32(first_lanes(n), p); }
QUIRE_INLINE f32 load_n(const bf16* p, int64_t n) { return widen(svld1uh_u32(first_lanes(n), &p->bits)); }
QUIRE_INLINE void store(float* p, f32 v) { svst1_f32(all_lanes(), p, (svfloat32_t)v); }
QUIRE_INLINE void store(bf16* p, f32 v) { svst1h_u32(all_lanes(), &p->bits, narrow(v)); }
QUIRE_INLINE void store_n(float* p, f32 v, int64_t n) { svst1_f32(first_lanes(n), p, (svfloat32_t)v); }
QUIRE_INLINE void store_n(bf16* p, f32 v, int64_t n) { svst1h_u32(first_lanes(n), &p->bits, narrow(v)); }

// Of svmla_f32_x GCC 12 keeps sums twice in long loops, since the intrinsic's type is another one than f32.
QUIRE_INLINE f32 fma(f32 a, f32 b, f32 c) {
  asm("fmla %0.s, %1/m, %2.s, %3.s" : "+w"(c) : "Upl"(all_lanes()), "w"(a), "w"(b));
  return c;
}
QUIRE_INLINE f32 max(f32 a, f32 b) { return a > b ? a : b; }
QUIRE_INLINE float reduce_add(f32 v) { return svaddv_f32(all_lanes(), (svfloat32_t)v); }
QUIRE_INLINE float reduce_max(f32 v) { return svmaxnmv_f32(all_lanes(), (svfloat32_t)v); }

QUIRE_INLINE i32 multiply_pairs(i32 a, i32 b) { return ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16); }

// A byte for each byte of an index below 16.
struct ByteTable {
  i32 bytes;

  QUIRE_MEMBER explicit ByteTable(const uint8_t* sixteen)
      : bytes((i32)svreinterpret_s32_u8(svld1rq_u8(svptrue_b8(), sixteen))) {}
  QUIRE_MEMBER i32 look_up(i32 indices) const {
    const svuint8_t table = svreinterpret_u8_s32((svint32_t)bytes);
    return (i32)svreinterpret_s32_u8(svtbl_u8(table, svreinterpret_u8_s32((svint32_t)indices)));
  }
};

// As in isa/arm/simd_neon.h. Eight bytes stand in each 64 bits of a vector.
typedef i32 Eight;
QUIRE_INLINE Eight eight_of(uint64_t bits) { return (i32)svreinterpret_s32_u64(svdup_n_u64(bits)); }
QUIRE_INLINE i32 side_by_side(Eight a, Eight b) {
  const svuint64_t first = svreinterpret_u64_s32((svint32_t)a), second = svreinterpret_u64_s32((svint32_t)b);
  return (i32)svreinterpret_s32_u64(svzip1_u64(first, second));
}

QUIRE_INLINE svint8_t signed_bytes(i32 v) { return svreinterpret_s8_s32((svint32_t)v); }
QUIRE_INLINE svuint8_t unsigned_bytes(i32 v) { return svreinterpret_u8_s32((svint32_t)v); }
QUIRE_INLINE svbfloat16_t halves_of(i32 v) { return svreinterpret_bf16_s32((svint32_t)v); }

QUIRE_INLINE i32 add_signed_fours(i32 sum, i32 a, i32 b) {
  return (i32)svdot_s32((svint32_t)sum, signed_bytes(a), signed_bytes(b));
}
QUIRE_INLINE i32 add_fours(i32 sum, i32 a, i32 b) {
  return (i32)svusdot_s32((svint32_t)sum, unsigned_bytes(a), signed_bytes(b));
}
template <int kFour>
QUIRE_INLINE i32 add_four(i32 sum, i32 a, Eight b) {
  return (i32)svusdot_lane_s32((svint32_t)sum, unsigned_bytes(a), signed_bytes(b), kFour);
}
QUIRE_INLINE i32 add_matrices(i32 sums, i32 a, i32 b) {
  return (i32)svusmmla_s32((svint32_t)sums, unsigned_bytes(a), signed_bytes(b));
}
QUIRE_INLINE f32 add_matrices(f32 sums, i32 a, i32 b) {
  return (f32)svbfmmla_f32((svfloat32_t)sums, halves_of(a), halves_of(b));
}
QUIRE_INLINE f32 add_pairs(f32 sum, i32 a, i32 b) {
  return (f32)svbfdot_f32((svfloat32_t)sum, halves_of(a), halves_of(b));
}

}  // namespace quire::QUIRE_ISA
