// RMSNorm (Zhang and Sennrich 2019) and LayerNorm (Ba et al. 2016), with and without a residual added first.
#pragma once

#include "base/kernel_table.h"
#include "isa/rows.h"

namespace quire::QUIRE_ISA {

template <typename T>
QUIRE_INLINE void rms_norm_row(const T* x, const float* weight, float eps, T* out, int64_t width) {
  const float sum = sum_parts(width, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    const f32 v = load_some(x + i, n);
    return v * v;
  });
  const f32 scale = set1(1.0f / __builtin_sqrtf(sum / float(width) + eps));
  make_row(out, width, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    return load_some(x + i, n) * scale * load_some(weight + i, n);
  });
}

// Of the row whose elements [i, i + n) are element(i, n).
template <bool kBias, typename T, typename Element>
QUIRE_INLINE void layer_norm_of(const Element& element, const float* weight, const float* bias, float eps, T* out,
                                int64_t width) {
  const float sum = sum_parts(width, element);
  const f32 mean = set1(sum / float(width));
  const float squares = sum_parts(width, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    const f32 v = element(i, n) - mean;
    return n == W ? v * v : keep_n(v * v, n);
  });
  const f32 scale = set1(1.0f / __builtin_sqrtf(squares / float(width) + eps));
  make_row(out, width, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    const f32 v = (element(i, n) - mean) * scale, w = load_some(weight + i, n);
    if constexpr (kBias) {
      return fma(v, w, load_some(bias + i, n));
    } else {
      return v * w;
    }
  });
}

template <bool kBias, typename T>
QUIRE_INLINE void layer_norm_row(const T* x, const float* weight, const float* bias, float eps, T* out, int64_t width) {
  layer_norm_of<kBias>([=](int64_t i, int64_t n) __attribute__((always_inline)) { return load_some(x + i, n); }, weight,
                       bias, eps, out, width);
}

// residual += x, rounded to T.
template <typename T>
QUIRE_INLINE void add_row(const T* x, T* residual, int64_t width) {
  make_row(residual, width, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    return load_some(residual + i, n) + load_some(x + i, n);
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
static void norm_row(const NormArgs& args, int64_t row) {
  const int64_t width = args.width, at = row * width;
  const T* from = static_cast<const T*>(args.x) + at;
  if (args.residual != nullptr) {
    T* sum = static_cast<T*>(args.residual) + at;
    add_row(from, sum, width);
    from = sum;
  }
  T* to = static_cast<T*>(args.out) + at;
  if (args.is_rms) {
    rms_norm_row(from, args.weight, args.eps, to, width);
  } else if (args.bias != nullptr) {
    layer_norm_row<true>(from, args.weight, args.bias, args.eps, to, width);
  } else {
    layer_norm_row<false>(from, args.weight, nullptr, args.eps, to, width);
  }
}

template <typename T>
static void norm(const NormArgs& args) {
  for_rows(args.rows, args.width, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) norm_row<T>(args, row);
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

// The norms of sums of rows of tables, which are summed as float32, the first two first.
template <typename T>
static void embedding_norm(const EmbeddingNormArgs& args) {
  for_rows(args.rows, args.width, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* from[kMaxTables];
      for (int64_t t = 0; t < kMaxTables; ++t) {
        const int64_t id = args.ids[t] == nullptr ? 0 : args.ids[t][row];
        from[t] = static_cast<const T*>(args.tables[t < args.num_tables ? t : 0]) + id * args.width;
      }
      const auto sum = [&](int64_t i, int64_t n) __attribute__((always_inline)) {
        f32 v = load_some(from[0] + i, n);
        if (args.num_tables > 1) v = v + load_some(from[1] + i, n);
        return args.num_tables > 2 ? v + load_some(from[2] + i, n) : v;
      };
      T* to = static_cast<T*>(args.out) + row * args.width;
      if (args.bias != nullptr) {
        layer_norm_of<true>(sum, args.weight, args.bias, args.eps, to, args.width);
      } else {
        layer_norm_of<false>(sum, args.weight, args.bias, args.eps, to, args.width);
      }
    }
  });
}

static constexpr NormTable kNorm = {
    .add = {add<float>, add<bf16>},
    .rms_norm = {rms_norm<float>, rms_norm<bf16>},
    .norm = {norm<float>, norm<bf16>},
    .head_layer_norm = {head_layer_norm<float>, head_layer_norm<bf16>},
    .embedding_norm = {embedding_norm<float>, embedding_norm<bf16>},
};

}  // namespace quire::QUIRE_ISA
