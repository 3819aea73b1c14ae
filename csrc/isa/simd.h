// Vectors of float32 as wide as the ISA variant being compiled has them, and the elementary functions on them.
//
// The one-definition rule: the same headers are compiled several times with different machine flags, and the linker
// merges inline functions and template instantiations of equal names. So everything in the kernel headers lives in the
// namespace quire::QUIRE_ISA, and kernels use no inline functions of the standard library. Otherwise a CPU without
// AVX-512 could be handed a function that uses it.
#pragma once

#ifndef QUIRE_ISA
#error "include isa/simd.h only in the files of csrc/isa that define QUIRE_ISA"
#endif

#include <cstring>
#include <type_traits>
#include <utility>

#include "base/common.h"

// Unrolls the loop that follows completely (constant bounds, at most 16), so that arrays of vectors live in registers.
#if defined(__clang__)
#define QUIRE_UNROLL _Pragma("unroll")
#else
#define QUIRE_UNROLL _Pragma("GCC unroll 16")
#endif

#if defined(QUIRE_SIMD_AVX512)
#include "isa/x86/simd_avx512.h"
#elif defined(QUIRE_SIMD_AVX2)
#include "isa/x86/simd_avx2.h"
#elif defined(QUIRE_SIMD_NEON)
#define QUIRE_ARM
#include "isa/arm/simd_neon.h"
#elif defined(QUIRE_SIMD_SVE)
#define QUIRE_ARM
#include "isa/arm/simd_sve.h"
#else
#include "isa/simd_portable.h"
#endif

// Whether lanes can be moved together by a mask.
#if defined(QUIRE_SIMD_AVX512) || defined(QUIRE_SIMD_AVX2)
#define QUIRE_MOVES_LANES
#endif

// Whether pairs of bf16 are multiplied as such, and not as float32.
#if defined(__AVX512BF16__) || defined(QUIRE_ARM_I8MM)
#define QUIRE_MULTIPLIES_PAIRS
#endif

// Each simd_*.h defines, in quire::QUIRE_ISA:
//   W                                      lanes
//   f32, i32                               vectors of W float / int32_t; + - * / < etc. are the compiler's own
//   load, load_n(p, n)                     from float* or bf16*; _n: the first n <= W lanes, the rest 0
//   store, store_n(p, v, n)                to float* or bf16* (to nearest even, NaN stays NaN)
//   set1, fma(a, b, c) = a * b + c         (the portable variant rounds twice)
//   ByteTable                              16 bytes, looked up for each byte of an i32
//   multiply_pairs(a, b)                   a.lower * b.lower + a.upper * b.upper of two int16 in each int32 lane
//   max, reduce_add, reduce_max            max(a, b) is b if either is NaN; reductions are fixed trees
//   lane_bits, move_together               with QUIRE_MOVES_LANES: a mask's bits; its lanes, moved to the beginning

namespace quire::QUIRE_ISA {

// Whether there are 16 registers of 256 bits, around which several loops are built.
#if defined(QUIRE_SIMD_AVX2)
constexpr bool kIsAvx2 = true;
#else
constexpr bool kIsAvx2 = false;
#endif

QUIRE_INLINE i32 as_int(f32 v) { return (i32)v; }
QUIRE_INLINE f32 as_float(i32 v) { return (f32)v; }
QUIRE_INLINE f32 select(i32 mask, f32 a, f32 b) { return mask ? a : b; }
QUIRE_INLINE f32 abs(f32 v) { return as_float(as_int(v) & 0x7fffffff); }

// Keeps the compiler from changing how v is computed, or when. Of several, the order stays.
template <typename Vector>
QUIRE_INLINE void keep_in_register(Vector& v) {
#if defined(__x86_64__)
  asm volatile("" : "+v"(v));
#elif defined(__aarch64__)
  asm volatile("" : "+w"(v));
#else
  asm volatile("" : "+m"(v));
#endif
}

// Keeps the compiler from moving memory accesses across this, such as requests together, which hinder each other then.
QUIRE_INLINE void keep_order() { asm volatile("" ::: "memory"); }

// Lanes of four bytes: W of them from p on, or the one at p in all lanes.
QUIRE_INLINE i32 load_lanes(const void* p) {
  i32 lanes;
  std::memcpy(&lanes, p, sizeof lanes);
  return lanes;
}
QUIRE_INLINE void store_lanes(void* p, i32 lanes) { std::memcpy(p, &lanes, sizeof lanes); }
QUIRE_INLINE i32 set1_lane(const void* p) {
  int32_t bits;
  std::memcpy(&bits, p, sizeof bits);
  return i32{} + bits;
}

// W integers of one or two bytes from p on.
typedef uint8_t u8_lanes __attribute__((vector_size(W)));
typedef int8_t i8_lanes __attribute__((vector_size(W)));
typedef uint16_t u16_lanes __attribute__((vector_size(2 * W)));
template <typename Lanes>
QUIRE_INLINE i32 load_integers(const void* p) {
#if defined(QUIRE_SIMD_AVX512)  // GCC 12 would convert bytes element by element
  const __m128i* bytes = static_cast<const __m128i*>(p);
  if constexpr (std::is_same_v<Lanes, i8_lanes>) return (i32)_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes));
  if constexpr (std::is_same_v<Lanes, u8_lanes>) return (i32)_mm512_cvtepu8_epi32(_mm_loadu_si128(bytes));
