// Products of int16 pairs, made of the bytes of an int8 KV cache. Sums are exact int32: their order does not matter,
// and every instruction set gives the same.
#pragma once

#include "isa/simd.h"

namespace quire::QUIRE_ISA {

typedef int16_t halves __attribute__((vector_size(sizeof(i32))));

// Four bytes of each lane as two pairs: the first and third, the second and fourth.
struct BytePairs {
  i32 even, odd;
};

QUIRE_INLINE BytePairs load_byte_pairs(const int8_t* p) {
  halves lanes;
  std::memcpy(&lanes, p, sizeof lanes);
  return {(i32)((lanes << 8) >> 8), (i32)(lanes >> 8)};
}

QUIRE_INLINE void store(int16_t* p, i32 v) {
  typedef int16_t narrow_int __attribute__((vector_size(2 * W)));
  const auto narrowed = __builtin_convertvector(v, narrow_int);
  std::memcpy(p, &narrowed, sizeof narrowed);
}

// acc + a.lower * b.lower + a.upper * b.upper in each lane.
QUIRE_INLINE i32 add_pairs(i32 acc, i32 a, i32 b) {
#if defined(__AVX512VNNI__)
  return (i32)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#elif defined(__AVXVNNI__)
  return (i32)_mm256_dpwssd_avx_epi32((__m256i)acc, (__m256i)a, (__m256i)b);
#else
  return acc + multiply_pairs(a, b);
#endif
}

// pair_rows(a, b, n, low, high): the pairs (a[i], b[i]) for i < n <= 2 W, then zeros, in some order that in_order
// undoes.
#if defined(QUIRE_SIMD_AVX512)
QUIRE_INLINE void pair_rows(const int8_t* a, const int8_t* b, int64_t n, i32& low, i32& high) {
  const __mmask32 mask = n >= 32 ? ~0u : (1u << n) - 1;
  QUIRE_MASKED_READ(a, size_t(n));
  QUIRE_MASKED_READ(b, size_t(n));
  const __m512i wide_a = _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(mask, a));
  const __m512i wide_b = _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(mask, b));
  low = (i32)_mm512_unpacklo_epi16(wide_a, wide_b);
  high = (i32)_mm512_unpackhi_epi16(wide_a, wide_b);
}
QUIRE_INLINE void in_order(i32& low, i32& high) {
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  const __m512i a = (__m512i)low, b = (__m512i)high;
  low = (i32)_mm512_permutex2var_epi32(a, first, b);
  high = (i32)_mm512_permutex2var_epi32(a, second, b);
}
#if defined(__AVX512BF16__)
// Of bf16, already in order.
QUIRE_INLINE void pair_rows(const bf16* a, const bf16* b, int64_t n, pairs& low, pairs& high) {
  const __mmask32 mask = n >= 32 ? ~0u : (1u << n) - 1;
  QUIRE_MASKED_READ(a, size_t(n) * sizeof *a);
  QUIRE_MASKED_READ(b, size_t(n) * sizeof *b);
  const __m512i row_a = _mm512_maskz_loadu_epi16(mask, a), row_b = _mm512_maskz_loadu_epi16(mask, b);
  const i32 first = i32{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} * 0x10001 + 0x200000;
  low = (pairs)_mm512_permutex2var_epi16(row_a, (__m512i)first, row_b);
  high = (pairs)_mm512_permutex2var_epi16(row_a, (__m512i)(first + 0x100010), row_b);
}
#endif
#elif defined(QUIRE_SIMD_AVX2)
QUIRE_INLINE __m256i widen_bytes(const int8_t* p, int64_t n) {
  if (n == 16) return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
  int8_t bytes[16] = {};
  std::memcpy(bytes, p, static_cast<size_t>(n));
  return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)bytes));
}
QUIRE_INLINE void pair_rows(const int8_t* a, const int8_t* b, int64_t n, i32& low, i32& high) {
  const __m256i wide_a = widen_bytes(a, n), wide_b = widen_bytes(b, n);
  low = (i32)_mm256_unpacklo_epi16(wide_a, wide_b);
  high = (i32)_mm256_unpackhi_epi16(wide_a, wide_b);
}
QUIRE_INLINE void in_order(i32& low, i32& high) {
  const __m256i a = (__m256i)low, b = (__m256i)high;
  low = (i32)_mm256_permute2x128_si256(a, b, 0x20);
  high = (i32)_mm256_permute2x128_si256(a, b, 0x31);
}
#elif defined(QUIRE_ARM)
// Already in order.
#if defined(QUIRE_SIMD_SVE)
QUIRE_INLINE halves load_halves_of_pairs(const int8_t* p, int64_t n) {
  return (halves)svld1sb_s16(svwhilelt_b16(int64_t{0}, n), p);
}
QUIRE_INLINE halves load_halves_of_pairs(const bf16* p, int64_t n) {
  return (halves)svreinterpret_s16_u16(svld1_u16(svwhilelt_b16(int64_t{0}, n), &p->bits));
}
#else  // fewer than 2 W elements are read by way of zeros
QUIRE_INLINE halves load_halves_of_pairs(const int8_t* p, int64_t n) {
  if (n == 2 * W) return (halves)vmovl_s8(vld1_s8(p));
  int8_t bytes[2 * W] = {};
  std::memcpy(bytes, p, static_cast<size_t>(n));
  return (halves)vmovl_s8(vld1_s8(bytes));
}
QUIRE_INLINE halves load_halves_of_pairs(const bf16* p, int64_t n) {
  if (n == 2 * W) return (halves)load_lanes(p);
  bf16 elements[2 * W] = {};
  std::memcpy(elements, p, static_cast<size_t>(n) * sizeof *p);
  return (halves)load_lanes(elements);
}
#endif
template <typename C>
QUIRE_INLINE void pair_rows(const C* a, const C* b, int64_t n, i32& low, i32& high) {
  const halves row_a = load_halves_of_pairs(a, n), row_b = load_halves_of_pairs(b, n);
  low = (i32)interleave<0>(row_a, row_b, std::make_index_sequence<2 * W>());
  high = (i32)interleave<1>(row_a, row_b, std::make_index_sequence<2 * W>());
}
QUIRE_INLINE void in_order(i32&, i32&) {}
#else
QUIRE_INLINE i32 widen_bytes(const int8_t* p, int64_t n) {
  typedef int8_t bytes_in __attribute__((vector_size(W)));
  bytes_in bytes = {};
  if (n >= W) {
    std::memcpy(&bytes, p, W);
  } else if (n > 0) {
    std::memcpy(&bytes, p, static_cast<size_t>(n));
  }
  return __builtin_convertvector(bytes, i32);
}
QUIRE_INLINE void pair_rows(const int8_t* a, const int8_t* b, int64_t n, i32& low, i32& high) {
  low = (widen_bytes(a, n) & 0xffff) | (widen_bytes(b, n) << 16);
  high = (widen_bytes(a + W, n - W) & 0xffff) | (widen_bytes(b + W, n - W) << 16);
}
QUIRE_INLINE void in_order(i32&, i32&) {}
#endif

}  // namespace quire::QUIRE_ISA
