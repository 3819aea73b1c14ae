// 256-bit vectors with fused multiply-add.
#pragma once

#include <immintrin.h>

namespace quire::QUIRE_ISA {

constexpr int W = 8;
typedef __m256 f32;
typedef int32_t i32 __attribute__((vector_size(32)));

QUIRE_INLINE __m256i first_lanes(int64_t n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(int32_t(n)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

QUIRE_INLINE f32 widen(__m128i v) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16)); }

// The bits of v, if it is a number, rounded to a bf16 in the upper half.
QUIRE_INLINE __m256i rounded(f32 v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  return _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
}

QUIRE_INLINE __m128i narrow(f32 v) {
  const __m256i quiet = _mm256_or_si256(_mm256_castps_si256(v), _mm256_set1_epi32(0x400000));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  const __m256i upper_halves = _mm256_srli_epi32(_mm256_blendv_epi8(rounded(v), quiet, is_nan), 16);
  const __m256i packed = _mm256_packus_epi32(upper_halves, upper_halves);
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
}

// Two at once take less time than one after the other, unless there is a NaN.
QUIRE_INLINE __m256i narrow_two(f32 first, f32 second) {
  if (_mm256_movemask_ps(_mm256_cmp_ps(first, second, _CMP_UNORD_Q)) != 0) {
    return _mm256_set_m128i(narrow(second), narrow(first));
  }
  const __m256i packed =
      _mm256_packus_epi32(_mm256_srli_epi32(rounded(first), 16), _mm256_srli_epi32(rounded(second), 16));
  return _mm256_permute4x64_epi64(packed, 0xd8);
}

QUIRE_INLINE f32 set1(float v) { return _mm256_set1_ps(v); }
QUIRE_INLINE f32 load(const float* p) { return _mm256_loadu_ps(p); }
QUIRE_INLINE f32 load(const bf16* p) { return widen(_mm_loadu_si128((const __m128i*)p)); }
QUIRE_INLINE f32 load_n(const float* p, int64_t n) {
  QUIRE_MASKED_READ(p, size_t(n) * sizeof *p);
  return _mm256_maskload_ps(p, first_lanes(n));
}
QUIRE_INLINE f32 load_n(const bf16* p, int64_t n) {
  bf16 lanes[W] = {};
  for (int64_t i = 0; i < n; ++i) lanes[i] = p[i];
  return load(lanes);
}
QUIRE_INLINE void store(float* p, f32 v) { _mm256_storeu_ps(p, v); }
QUIRE_INLINE void store(bf16* p, f32 v) { _mm_storeu_si128((__m128i*)p, narrow(v)); }
QUIRE_INLINE void store_n(float* p, f32 v, int64_t n) {
  QUIRE_MASKED_WRITE(p, size_t(n) * sizeof *p);
  _mm256_maskstore_ps(p, first_lanes(n), v);
}
QUIRE_INLINE void store_n(bf16* p, f32 v, int64_t n) {
  bf16 lanes[W];
  store(lanes, v);
  for (int64_t i = 0; i < n; ++i) p[i] = lanes[i];
}

QUIRE_INLINE f32 fma(f32 a, f32 b, f32 c) { return _mm256_fmadd_ps(a, b, c); }
QUIRE_INLINE f32 max(f32 a, f32 b) { return _mm256_max_ps(a, b); }
QUIRE_INLINE float reduce_add(f32 v) {
  const __m128 b = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}

QUIRE_INLINE float reduce_max(f32 v) {
  const __m128 b = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 c = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
}

// A byte for each byte of an index below 16.
struct ByteTable {
  __m256i bytes;

  QUIRE_MEMBER explicit ByteTable(const uint8_t* sixteen)
      : bytes(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)sixteen))) {}
  QUIRE_MEMBER i32 look_up(i32 indices) const { return (i32)_mm256_shuffle_epi8(bytes, (__m256i)indices); }
};

QUIRE_INLINE i32 multiply_pairs(i32 a, i32 b) { return (i32)_mm256_madd_epi16((__m256i)a, (__m256i)b); }

QUIRE_INLINE unsigned lane_bits(i32 mask) { return static_cast<unsigned>(_mm256_movemask_ps((f32)mask)); }

// For each set of lanes, a byte with the number of each of its lanes.
struct LaneLists {
  uint64_t of[256] = {};

  constexpr LaneLists() {
    for (uint64_t bits = 0; bits < 256; ++bits) {
      int count = 0;
      for (uint64_t lane = 0; lane < 8; ++lane) {
        if (bits >> lane & 1) of[bits] |= lane << 8 * count++;
      }
    }
  }
};
constexpr LaneLists kLaneLists;

QUIRE_INLINE i32 move_together(i32 lanes, i32 mask) {
  const __m128i numbers = _mm_cvtsi64_si128(static_cast<int64_t>(kLaneLists.of[lane_bits(mask)]));
  return (i32)_mm256_permutevar8x32_epi32((__m256i)lanes, _mm256_cvtepu8_epi32(numbers));
}

}  // namespace quire::QUIRE_ISA
