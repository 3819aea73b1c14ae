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

// exp(x) for x <= 0 to about one unit in the last place; 0 below -708. Written so that the compiler can vectorize it.
QUIRE_INLINE double exp_weight(double x) {
  constexpr double kLog2E = 1.4426950408889634, kLn2High = 0x1.62e42fefa0000p-1, kLn2Low = 0x1.cf79abc9e3b3ap-40;
  constexpr double kRound = 0x1.8p52;  // adding it leaves the nearest integer in the low bits
  const double clamped = x < -708.0 ? -708.0 : x;
  const double shifted = clamped * kLog2E + kRound;
  const double n = shifted - kRound;
  const double r = (clamped - n * kLn2High) - n * kLn2Low;
  double sum = 1.0 / 6227020800.0;
  sum = sum * r + 1.0 / 479001600.0;
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
  const int64_t exponent = __builtin_bit_cast(int64_t, shifted) - __builtin_bit_cast(int64_t, kRound);
  const double power = __builtin_bit_cast(double, (exponent + 1023) << 52);
  return x < -708.0 ? 0.0 : sum * power;
}

// Unsigned integers in the order of the floats; NaN counts as -inf, -0 as 0.
QUIRE_INLINE uint32_t order_key(float x) {
  const float plain = x != x ? kNegativeInfinity : x + 0.0f;
  const uint32_t bits = __builtin_bit_cast(uint32_t, plain);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

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
    if (top_p < 1.0) c = take_top_p(c, top_p);
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

  // Move the candidates that `stays(index)` into the scratch, in order.
  template <class Stays>
  Candidates compact(const Candidates& c, Stays stays) const {
    int64_t count = 0;
    for (int64_t i = 0; i < c.count; ++i) {
      if (!stays(i)) continue;
      const float logit = c.logits[i];
      s_.ids[count] = c.ids ? c.ids[i] : static_cast<int32_t>(i);
      if (c.weights) s_.weights[count] = c.weights[i];
      s_.logits[count++] = logit;
    }
    return {s_.logits, s_.ids, c.weights, count};
  }

  Candidates apply(const Candidates& c, Cut cut) const {
    return compact(c, [&](int64_t i) {
      const uint32_t key = order_key(c.logits[i]);
      return key > cut.key || (key == cut.key && i <= cut.last);
    });
  }

  Candidates take_top_k(Candidates c, int64_t top_k) const {
    if (top_k <= num_chunks_) {
      // At least k logits reach the k-th largest of the chunk maxima, so the top k are among those that do.
      const Candidates maxima{s_.chunk_max, nullptr, nullptr, num_chunks_};
      const uint32_t bound = find_cut(maxima, static_cast<double>(top_k), s_.histogram).key;
      c = compact(c, [&](int64_t i) { return order_key(c.logits[i]) >= bound; });
    }
    return apply(c, find_cut(c, static_cast<double>(top_k), s_.histogram));
  }

  Candidates take_top_p(Candidates c, double top_p) const {
    const double total = sum(c.weights, c.count);
    // All candidates this light together weigh no more than what top-p leaves out.
    const double light = total * (1.0 - top_p) / static_cast<double>(c.count) * (1.0 - 1e-9);
    const double target = top_p * total;
    c = compact(c, [&](int64_t i) { return c.weights[i] > light; });
    return apply(c, find_cut(c, target, s_.histogram));
  }

  void weigh(const Candidates& c, double temperature) const {
    const double largest = largest_, negligible = kNegativeInfinity;
    for (int64_t i = 0; i < c.count; ++i) {
      const float logit = c.logits[i];
      const double below = logit == largest_ ? 0.0 : (static_cast<double>(logit) - largest) / temperature;
      s_.weights[i] = exp_weight(logit != logit ? negligible : below);
    }
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