#elif defined(QUIRE_SIMD_AVX2)
  const __m128i* bytes = static_cast<const __m128i*>(p);
  if constexpr (std::is_same_v<Lanes, i8_lanes>) return (i32)_mm256_cvtepi8_epi32(_mm_loadl_epi64(bytes));
  if constexpr (std::is_same_v<Lanes, u8_lanes>) return (i32)_mm256_cvtepu8_epi32(_mm_loadl_epi64(bytes));
#elif defined(QUIRE_SIMD_NEON)
  if constexpr (sizeof(Lanes) == 4) {
    uint32_t bits;
    std::memcpy(&bits, p, sizeof bits);
    if constexpr (std::is_same_v<Lanes, i8_lanes>) {
      return (i32)vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(bits))));
    }
    return (i32)vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(bits))));
  }
#elif defined(QUIRE_SIMD_SVE)
  if constexpr (std::is_same_v<Lanes, i8_lanes>) return (i32)svld1sb_s32(all_lanes(), static_cast<const int8_t*>(p));
  if constexpr (std::is_same_v<Lanes, u8_lanes>) return (i32)svld1ub_s32(all_lanes(), static_cast<const uint8_t*>(p));
  if constexpr (std::is_same_v<Lanes, u16_lanes>) return (i32)svld1uh_s32(all_lanes(), static_cast<const uint16_t*>(p));
#endif
  Lanes lanes;
  std::memcpy(&lanes, p, sizeof lanes);
  return __builtin_convertvector(lanes, i32);
}

// The lanes of the first (kHalf 1: second) halves of a and b by turns: a's first, b's first, a's second, ...
template <int kHalf, typename Vector, size_t... kLanes>
QUIRE_INLINE Vector interleave(Vector a, Vector b, std::index_sequence<kLanes...>) {
  constexpr int kCount = sizeof...(kLanes);
  return __builtin_shufflevector(a, b, (kHalf * kCount / 2 + int(kLanes) / 2 + int(kLanes) % 2 * kCount)...);
}
template <int kHalf>
QUIRE_INLINE i32 interleave(i32 a, i32 b) {
  return interleave<kHalf>(a, b, std::make_index_sequence<W>());
}

// The even (kOdd 1: odd) lanes of a, and then those of b: undoes both halves of interleave.
template <int kOdd, size_t... kLanes>
QUIRE_INLINE i32 every_other(i32 a, i32 b, std::index_sequence<kLanes...>) {
  return __builtin_shufflevector(a, b, (2 * int(kLanes) + kOdd)...);
}
template <int kOdd>
QUIRE_INLINE i32 every_other(i32 a, i32 b) {
  return every_other<kOdd>(a, b, std::make_index_sequence<W>());
}

// Lanes 2 i and 2 i + 1 exchanged.
typedef uint64_t u64_pairs __attribute__((vector_size(4 * W)));
QUIRE_INLINE f32 swap_neighbours(f32 v) {
  const u64_pairs both = (u64_pairs)v;
  return (f32)(both << 32 | both >> 32);
}

// W lanes of two bf16, the earlier one in the lower half.
typedef i32 pairs;
QUIRE_INLINE f32 lower(pairs p) { return as_float(p << 16); }
QUIRE_INLINE f32 upper(pairs p) { return as_float(p & int32_t(0xffff0000)); }

// acc + a.lower * b.lower + a.upper * b.upper per lane.
QUIRE_INLINE f32 dot2(f32 acc, pairs a, pairs b) {
#if defined(__AVX512BF16__)
  return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
#elif defined(QUIRE_ARM_I8MM)
  return add_pairs(acc, a, b);
#else
  return fma(upper(a), upper(b), fma(lower(a), lower(b), acc));
#endif
}

// Four bytes of a T: one float, or a pair of bf16. dot adds the products of two lanes' elements.
template <typename T>
struct Lane;

