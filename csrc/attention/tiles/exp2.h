// Powers of two for the softmax.
#pragma once

#include "isa/simd.h"

namespace quire::QUIRE_ISA {

// 2^v for v <= 0, within 2 ulp, exactly 1 for 0. 0 below -126 (no denormals) and for NaN.
QUIRE_INLINE f32 exp2_negative(f32 v) {
  const f32 lowest = set1(-126.0f);
#if defined(QUIRE_SIMD_AVX512)
  const f32 power = nearest_integer(v), r = v - power;
#else
  const f32 shifter = set1(12582912.0f), inside = max(v, lowest);  // 1.5 * 2^23: its sum's low bits are an integer
  const f32 shifted = inside + shifter, r = inside - (shifted - shifter);
#endif
  const f32 p = polynomial(r, 0.00132647f, 0.00967151f, 0.05550734f, 0.24022242f, 0.69314698f, 1.0f);
#if defined(QUIRE_SIMD_AVX512)
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(v, lowest, _CMP_GT_OQ), p, power);
#else
  return as_float((as_int(p) + (as_int(shifted) << 23)) & (v > lowest));
#endif
}

// As exp2_negative, as near as probabilities need that are then rounded to Prob. For bf16, whose rounding is within
// 2^-9, it is within 2^-12 and takes one multiplication, since these are what takes time beside products: a table has
// 2^x and its slope for the sixteenths of one, and the nearest of these is followed along its slope. On tiles, where
// shuffles are scarcer than multiplications, it is a polynomial within 2^-13.
template <typename Prob>
QUIRE_INLINE f32 exp2_for(f32 v) {
#if defined(__AVX512BF16__)
  if constexpr (sizeof(Prob) == sizeof(bf16)) {
#if defined(QUIRE_AMX)
    const f32 power = nearest_integer(v);
    const f32 p = polynomial(v - power, 0.05500893f, 0.242211f, 0.69328293f, 1.0f);
#else
    alignas(64) static const float kPowers[16] = {
        1.0f,        1.04427373f, 1.09050775f, 1.13878858f, 1.18920708f, 1.24185777f, 1.29683959f, 1.35425556f,
        1.41421354f, 1.47682619f, 1.54221082f, 1.61049032f, 1.68179286f, 1.75625217f, 1.8340081f,  1.91520655f};
    alignas(64) static const float kSlopes[16] = {
        0.693147182f, 0.723835409f, 0.755882382f, 0.789348125f, 0.82429558f, 0.860790253f, 0.898900688f, 0.938698411f,
        0.980258167f, 1.02365792f,  1.06897914f,  1.11630678f,  1.16573f,    1.21734118f,  1.27123749f,  1.32752001f};
    const f32 shifter = set1(786432.0f);  // 1.5 * 2^19: its sum's low four bits are sixteenths
    const f32 shifted = v + shifter, power = shifted - shifter;
    const __m512i index = _mm512_castps_si512(shifted);
    const f32 p =
        fma(v - power, _mm512_permutexvar_ps(index, load(kSlopes)), _mm512_permutexvar_ps(index, load(kPowers)));
#endif
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(v, set1(-126.0f), _CMP_GT_OQ), p, power);
  }
#endif
  return exp2_negative(v);
}

}  // namespace quire::QUIRE_ISA
