// Drawing one token per row without sorting the vocabulary. A row is narrowed to its candidates by cheap bounds, the
// cut of top-k and of top-p is found by a radix histogram over order-preserving integer keys (as in radix select, Alabi
// et al. 2012), and the draw inverts the cumulative distribution in id order. Weights and sums are double, in plain
// loops without fused operations, so that every instruction set gives the same token.
#pragma once

#include <cstring>

#include "sampling_args.h"
#include "simd.h"

namespace quire::QUIRE_ISA {

constexpr float kNegativeInfinity = -__builtin_inff();

// Doubles, half as many as floats. Explicit vectors: compilers find reasons not to vectorize the plain loop.
constexpr int kDoubles = W / 2;
typedef double f64 __attribute__((vector_size(8 * kDoubles)));
typedef int64_t i64 __attribute__((vector_size(8 * kDoubles)));
typedef float half_f32 __attribute__((vector_size(4 * kDoubles)));

// exp(x) for x <= 0 to about one unit in the last place; 0 below -708 and for NaN.
QUIRE_INLINE f64 exp_weight(f64 x) {
  constexpr double kLog2E = 1.4426950408889634, kLn2High = 0x1.62e42fefa0000p-1, kLn2Low = 0x1.cf79abc9e3b3ap-40;
  constexpr double kRound = 0x1.8p52;  // adding it leaves the nearest integer in the low bits
  const i64 inside = x >= -708.0;
  const f64 clamped = (f64)((i64)x & inside);
  const f64 shifted = clamped * kLog2E + kRound;
  const f64 n = shifted - kRound;
  const f64 r = (clamped - n * kLn2High) - n * kLn2Low;
  f64 sum = r * (1.0 / 6227020800.0) + 1.0 / 479001600.0;
  sum = sum * r + 1.0 / 39916800.0;
  sum = sum * r + 1.0 / 3628800.0;
  sum = sum * r + 1.0 / 362880.0;
  sum = sum * r + 1.0 / 40320.0;
  sum = sum * r + 1.0 / 5040.0;
  sum = sum * r + 1.0 / 720.0;
  sum = sum * r + 1.0 / 120.0;
  sum = sum * r + 1.0 / 24.0;
  sum = sum * r + 1.0 / 6.0;
  sum = sum * r + 0.5;
  sum = sum * r + 1.0;
  sum = sum * r + 1.0;
  const i64 exponent = (i64)shifted - __builtin_bit_cast(int64_t, kRound);
  const f64 power = (f64)((exponent + 1023) << 52);
  return (f64)((i64)(sum * power) & inside);
}

// Unsigned integers in the order of the floats; NaN counts as -inf, -0 as 0.
QUIRE_INLINE uint32_t order_key(float x) {
  const float plain = x != x ? kNegativeInfinity : x + 0.0f;
  const uint32_t bits = __builtin_bit_cast(uint32_t, plain);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The float of a key.
QUIRE_INLINE float key_value(uint32_t key) { return __builtin_bit_cast(float, key >> 31 ? key & 0x7fffffffu : ~key); }

// The candidates of one row, in id order. `ids` null: candidate i is token i.
struct Candidates {
  const float* logits;
  const int32_t* ids;
  const double* weights;  // null: each weighs 1
  int64_t count;
};

// The last candidate that stays: all with a larger key stay, and those of this key up to this index.
struct Cut {
  uint32_t key;
  int64_t last;
};

constexpr int kRadixLevels = 3;
constexpr int kRadixShift[kRadixLevels] = {21, 10, 0};
constexpr int kRadixBits[kRadixLevels] = {11, 11, 10};

// The bin of `level` that holds the last candidate whose preceding mass is less than what is left of the target.
// `mass` is advanced by the bins above it.
static inline uint32_t cut_bin(const Candidates& c, int level, uint32_t prefix, double target, double* histogram,
                               double& mass) {
  const int bins = 1 << kRadixBits[level], shift = kRadixShift[level];
  const int prefix_shift = shift + kRadixBits[level];
  std::memset(histogram, 0, sizeof(double) * static_cast<size_t>(kHistograms * bins));
  for (int64_t i = 0; i < c.count; ++i) {
    const uint32_t key = order_key(c.logits[i]);
    if (level > 0 && key >> prefix_shift != prefix) continue;
    // Neighbours add into different histograms, so that an addition need not wait for the one before it.
    histogram[(i % kHistograms) * bins + (key >> shift & static_cast<uint32_t>(bins - 1))] +=
        c.weights ? c.weights[i] : 1.0;
  }
  int lowest = -1;
  double below_lowest = mass;
  for (int bin = bins - 1; bin >= 0; --bin) {
    double in_bin = 0.0;
    for (int h = 0; h < kHistograms; ++h) in_bin += histogram[h * bins + bin];
    if (in_bin == 0.0) continue;
    lowest = bin;
    below_lowest = mass;
    if (mass + in_bin >= target) break;
    mass += in_bin;
  }
  mass = below_lowest;
  return prefix << kRadixBits[level] | static_cast<uint32_t>(lowest);
}

// Order by logit, lower id first among equals: the candidates whose preceding mass is less than `target` stay, the
// first one always. At least one candidate has weight.
static inline Cut find_cut(const Candidates& c, double target, double* histogram) {
  double mass = 0.0;
  uint32_t key = 0;
  for (int level = 0; level < kRadixLevels; ++level) key = cut_bin(c, level, key, target, histogram, mass);
  Cut cut{key, -1};
  for (int64_t i = 0; i < c.count; ++i) {
    if (order_key(c.logits[i]) != key) continue;
    if (cut.last >= 0 && mass >= target) break;
    cut.last = i;
    mass += c.weights ? c.weights[i] : 1.0;
  }
  return cut;
}

class RowSampler {
 public:
  RowSampler(const float* row, int64_t vocab, const SampleScratch& scratch) : row_(row), vocab_(vocab), s_(scratch) {
    chunk_ = (vocab + kMaxChunks - 1) / kMaxChunks;
    chunk_ = (chunk_ + 15) / 16 * 16;
    num_chunks_ = (vocab + chunk_ - 1) / chunk_;
    largest_ = kNegativeInfinity;
    for (int64_t c = 0; c < num_chunks_; ++c) {
      s_.chunk_max[c] = chunk_max(c * chunk_);
      if (s_.chunk_max[c] > largest_) largest_ = s_.chunk_max[c];
    }
  }

  int64_t greedy() const {
    for (int64_t c = 0; c < num_chunks_; ++c) {
      if (s_.chunk_max[c] != largest_) continue;
      for (int64_t i = c * chunk_; i < vocab_; ++i) {
        if (row_[i] == largest_) return i;
      }
    }
    return 0;  // nothing but NaN
  }

  int64_t draw(double temperature, int64_t top_k, double top_p, double uniform) {
    if (temperature == 0.0 || largest_ == kNegativeInfinity) return greedy();
    Candidates c{row_, nullptr, nullptr, vocab_};
    if (top_k > 0 && top_k < vocab_) c = take_top_k(c, top_k);
    weigh(c, temperature);
    c.weights = s_.weights;
    if (top_p < 1.0) c = take_top_p(c, top_p, temperature);
    return invert(c, uniform);
  }

 private:
  float chunk_max(int64_t begin) const {
    const int64_t end = begin + chunk_ < vocab_ ? begin + chunk_ : vocab_;
    f32 largest = set1(kNegativeInfinity);
    int64_t i = begin;
    for (; i + W <= end; i += W) largest = max(load(row_ + i), largest);  // a NaN leaves the second operand
    float result = reduce_max(largest);
    for (; i < end; ++i) result = row_[i] > result ? row_[i] : result;
    return result;
  }

  // Move the candidates that `stays(index)` into the scratch, in order. May be done in place.
  template <class Stays>
  Candidates compact(const Candidates& c, Stays stays) const {
    int64_t count = 0;
    for (int64_t i = 0; i < c.count; ++i) count = keep(c, i, count, stays(i));
    return {s_.logits, s_.ids, c.weights, count};
  }

  // The same for a whole row, passing over the chunks whose maximum does not reach `bound`.
  template <class Stays>
  Candidates compact_row(const Candidates& c, float bound, Stays stays) const {
    int64_t count = 0;
    for (int64_t chunk = 0; chunk < num_chunks_; ++chunk) {
      if (!(s_.chunk_max[chunk] >= bound)) continue;
      const int64_t end = (chunk + 1) * chunk_ < vocab_ ? (chunk + 1) * chunk_ : vocab_;
      for (int64_t i = chunk * chunk_; i < end; ++i) count = keep(c, i, count, stays(i));
    }
    return {s_.logits, s_.ids, c.weights, count};
  }

  // Without a branch: which logits stay cannot be predicted.
  int64_t keep(const Candidates& c, int64_t i, int64_t count, bool stays) const {
    const float logit = c.logits[i];
    s_.ids[count] = c.ids ? c.ids[i] : static_cast<int32_t>(i);
    if (c.weights) s_.weights[count] = c.weights[i];
    s_.logits[count] = logit;
    return count + stays;
  }

  Candidates apply(const Candidates& c, Cut cut) const {
    const float bound = key_value(cut.key);
    const int64_t last = cut.last;
    return compact(c, [&](int64_t i) { return (c.logits[i] > bound) | ((c.logits[i] == bound) & (i <= last)); });
  }

  Candidates take_top_k(Candidates c, int64_t top_k) const {
    if (top_k <= num_chunks_) {
      // At least k logits reach the k-th largest of the chunk maxima, so the top k are among those that do.
      const Candidates maxima{s_.chunk_max, nullptr, nullptr, num_chunks_};
      const float bound = key_value(find_cut(maxima, static_cast<double>(top_k), s_.histogram).key);
      c = compact_row(c, bound, [&](int64_t i) { return row_[i] >= bound; });
    }
    return apply(c, find_cut(c, static_cast<double>(top_k), s_.histogram));
  }

  Candidates take_top_p(Candidates c, double top_p, double temperature) const {
    const double total = sum(c.weights, c.count), target = top_p * total;
    // All candidates this light together weigh less than what top-p leaves out.
    const double light = total * (1.0 - top_p) / static_cast<double>(c.count) * (1.0 - 1e-9);
    const double* weights = c.weights;
    const auto is_heavy = [=](int64_t i) { return weights[i] > light; };
    if (c.ids) {
      c = compact(c, is_heavy);
    } else {
      c = compact_row(c, heavy_bound(light, temperature), is_heavy);
    }
    return apply(c, find_cut(c, target, s_.histogram));
  }

  // Logits below this weigh no more than `light`, give or take a rounding error, which the slack in `light` covers.
  float heavy_bound(double light, double temperature) const {
    if (light <= 0.0) return kNegativeInfinity;
    if (largest_ == __builtin_inff()) return largest_;
    const double bound = largest_ + temperature * __builtin_log(light);
    return static_cast<float>(bound - 1e-6 * __builtin_fabs(bound));
  }

  // weights = exp((logits - largest) / temperature)
  void weigh(const Candidates& c, double temperature) const {
    const double rate = 1.0 / temperature;
    int64_t i = 0;
    for (; i + kDoubles <= c.count; i += kDoubles) weigh_vector(c.logits + i, rate, s_.weights + i);
    if (i == c.count) return;
    float logits[kDoubles] = {};
    double weights[kDoubles];
    for (int64_t j = i; j < c.count; ++j) logits[j - i] = c.logits[j];
    weigh_vector(logits, rate, weights);
    for (int64_t j = i; j < c.count; ++j) s_.weights[j] = weights[j - i];
  }

  void weigh_vector(const float* logits, double rate, double* weights) const {
    half_f32 narrow;
    std::memcpy(&narrow, logits, sizeof narrow);
    const f64 wide = __builtin_convertvector(narrow, f64);
    // The largest weighs 1, whatever the temperature and even if it is infinite.
    const i64 below = wide != static_cast<double>(largest_);
    const f64 result = exp_weight((f64)((i64)((wide - largest_) * rate) & below));
    std::memcpy(weights, &result, sizeof result);
  }

  static double sum(const double* weights, int64_t count) {
    double lanes[8] = {};
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) {
      for (int j = 0; j < 8; ++j) lanes[j] += weights[i + j];
    }
    for (int j = 0; i + j < count; ++j) lanes[j] += weights[i + j];
    return ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) + ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]));
  }

  // The first candidate whose cumulative weight exceeds `uniform` times the total.
  static int64_t invert(const Candidates& c, double uniform) {
    constexpr int64_t kRun = 256;
    const auto run_sum = [&](int64_t i) { return sum(c.weights + i, c.count - i < kRun ? c.count - i : kRun); };
    double total = 0.0;
    int64_t last_run = 0;  // the last run with any weight
    for (int64_t i = 0; i < c.count; i += kRun) {
      const double weight = run_sum(i);
      total += weight;
      if (weight > 0.0) last_run = i;
    }
    const double target = uniform * total;
    double before = 0.0;
    int64_t drawn = 0;  // the last one with any weight, should rounding keep the sum from exceeding the target
    for (int64_t i = 0; i <= last_run; i += kRun) {
      const double after = before + run_sum(i);
      if (after > target || i == last_run) {
        double cumulative = before;
        for (int64_t j = i; j < c.count && j < i + kRun; ++j) {
          if (c.weights[j] == 0.0) continue;
          cumulative += c.weights[j];
          if (cumulative > target) return token(c, j);
          drawn = j;
        }
      }
      before = after;
    }
    return token(c, drawn);
  }

  static int64_t token(const Candidates& c, int64_t i) { return c.ids ? c.ids[i] : i; }

  const float* row_;
  int64_t vocab_;
  const SampleScratch& s_;
  int64_t chunk_;
  int64_t num_chunks_;
  float largest_;
};

static int64_t sample_row(const SampleArgs& args, int64_t row, const SampleScratch& scratch) {
  RowSampler sampler(args.logits + row * args.row_stride, args.vocab, scratch);
  return sampler.draw(args.temperature[row], args.top_k[row], args.top_p[row], args.uniform[row]);
}

constexpr SamplingTable kSampling = {.sample_row = sample_row};

}  // namespace quire::QUIRE_ISA
