// RMSNorm and LayerNorm, with and without a residual added first.
#pragma once

#include "kernel_table.h"
#include "rows.h"

namespace quire::QUIRE_ISA {

template <typename T>
QUIRE_INLINE float mean_square(const T* x, int64_t width) {
  f32 sum0 = set1(0), sum1 = set1(0);
  int64_t i = 0;
  for (; i + 2 * W <= width; i += 2 * W) {
    const f32 a = load(x + i), b = load(x + i + W);
    sum0 = fma(a, a, sum0);
    sum1 = fma(b, b, sum1);
  }
  for (; i < width; i += W) {
    const f32 a = load_n(x + i, width - i < W ? width - i : W);
    sum0 = fma(a, a, sum0);
  }
  return reduce_add(sum0 + sum1) / float(width);
}

template <typename T>
QUIRE_INLINE void rms_norm_row(const T* x, const float* weight, float eps, T* out, int64_t width) {
  const f32 scale = set1(1.0f / __builtin_sqrtf(mean_square(x, width) + eps));
  int64_t i = 0;
  for (; i + W <= width; i += W) store(out + i, load(x + i) * scale * load(weight + i));
  if (i < width) store_n(out + i, load_n(x + i, width - i) * scale * load_n(weight + i, width - i), width - i);
}

template <typename T>
static void rms_norm(const void* x, const float* weight, float eps, void* out, StridedRows shape) {
  for_rows(shape.outer * shape.inner, shape.width, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t offset = row / shape.inner * shape.outer_stride + row % shape.inner * shape.inner_stride;
      rms_norm_row(static_cast<const T*>(x) + offset, weight, eps, static_cast<T*>(out) + row * shape.width,
                   shape.width);
    }
  });
}

static constexpr NormTable kNorm = {
    .rms_norm = {rms_norm<float>, rms_norm<bf16>},
};

}  // namespace quire::QUIRE_ISA
