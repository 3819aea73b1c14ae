// Elementwise activations, and their product with a second half.
#pragma once

#include "base/kernel_table.h"
#include "isa/rows.h"

namespace quire::QUIRE_ISA {

QUIRE_INLINE f32 sigmoid(f32 v) {
  const f32 power = exp_negative(-abs(v));  // at most 1, which is cheaper than any
  return select(v < set1(0), power, set1(1)) / (1.0f + power);
}

struct Silu {
  QUIRE_INLINE f32 apply(f32 v) { return v * sigmoid(v); }
};

// 2^v for v from -125 to 0, by a polynomial for 2^rest: v is split into an integer and a rest, as in split_exp.
template <typename... Coefficients>
QUIRE_INLINE f32 power_of_two(f32 v, Coefficients... of_rest) {
#if defined(QUIRE_SIMD_AVX512)
  const f32 power = nearest_integer(v);
  return _mm512_scalef_ps(polynomial(v - power, of_rest...), power);
#else
  const f32 shifter = set1(12582912.0f), shifted = v + shifter;
  return as_float(as_int(polynomial(v - (shifted - shifter), of_rest...)) + (as_int(shifted) << 23));
#endif
}

// -|v| from kLowestGelu on. Below, gelu stays what it is there, less than 2^-121.
constexpr float kLowestGelu = -12.9f;
QUIRE_INLINE f32 below_zero(f32 v) { return max(set1(kLowestGelu), as_float(as_int(v) | int32_t(0x80000000))); }

// v * P(a standard normal variable < v): max(v, 0) - |v| P(the variable < -|v|). The binary logarithm of the latter is
// that of e^(-v^2 / 2) and a polynomial, within 8e-7 near zero and 1.3e-5 at kLowestGelu.
struct Gelu {
  QUIRE_INLINE f32 apply(f32 v) {
    const f32 at = below_zero(v), u = fma(at, set1(2 / kLowestGelu), set1(-1));  // from -1 to 1
    const f32 rest = polynomial(u, 0.0325781591f, -0.00700472808f, -0.101014197f, 0.0314019695f, 0.079161644f,
                                0.0357823297f, -0.126833886f, 0.102375381f, -0.139439166f, 0.23952198f, -0.37587139f,
                                0.633983433f, -1.38037276f, -4.04785156f);
    const f32 outside = power_of_two(fma(at * set1(-0.721347520f), at, rest), 0.00133017276f, 0.0096770376f,
                                     0.0555062667f, 0.240220904f, 0.693147004f, 1.00000012f);
    return fma(at, outside, max(set1(0), v));
  }
};

// Gelu within 2^-12 of its value, which bfloat16 rounds by up to 2^-8: the whole logarithm is a polynomial.
struct RoundedGelu {
  QUIRE_INLINE f32 apply(f32 v) {
    const f32 at = below_zero(v);
    const f32 log = polynomial(at, 2.93536817e-08f, 1.83706685e-06f, 4.96135466e-05f, 0.000764298305f, 0.00753160588f,
                               0.0511386282f, -0.462292323f, 1.14930755f, -1.00015958f);
    const f32 outside = power_of_two(log, 0.0551717173f, 0.242611229f, 0.693260978f, 0.999928054f);
    return fma(at, outside, max(set1(0), v));
  }
};

// v / 2 * (1 + tanh(t)) is v * sigmoid(2 t).
struct GeluTanh {
  QUIRE_INLINE f32 apply(f32 v) {
    const f32 t = set1(0.797884561f) * fma(v * v * v, set1(0.044715f), v);
    return v * sigmoid(t + t);
  }
};

struct Relu {
  QUIRE_INLINE f32 apply(f32 v) { return select(v < set1(0), set1(0), v); }
};

struct Relu2 {
  QUIRE_INLINE f32 apply(f32 v) {
    const f32 positive = Relu::apply(v);
    return positive * positive;
  }
};

// v * sigmoid(1.702 v), an approximation of gelu (Hendrycks and Gimpel 2016).
struct QuickGelu {
  QUIRE_INLINE f32 apply(f32 v) { return v * sigmoid(v * set1(1.702f)); }
};

// xIELU (Huang and Schlag 2025).
struct Xielu {
  float alpha_p, alpha_n, beta;
  QUIRE_MEMBER f32 apply(f32 v) const {
    const f32 negative = set1(alpha_n) * (expm1_negative(-abs(v)) - v);
    return fma(set1(beta), v, select(v > set1(0), set1(alpha_p) * v * v, negative));
  }
};

template <typename Kind>
QUIRE_INLINE f32 apply_gated(const Kind& kind, f32 gate, f32 up) {
  return kind.apply(gate) * up;
}

// gpt-oss (OpenAI 2025): both halves clamped, a slope for the sigmoid, and one added to the second half.
struct ClampedSwiglu {
  float limit, alpha;
};

QUIRE_INLINE f32 apply_gated(const ClampedSwiglu& kind, f32 gate, f32 up) {
  const f32 most = set1(kind.limit);
  const f32 g = -max(-most, -gate);
  return g * sigmoid(g * set1(kind.alpha)) * (1.0f - max(-most, -max(-most, up)));
}

// Asks for a line of each half, 2 KiB ahead of element i: the product before has left half of them with another core,
// and those of a prompt in memory.
template <typename T>
QUIRE_INLINE void ask_ahead(const T* gate, const T* up, int64_t i) {
  constexpr int64_t kLine = 64 / int64_t(sizeof(T));
  if (i % kLine != 0) return;
  __builtin_prefetch(gate + 32 * kLine, 0, 3);
  __builtin_prefetch(up + 32 * kLine, 0, 3);
}

// Of a row, which is [gate | up], 2 * width wide, if it is gated.
template <typename T, bool kGated, typename Kind>
QUIRE_INLINE void activate_row(const Kind& kind, const T* from, int64_t width, T* to) {
  make_row(to, width, [=](int64_t i, int64_t n) __attribute__((always_inline)) {
    if constexpr (kGated) ask_ahead(from + i, from + width + i, i);
    const f32 v = load_some(from + i, n);
    if constexpr (kGated) {
      return apply_gated(kind, v, load_some(from + width + i, n));
    } else {
      return kind.apply(v);
    }
  });
}

// x: rows that follow each other.
template <typename T, bool kGated, typename Kind>
static void activate(const Kind& kind, const T* x, int64_t rows, int64_t width, T* out, int64_t out_stride) {
  const int64_t x_stride = kGated ? 2 * width : width;
  for_rows(rows, x_stride, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      activate_row<T, kGated>(kind, x + row * x_stride, width, out + row * out_stride);
    }
  });
}

