// Weights of tokens, the softmax before it is normalized, as doubles. They come from plain operations, none of them
// fused, so that every instruction set gives the same; rough ones, which take half the time, may differ.
#pragma once

#include <cstring>

#include "isa/simd.h"
#include "sampling/args.h"

namespace quire::QUIRE_ISA {

// Doubles, half as many as floats. Explicit vectors: compilers find reasons not to vectorize the plain loop.
constexpr int kDoubles = W / 2;
typedef double f64 __attribute__((vector_size(8 * kDoubles)));
typedef int64_t i64 __attribute__((vector_size(8 * kDoubles)));
typedef float half_f32 __attribute__((vector_size(4 * kDoubles)));

QUIRE_INLINE f64 widen_half(const float* p) {
#if defined(QUIRE_SIMD_AVX512)  // GCC 12 would convert it in two halves
  return _mm512_cvtps_pd(_mm256_loadu_ps(p));
#else
  half_f32 narrow;
  std::memcpy(&narrow, p, sizeof narrow);
  return __builtin_convertvector(narrow, f64);
#endif
}

QUIRE_INLINE f64 set1_double(double v) { return f64{} + v; }

// a * b + c, rounded twice, or once where that is faster and the result may be rough.
template <bool kRough>
QUIRE_INLINE f64 multiply_add(f64 a, f64 b, f64 c) {
#if defined(QUIRE_SIMD_AVX512)
  if constexpr (kRough) return _mm512_fmadd_pd(a, b, c);
#elif defined(QUIRE_SIMD_AVX2)
  if constexpr (kRough) return _mm256_fmadd_pd(a, b, c);
#elif defined(QUIRE_SIMD_NEON)
  if constexpr (kRough) return (f64)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
#endif
  return a * b + c;
}

// How many vectors take each step of exp together. A step waits for the one before it, and neither compilers nor
// processors look far enough ahead to find other work.
constexpr int kAtOnce = 8;

// exp(x) for each x <= 0, and 0 below -708 and for NaN: to about one unit in the last place, or, if it may be rough, to
// 1e-11 of the result.
template <bool kRough>
QUIRE_INLINE void exp_weights(f64 (&x)[kAtOnce]) {
  constexpr double kLog2E = 1.4426950408889634, kLn2High = 0x1.62e42fefa0000p-1, kLn2Low = 0x1.cf79abc9e3b3ap-40;
  constexpr double kRound = 0x1.8p52;  // adding it leaves the nearest integer in the low bits, which are 0 in itself
  constexpr double kFactorials[] = {1,    1,     2,      6,       24,       120,       720,
                                    5040, 40320, 362880, 3628800, 39916800, 479001600, 6227020800};
  constexpr int kDegree = kRough ? 9 : 13;
  i64 inside[kAtOnce];
  f64 shifted[kAtOnce], rest[kAtOnce], sum[kAtOnce];
  QUIRE_UNROLL
  for (int v = 0; v < kAtOnce; ++v) {
    inside[v] = x[v] >= -708.0;
    shifted[v] = multiply_add<kRough>(x[v], set1_double(kLog2E), set1_double(kRound));
    const f64 n = shifted[v] - kRound;
    rest[v] = multiply_add<kRough>(n, set1_double(-kLn2High), x[v]);
    rest[v] = multiply_add<kRough>(n, set1_double(-kLn2Low), rest[v]);
    sum[v] = set1_double(1.0 / kFactorials[kDegree]);
  }
  QUIRE_UNROLL
  for (int i = kDegree - 1; i >= 0; --i) {
    QUIRE_UNROLL
    for (int v = 0; v < kAtOnce; ++v) {
      sum[v] = multiply_add<kRough>(sum[v], rest[v], set1_double(1.0 / kFactorials[i]));
      keep_in_register(sum[v]);
    }
  }
  QUIRE_UNROLL
  for (int v = 0; v < kAtOnce; ++v) {
    const f64 power = (f64)(((i64)shifted[v] + 1023) << 52);  // the other bits are shifted out
    x[v] = (f64)((i64)(sum[v] * power) & inside[v]);
  }
}

// In an order that only `count` decides.
static inline double sum_weights(const double* weights, int64_t count) {
  double lanes[8] = {};
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    for (int j = 0; j < 8; ++j) lanes[j] += weights[i + j];
  }
  for (int j = 0; i + j < count; ++j) lanes[j] += weights[i + j];
  return ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) + ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]));
}

// The sum of each run of kRun weights, and of all.
static inline double sum_runs(const double* weights, int64_t count, double* sums) {
  double total = 0.0;
  for (int64_t begin = 0; begin < count; begin += kRun) {
    total += * sums++ = sum_weights(weights + begin, count - begin < kRun ? count - begin : kRun);
  }
  return total;
}

// exp((logit - largest) / temperature), exact or rough.
template <bool kRough>
class Weigher {
 public:
  Weigher(float largest, double temperature) : largest_(largest), rate_(1.0 / temperature) {}

  // The weight of each of the logits, [count].
  void weigh(const float* logits, int64_t count, double* weights) const {
    constexpr int64_t kStep = kAtOnce * kDoubles;
    int64_t i = 0;
    for (; i + kStep <= count; i += kStep) weigh_step(logits + i, weights + i);
    if (i == count) return;
    float last[kStep] = {};
    double last_weights[kStep];
    for (int64_t j = i; j < count; ++j) last[j - i] = logits[j];
    weigh_step(last, last_weights);
    for (int64_t j = i; j < count; ++j) weights[j] = last_weights[j - i];
  }

  // The same of these logits, whose weights are not kept.
  double sum_runs(const float* logits, int64_t count, double* sums) const {
    double total = 0.0;
    for (int64_t begin = 0; begin < count; begin += kRun) {
      const int64_t length = count - begin < kRun ? count - begin : kRun;
      double weights[kRun];
      weigh(logits + begin, length, weights);
      total += * sums++ = sum_weights(weights, length);
    }
    return total;
  }

 private:
  QUIRE_MEMBER void weigh_step(const float* logits, double* weights) const {
    f64 x[kAtOnce];
    QUIRE_UNROLL
    for (int v = 0; v < kAtOnce; ++v) {
      const f64 wide = widen_half(logits + v * kDoubles);
      // The largest weighs 1, whatever the temperature and even if it is infinite.
      const i64 below = wide != static_cast<double>(largest_);
      x[v] = (f64)((i64)((wide - largest_) * rate_) & below);
    }
    exp_weights<kRough>(x);
    std::memcpy(weights, x, sizeof x);
  }

  float largest_;
  double rate_;
};

}  // namespace quire::QUIRE_ISA
