// Vectors of float32 as wide as the ISA variant being compiled has them, and the elementary functions on them.
//
// The one-definition rule: the same headers are compiled several times with different machine flags, and the linker
// merges inline functions and template instantiations of equal names. So everything in the kernel headers lives in the
// namespace quire::QUIRE_ISA, and kernels use no inline functions of the standard library. Otherwise a CPU without
// AVX-512 could be handed a function that uses it.
#pragma once

#ifndef QUIRE_ISA
#error "include isa/simd.h from csrc/isa/*.cpp only, which define QUIRE_ISA"
#endif

#include <cstring>

#include "common.h"

// Unrolls the loop that follows completely (constant bounds, at most 16), so that arrays of vectors live in registers.
#if defined(__clang__)
#define QUIRE_UNROLL _Pragma("unroll")
#else
#define QUIRE_UNROLL _Pragma("GCC unroll 16")
#endif

#if defined(QUIRE_SIMD_AVX512)
#include "isa/simd_avx512.h"
#elif defined(QUIRE_SIMD_AVX2)
#include "isa/simd_avx2.h"
#else
#include "isa/simd_portable.h"
#endif

// Each isa/simd_*.h defines, in quire::QUIRE_ISA:
//   W                                      lanes
//   f32, i32                               vectors of W float / int32_t; + - * / < etc. are the compiler's own
//   pairs                                  W lanes of two bf16, the earlier one in the lower half
//   load, load_n(p, n)                     from float* or bf16*; _n: the first n <= W lanes, the rest 0
//   store, store_n(p, v, n)                to float* or bf16* (to nearest even, NaN stays NaN)
//   load_pairs(p), set1_pair(p)            W pairs; one pair in all lanes
//   set1, fma(a, b, c) = a * b + c         (the portable variant rounds twice, except on arm64)
//   dot2(acc, a, b)                        acc + a.lower * b.lower + a.upper * b.upper per lane
//   multiply_pairs(a, b)                   a.lower * b.lower + a.upper * b.upper of two int16 in each int32 lane
//   keep_in_register(v)                    hides v from the optimiser, for benchmarks
//   max, select(mask, a, b), reduce_add, reduce_max    max(a, b) is b if either is NaN; reductions are fixed trees

namespace quire::QUIRE_ISA {

QUIRE_INLINE i32 as_int(f32 v) { return (i32)v; }
QUIRE_INLINE f32 as_float(i32 v) { return (f32)v; }
QUIRE_INLINE f32 abs(f32 v) { return as_float(as_int(v) & 0x7fffffff); }

// v in the first n lanes, 0 in the others.
QUIRE_INLINE f32 keep_n(f32 v, int64_t n) {
  alignas(64) static const int32_t kLanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  i32 lanes;
  std::memcpy(&lanes, kLanes, sizeof lanes);
  return as_float(as_int(v) & (lanes < int32_t(n)));
}

// e^v within about 1 ulp (2 without fused multiply-add). 0 below -87.3 (no denormals), inf above 88.72, NaN for NaN.
QUIRE_INLINE f32 exp(f32 v) {
  const f32 lowest = set1(-87.33654f), highest = set1(88.72283f);
  const f32 inside = select(v > lowest, select(v < highest, v, highest), lowest);
  const f32 shifter = set1(12582912.0f);  // 1.5 * 2^23: adding and subtracting it rounds to an integer
  const f32 power = (inside * set1(1.44269504f)) + shifter - shifter;
  f32 r = fma(power, set1(-0.693145752f), inside);  // ln 2 in two parts; the first has spare low bits
  r = fma(power, set1(-1.42860677e-6f), r);
  f32 p = set1(1.0f / 720);
  p = fma(p, r, set1(1.0f / 120));
  p = fma(p, r, set1(1.0f / 24));
  p = fma(p, r, set1(1.0f / 6));
  p = fma(p, r, set1(0.5f));
  p = fma(p, r * r, r);
  p = p + 1.0f;
  // 2^power in two factors: power may be 128, which one exponent field cannot hold.
  const i32 exponent = __builtin_convertvector(power, i32);
  const i32 half = exponent >> 1;
  f32 result = p * as_float((half + 127) << 23) * as_float((exponent - half + 127) << 23);
  result = select(v < lowest, set1(0.0f), result);
  result = select(v > highest, set1(__builtin_inff()), result);
  return select(v == v, result, v);
}

// e^v for v <= 0, as exp but without the cases that cannot happen. NaN gives 0.
QUIRE_INLINE f32 exp_negative(f32 v) {
  const f32 lowest = set1(-87.33654f), shifter = set1(12582912.0f);
  const f32 inside = max(v, lowest);
  const f32 power = (inside * set1(1.44269504f)) + shifter - shifter;
  f32 r = fma(power, set1(-0.693145752f), inside);
  r = fma(power, set1(-1.42860677e-6f), r);
  f32 p = set1(1.0f / 720);
  p = fma(p, r, set1(1.0f / 120));
  p = fma(p, r, set1(1.0f / 24));
  p = fma(p, r, set1(1.0f / 6));
  p = fma(p, r, set1(0.5f));
  p = fma(p, r * r, r);
  p = p + 1.0f;
  const f32 scaled = as_float(as_int(p) + (__builtin_convertvector(power, i32) << 23));
  return as_float(as_int(scaled) & (v > lowest));
}

}  // namespace quire::QUIRE_ISA