template <>
struct Lane<float> {
  using Vector = f32;
  QUIRE_INLINE Vector load(const float* p) { return quire::QUIRE_ISA::load(p); }
  QUIRE_INLINE Vector broadcast(const float* p) { return set1(*p); }
  QUIRE_INLINE f32 dot(f32 acc, Vector a, Vector b) { return fma(a, b, acc); }
};

template <>
struct Lane<bf16> {
  using Vector = pairs;
  QUIRE_INLINE Vector load(const bf16* p) { return load_lanes(p); }
  QUIRE_INLINE Vector broadcast(const bf16* p) { return set1_lane(p); }
  QUIRE_INLINE f32 dot(f32 acc, Vector a, Vector b) { return dot2(acc, a, b); }
};

// Two vectors one behind the other.
template <typename T>
QUIRE_INLINE void store_two(T* p, f32 first, f32 second) {
#if defined(__AVX512BF16__)
  if constexpr (sizeof(T) == sizeof(bf16)) {
    _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(second, first));
    return;
  }
#elif defined(QUIRE_SIMD_AVX2)
  if constexpr (sizeof(T) == sizeof(bf16)) {
    _mm256_storeu_si256((__m256i*)p, narrow_two(first, second));
    return;
  }
#endif
  store(p, first);
  store(p + W, second);
}

// 0, 1, 2, ...
QUIRE_INLINE i32 lane_indices() {
  alignas(64) static const int32_t kLanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load_lanes(kLanes);
}

// v in the first n lanes, 0 in the others.
QUIRE_INLINE f32 keep_n(f32 v, int64_t n) { return as_float(as_int(v) & (lane_indices() < int32_t(n))); }

// The polynomial in x with these coefficients, that of the highest power first.
template <typename... Coefficients>
QUIRE_INLINE f32 polynomial(f32 x, float highest, Coefficients... others) {
  f32 sum = set1(highest);
  ((sum = fma(sum, x, set1(others))), ...);
  return sum;
}

// e^v = 2^power * (1 + excess), where power is an integer.
struct Exponential {
  f32 power, excess;
};

QUIRE_INLINE Exponential split_exp(f32 v) {
  const f32 shifter = set1(12582912.0f);  // 1.5 * 2^23: adding and subtracting it rounds to an integer
  const f32 power = (v * set1(1.44269504f)) + shifter - shifter;
  const f32 upper_rest = fma(power, set1(-0.693145752f), v);  // ln 2 in two parts; the first has spare low bits
  const f32 r = fma(power, set1(-1.42860677e-6f), upper_rest);
  return {power, fma(polynomial(r, 1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f), r * r, r)};
}

constexpr float kLowestExp = -87.33654f;

// e^v within about 1 ulp (2 without fused multiply-add). 0 below -87.3 (no denormals), inf above 88.72, NaN for NaN.
QUIRE_INLINE f32 exp(f32 v) {
  const f32 lowest = set1(kLowestExp), highest = set1(88.72283f);
  const Exponential parts = split_exp(select(v > lowest, select(v < highest, v, highest), lowest));
  // 2^power in two factors: power may be 128, which one exponent field cannot hold.
  const i32 exponent = __builtin_convertvector(parts.power, i32);
  const i32 half = exponent >> 1;
  f32 result = (parts.excess + 1.0f) * as_float((half + 127) << 23) * as_float((exponent - half + 127) << 23);
  result = select(v < lowest, set1(0.0f), result);
  result = select(v > highest, set1(__builtin_inff()), result);
  return select(v == v, result, v);
}

// e^v for v <= 0, as exp but without the cases that cannot happen. NaN gives 0.
QUIRE_INLINE f32 exp_negative(f32 v) {
  const f32 lowest = set1(kLowestExp);
  const Exponential parts = split_exp(max(v, lowest));
  const f32 scaled = as_float(as_int(parts.excess + 1.0f) + (__builtin_convertvector(parts.power, i32) << 23));
  return as_float(as_int(scaled) & (v > lowest));
}

// e^v - 1 for v <= 0, within 5e-7 of its value. NaN for NaN.
QUIRE_INLINE f32 expm1_negative(f32 v) {
  const Exponential parts = split_exp(max(set1(kLowestExp), v));
  const f32 power = as_float((__builtin_convertvector(parts.power, i32) + 127) << 23);
  return fma(power, parts.excess, power - 1.0f);
}

// Within 5e-7 of its value. NaN for NaN.
QUIRE_INLINE f32 tanh(f32 v) {
  const f32 e = expm1_negative(-2.0f * abs(v));
  return as_float(as_int(abs(e / (2.0f + e))) | (as_int(v) & int32_t(0x80000000)));
}

}  // namespace quire::QUIRE_ISA