// Calls run with the struct of the kind.
template <typename T, bool kGated, typename Run>
static void with_kind(const ActivationKind& kind, const Run& run) {
  const float* p = kind.parameters;
  switch (kind.kind) {
    case kSilu:
      return run(Silu{});
    case kGelu:
      return run(std::conditional_t<std::is_same_v<T, bf16>, RoundedGelu, Gelu>{});
    case kGeluTanh:
      return run(GeluTanh{});
    case kRelu:
      return run(Relu{});
    case kRelu2:
      return run(Relu2{});
    case kQuickGelu:
      return run(QuickGelu{});
    case kXielu:
      return run(Xielu{p[0], p[1], p[2]});
    case kClampedSwiglu:
      if constexpr (kGated) run(ClampedSwiglu{p[0], p[1]});
  }
}

template <typename T, bool kGated>
static void activation_to(const ActivationKind& kind, const void* x, int64_t rows, int64_t width, void* out,
                          int64_t out_stride) {
  with_kind<T, kGated>(kind, [&](const auto& chosen) {
    activate<T, kGated>(chosen, static_cast<const T*>(x), rows, width, static_cast<T*>(out), out_stride);
  });
}

// Of one row.
template <typename T>
static void activate_one(const ActivationKind& kind, bool is_gated, const T* x, int64_t width, T* out) {
  if (is_gated) {
    with_kind<T, true>(kind, [&](const auto& chosen) { activate_row<T, true>(chosen, x, width, out); });
  } else {
    with_kind<T, false>(kind, [&](const auto& chosen) { activate_row<T, false>(chosen, x, width, out); });
  }
}

template <typename T>
static void activation(const ActivationKind& kind, const void* x, int64_t rows, int64_t width, void* out) {
  activation_to<T, false>(kind, x, rows, width, out, width);
}

static constexpr ActivationTable kActivation = {
    .activation = {activation<float>, activation<bf16>},
    .gated_activation = {activation_to<float, true>, activation_to<bf16, true>},
};

}  // namespace quire::QUIRE_ISA
