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

// As exp2_negative, as near as probabilities need that are then rounded to Prob. On tiles little else is left to do
// than this, so that it is within 2^-13 there, a sixteenth of the rounding of bf16.
template <typename Prob>
QUIRE_INLINE f32 exp2_for(f32 v) {
#if defined(QUIRE_AMX)
  if constexpr (sizeof(Prob) == sizeof(bf16)) {
    const f32 power = nearest_integer(v);
    const f32 p = polynomial(v - power, 0.05500893f, 0.242211f, 0.69328293f, 1.0f);
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(v, set1(-126.0f), _CMP_GT_OQ), p, power);
  }
#endif
  return exp2_negative(v);
}

}  // namespace quire::QUIRE_ISA
