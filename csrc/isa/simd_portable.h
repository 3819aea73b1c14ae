// 128-bit vectors in the compilers' portable vector syntax: baseline x86-64 and whatever else they compile for.
#pragma once

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace quire::QUIRE_ISA {

constexpr int W = 4;
typedef float f32 __attribute__((vector_size(16)));
typedef int32_t i32 __attribute__((vector_size(16)));
typedef uint32_t u32 __attribute__((vector_size(16)));
typedef uint16_t u16x4 __attribute__((vector_size(8)));

QUIRE_INLINE f32 widen(u16x4 v) { return (f32)(__builtin_convertvector(v, u32) << 16); }

QUIRE_INLINE u16x4 narrow(f32 v) {
  const u32 bits = (u32)v;
  const u32 rounded = bits + 0x7fff + ((bits >> 16) & 1);
  const u32 is_nan = (u32)(v != v);
  return __builtin_convertvector(((rounded & ~is_nan) | ((bits | 0x400000) & is_nan)) >> 16, u16x4);
}

QUIRE_INLINE f32 set1(float v) { return f32{v, v, v, v}; }
QUIRE_INLINE f32 load(const float* p) {
  f32 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
QUIRE_INLINE f32 load(const bf16* p) {
  u16x4 v;
  std::memcpy(&v, p, sizeof v);
  return widen(v);
}
QUIRE_INLINE f32 load_n(const float* p, int64_t n) {
  f32 v = {};
  for (int64_t i = 0; i < n; ++i) v[i] = p[i];
  return v;
}
QUIRE_INLINE f32 load_n(const bf16* p, int64_t n) {
  u16x4 v = {};
  for (int64_t i = 0; i < n; ++i) v[i] = p[i].bits;
  return widen(v);
}
QUIRE_INLINE void store(float* p, f32 v) { std::memcpy(p, &v, sizeof v); }
QUIRE_INLINE void store(bf16* p, f32 v) {
  const u16x4 bits = narrow(v);
  std::memcpy(p, &bits, sizeof bits);
}
QUIRE_INLINE void store_n(float* p, f32 v, int64_t n) {
  for (int64_t i = 0; i < n; ++i) p[i] = v[i];
}
QUIRE_INLINE void store_n(bf16* p, f32 v, int64_t n) {
  const u16x4 bits = narrow(v);
  for (int64_t i = 0; i < n; ++i) p[i].bits = bits[i];
}

QUIRE_INLINE f32 fma(f32 a, f32 b, f32 c) { return a * b + c; }
QUIRE_INLINE f32 max(f32 a, f32 b) { return a > b ? a : b; }

QUIRE_INLINE float reduce_add(f32 v) { return (v[0] + v[2]) + (v[1] + v[3]); }
QUIRE_INLINE float reduce_max(f32 v) {
  const float a = v[0] > v[2] ? v[0] : v[2], b = v[1] > v[3] ? v[1] : v[3];
  return a > b ? a : b;
}

QUIRE_INLINE i32 multiply_pairs(i32 a, i32 b) {
#if defined(__SSE2__)
  return (i32)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  return ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
}

// A byte for each byte of an index below 16.
struct ByteTable {
  uint8_t bytes[16];

  QUIRE_MEMBER explicit ByteTable(const uint8_t* sixteen) { std::memcpy(bytes, sixteen, sizeof bytes); }
  QUIRE_MEMBER i32 look_up(i32 indices) const {
    uint8_t each[sizeof indices];
    std::memcpy(each, &indices, sizeof each);
    for (uint8_t& byte : each) byte = bytes[byte];
    std::memcpy(&indices, each, sizeof each);
    return indices;
  }
};

}  // namespace quire::QUIRE_ISA
