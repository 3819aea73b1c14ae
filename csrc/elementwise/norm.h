// RMSNorm (Zhang and Sennrich 2019) and LayerNorm (Ba et al. 2016), with and without a residual added first.
#pragma once

#include "isa/rows.h"
#include "kernel_table.h"

namespace quire::QUIRE_ISA {

template <typename T>
QUIRE_INLINE void rms_norm_row(const T* x, const float* weight, float eps, T* out, int64_t width) {
  const float sum = sum_parts(width, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    const f32 v = load_some(x + i, n);
    return v * v;
  });
  const f32 scale = set1(1.0f / __builtin_sqrtf(sum / float(width) + eps));
  for_parts(width, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    store_some(out + i, load_some(x + i, n) * scale * load_some(weight + i, n), n);
  });
}

template <bool kBias, typename T>
QUIRE_INLINE void layer_norm_row(const T* x, const float* weight, const float* bias, float eps, T* out, int64_t width) {
  const float sum =
      sum_parts(width, [&](int64_t i, int64_t n) __attribute__((always_inline)) { return load_some(x + i, n); });
  const f32 mean = set1(sum / float(width));
  const float squares = sum_parts(width, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    const f32 v = load_some(x + i, n) - mean;
    return n == W ? v * v : keep_n(v * v, n);
  });
  const f32 scale = set1(1.0f / __builtin_sqrtf(squares / float(width) + eps));
  for_parts(width, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    const f32 v = (load_some(x + i, n) - mean) * scale, w = load_some(weight + i, n);
    if constexpr (kBias) {
      store_some(out + i, fma(v, w, load_some(bias + i, n)), n);
    } else {
      store_some(out + i, v * w, n);
    }
  });
}

// residual += x, rounded to T.
template <typename T>
QUIRE_INLINE void add_row(const T* x, T* residual, int64_t width) {
  for_parts(width, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    store_some(residual + i, load_some(residual + i, n) + load_some(x + i, n), n);
  });
}

template <typename T>
static void add(const void* x, void* residual, int64_t rows, int64_t width) {
  for_rows(rows, width, [&](int64_t begin, int64_t end) {
    add_row(static_cast<const T*>(x) + begin * width, static_cast<T*>(residual) + begin * width, (end - begin) * width);
  });
}

template <typename T>
static void rms_norm(const void* x, const float* weight, float eps, void* out, int64_t outer, int64_t inner,
                     int64_t outer_stride, int64_t inner_stride, int64_t width) {
  for_rows(outer * inner, width, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t offset = row / inner * outer_stride + row % inner * inner_stride;
      rms_norm_row(static_cast<const T*>(x) + offset, weight, eps, static_cast<T*>(out) + row * width, width);
    }
  });
}

template <typename T>
static void add_rms_norm(const void* x, void* residual, const float* weight, float eps, void* out, int64_t rows,
                         int64_t width) {
  for_rows(rows, width, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin * width; at < end * width; at += width) {
      T* sum = static_cast<T*>(residual) + at;
      add_row(static_cast<const T*>(x) + at, sum, width);
      rms_norm_row(sum, weight, eps, static_cast<T*>(out) + at, width);
    }
  });
}

template <typename T>
static void layer_norm(const void* x, void* residual, const float* weight, const float* bias, float eps, void* out,
                       int64_t rows, int64_t width) {
  for_rows(rows, width, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin * width; at < end * width; at += width) {
      const T* from = static_cast<const T*>(x) + at;
      if (residual != nullptr) {
        T* sum = static_cast<T*>(residual) + at;
        add_row(from, sum, width);
        from = sum;
      }
      T* to = static_cast<T*>(out) + at;
      if (bias != nullptr) {
        layer_norm_row<true>(from, weight, bias, eps, to, width);
      } else {
        layer_norm_row<false>(from, weight, bias, eps, to, width);
      }
    }
  });
}

// The heads of each token, each with weights of its own.
template <typename T>
static void head_layer_norm(const void* x, const float* weight, const float* bias, float eps, void* out, int64_t outer,
                            int64_t inner, int64_t outer_stride, int64_t inner_stride, int64_t width) {
  for_rows(outer * inner, width, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t head = row % inner;
      const T* from = static_cast<const T*>(x) + row / inner * outer_stride + head * inner_stride;
      T* to = static_cast<T*>(out) + row * width;
      if (bias != nullptr) {
        layer_norm_row<true>(from, weight + head * width, bias + head * width, eps, to, width);
      } else {
        layer_norm_row<false>(from, weight + head * width, nullptr, eps, to, width);
      }
    }
  });
}

static constexpr NormTable kNorm = {
    .add = {add<float>, add<bf16>},
    .rms_norm = {rms_norm<float>, rms_norm<bf16>},
    .add_rms_norm = {add_rms_norm<float>, add_rms_norm<bf16>},
    .layer_norm = {layer_norm<float>, layer_norm<bf16>},
    .head_layer_norm = {head_layer_norm<float>, head_layer_norm<bf16>},
};

}  // namespace quire::QUIRE_ISA
