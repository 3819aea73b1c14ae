// 512-bit vectors; with AVX512-BF16 (__AVX512BF16__) also its dot product and conversion.
#pragma once

#include <immintrin.h>

namespace quire::QUIRE_ISA {

constexpr int W = 16;
typedef __m512 f32;
typedef int32_t i32 __attribute__((vector_size(64)));

QUIRE_INLINE __mmask16 first_lanes(int64_t n) { return __mmask16((1u << n) - 1); }

QUIRE_INLINE f32 widen(__m256i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16)); }

QUIRE_INLINE __m256i narrow(f32 v) {
#if defined(__AVX512BF16__)
  return (__m256i)_mm512_cvtneps_pbh(v);
#else
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), quiet);
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
#endif
}

QUIRE_INLINE f32 set1(float v) { return _mm512_set1_ps(v); }
QUIRE_INLINE f32 load(const float* p) { return _mm512_loadu_ps(p); }
QUIRE_INLINE f32 load(const bf16* p) { return widen(_mm256_loadu_si256((const __m256i*)p)); }
QUIRE_INLINE f32 load_n(const float* p, int64_t n) {
  QUIRE_MASKED_READ(p, size_t(n) * sizeof *p);
  return _mm512_maskz_loadu_ps(first_lanes(n), p);
}
QUIRE_INLINE f32 load_n(const bf16* p, int64_t n) {
  QUIRE_MASKED_READ(p, size_t(n) * sizeof *p);
  return widen(_mm256_maskz_loadu_epi16(first_lanes(n), p));
}
QUIRE_INLINE void store(float* p, f32 v) { _mm512_storeu_ps(p, v); }
QUIRE_INLINE void store(bf16* p, f32 v) { _mm256_storeu_si256((__m256i*)p, narrow(v)); }
QUIRE_INLINE void store_n(float* p, f32 v, int64_t n) {
  QUIRE_MASKED_WRITE(p, size_t(n) * sizeof *p);
  _mm512_mask_storeu_ps(p, first_lanes(n), v);
}
QUIRE_INLINE void store_n(bf16* p, f32 v, int64_t n) {
  QUIRE_MASKED_WRITE(p, size_t(n) * sizeof *p);
  _mm256_mask_storeu_epi16(p, first_lanes(n), narrow(v));
}

QUIRE_INLINE f32 fma(f32 a, f32 b, f32 c) { return _mm512_fmadd_ps(a, b, c); }
QUIRE_INLINE f32 max(f32 a, f32 b) { return _mm512_max_ps(a, b); }
QUIRE_INLINE f32 nearest_integer(f32 v) {
  return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
QUIRE_INLINE float reduce_add(f32 v) {
  const __m256 a = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}

QUIRE_INLINE float reduce_max(f32 v) {
  const __m256 a = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  const __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 c = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
}

// A byte for each byte of an index below 16.
struct ByteTable {
  __m512i bytes;

  QUIRE_MEMBER explicit ByteTable(const uint8_t* sixteen)
      : bytes(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)sixteen))) {}
  QUIRE_MEMBER i32 look_up(i32 indices) const { return (i32)_mm512_shuffle_epi8(bytes, (__m512i)indices); }
};

QUIRE_INLINE i32 multiply_pairs(i32 a, i32 b) { return (i32)_mm512_madd_epi16((__m512i)a, (__m512i)b); }

QUIRE_INLINE __mmask16 lane_bits(i32 mask) { return _mm512_movepi32_mask((__m512i)mask); }
QUIRE_INLINE i32 move_together(i32 lanes, i32 mask) {
  return (i32)_mm512_maskz_compress_epi32(lane_bits(mask), (__m512i)lanes);
}

}  // namespace quire::QUIRE_ISA
