// Choosing the largest logits of a row without sorting the vocabulary. A row is narrowed to its candidates by cheap
// bounds, and the cut is found by a radix histogram over order-preserving integer keys (as in radix select, Alabi et
// al. 2012). Weights and sums are double, in plain loops without fused operations, so that every instruction set gives
// the same.
#pragma once

#include <cstring>

#include "isa/simd.h"
#include "sampling/args.h"

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
  constexpr double kFactorials[] = {6227020800, 479001600, 39916800, 3628800, 362880, 40320, 5040,
                                    720,        120,       24,       6,       2,      1,     1};
  f64 sum = f64{} + 1.0 / kFactorials[0];
  QUIRE_UNROLL
  for (int i = 1; i < 14; ++i) sum = sum * r + 1.0 / kFactorials[i];
  const i64 exponent = (i64)shifted - __builtin_bit_cast(int64_t, kRound);
  const f64 power = (f64)((exponent + 1023) << 52);
  return (f64)((i64)(sum * power) & inside);
}

// Unsigned integers in the order of the floats; NaN counts as -inf, -0 as 0. Without a branch: signs cannot be
// predicted.
QUIRE_INLINE uint32_t order_key(float x) {
  const float plain = x != x ? kNegativeInfinity : x + 0.0f;
  const int32_t bits = __builtin_bit_cast(int32_t, plain);
  return static_cast<uint32_t>(bits ^ (bits >> 31 | INT32_MIN));
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

// The bin of `level` that holds the last candidate whose preceding mass is less than what is left of the target, among
// the candidates `members` (null: all). `mass` is advanced by the bins above it.
static inline uint32_t cut_bin(const Candidates& c, const int32_t* members, int64_t count, int level, double target,
                               double* histogram, double& mass) {
  constexpr int kBlock = 64;
  const int bins = 1 << kRadixBits[level], shift = kRadixShift[level];
  std::memset(histogram, 0, sizeof(double) * static_cast<size_t>(kHistograms * bins));
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int n = static_cast<int>(count - begin < kBlock ? count - begin : kBlock);
    uint32_t bin_of[kBlock];
    double weight[kBlock];
    for (int i = 0; i < n; ++i) {
      const int64_t index = members ? members[begin + i] : begin + i;
      bin_of[i] = order_key(c.logits[index]) >> shift & static_cast<uint32_t>(bins - 1);
      weight[i] = c.weights ? c.weights[index] : 1.0;
    }
    // Neighbours add into different histograms, so that an addition need not wait for the one before it.
    for (int i = 0; i < n; ++i) histogram[(i % kHistograms) * bins + bin_of[i]] += weight[i];
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
  return static_cast<uint32_t>(lowest);
}

// Order by logit, lower id first among equals: the candidates whose preceding mass is less than `target` stay, the
// first one always. At least one candidate has weight. num_members: if not negative, the cut is known to be among that
// many in s.members.
static inline Cut find_cut(const Candidates& c, double target, const SampleScratch& s, int64_t num_members = -1) {
  double mass = 0.0;
  uint32_t key = 0;
  const int32_t* members = num_members < 0 ? nullptr : s.members;
  int64_t count = num_members < 0 ? c.count : num_members;
  for (int level = 0; level < kRadixLevels; ++level) {
    key = key << kRadixBits[level] | cut_bin(c, members, count, level, target, s.histogram, mass);
    // Without a branch: which ones are members cannot be predicted.
    int64_t num_left = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int32_t index = members ? members[i] : static_cast<int32_t>(i);
      s.members[num_left] = index;
      num_left += order_key(c.logits[index]) >> kRadixShift[level] == key;
    }
    members = s.members;
    count = num_left;
  }
  Cut cut{key, -1};
  for (int64_t i = 0; i < count; ++i) {
    if (cut.last >= 0 && mass >= target) break;
    cut.last = members[i];
    mass += c.weights ? c.weights[members[i]] : 1.0;
  }
  return cut;
}

// A row, the maxima of its chunks, and ways to narrow it down.
class Row {
 public:
  Row(const float* logits, int64_t vocab, const SampleScratch& scratch) : logits_(logits), vocab_(vocab), s_(scratch) {
    chunk_ = (vocab + kMaxChunks - 1) / kMaxChunks;
    chunk_ = (chunk_ + 15) / 16 * 16;
    num_chunks_ = (vocab + chunk_ - 1) / chunk_;
    largest_ = kNegativeInfinity;
    for (int64_t c = 0; c < num_chunks_; ++c) {
      s_.chunk_max[c] = chunk_max(c * chunk_);
      if (s_.chunk_max[c] > largest_) largest_ = s_.chunk_max[c];
    }
  }

  // -inf where there is nothing but NaN.
  float largest() const { return largest_; }

  Candidates all() const { return {logits_, nullptr, nullptr, vocab_}; }

  // The first token with the largest logit; 0 where there is nothing but NaN.
  int64_t first_largest() const {
    for (int64_t c = 0; c < num_chunks_; ++c) {
      if (s_.chunk_max[c] != largest_) continue;
      for (int64_t i = c * chunk_; i < vocab_; ++i) {
        if (logits_[i] == largest_) return i;
      }
    }
    return 0;
  }

  // The candidates that `stays(index)`, in order, moved into the scratch. May be done in place.
  template <class Stays>
  Candidates compact(const Candidates& c, Stays stays) const {
    int64_t count = 0;
    for (int64_t i = 0; i < c.count; ++i) count = keep(c, i, count, stays(i));
    return {s_.logits, s_.ids, c.weights, count};
  }

  // The same, where none below `bound` stays: passes over the chunks of a whole row that do not reach it.
  template <class Stays>
  Candidates compact_above(const Candidates& c, double bound, Stays stays) const {
    if (c.ids) return compact(c, stays);
    int64_t count = 0;
    for (int64_t chunk = 0; chunk < num_chunks_; ++chunk) {
      if (s_.chunk_max[chunk] < bound) continue;
      const int64_t end = (chunk + 1) * chunk_ < vocab_ ? (chunk + 1) * chunk_ : vocab_;
      for (int64_t i = chunk * chunk_; i < end; ++i) count = keep(c, i, count, stays(i));
    }
    return {s_.logits, s_.ids, c.weights, count};
  }

  // Puts the tokens of the chunks that reach `bound` into s.members and returns how many.
  int64_t list_above(double bound) const {
    int64_t count = 0;
    for (int64_t chunk = 0; chunk < num_chunks_; ++chunk) {
      if (s_.chunk_max[chunk] < bound) continue;
      const int64_t end = (chunk + 1) * chunk_ < vocab_ ? (chunk + 1) * chunk_ : vocab_;
      for (int64_t i = chunk * chunk_; i < end; ++i) s_.members[count++] = static_cast<int32_t>(i);
    }
    return count;
  }

  Candidates apply(const Candidates& c, Cut cut) const {
    return compact_above(c, key_value(cut.key), [&](int64_t i) {
      const uint32_t key = order_key(c.logits[i]);
      return (key > cut.key) | ((key == cut.key) & (i <= cut.last));
    });
  }

  // Of the whole row; top_k at most vocab.
  Candidates take_top_k(int64_t top_k) const {
    Candidates c = all();
    if (top_k <= num_chunks_) {
      // At least k logits reach the k-th largest of the chunk maxima, so the top k are among those that do.
      const Candidates maxima{s_.chunk_max, nullptr, nullptr, num_chunks_};
      const float bound = key_value(find_cut(maxima, static_cast<double>(top_k), s_).key);
      c = compact_above(c, bound, [&](int64_t i) { return !(logits_[i] < bound); });
    }
    return apply(c, find_cut(c, static_cast<double>(top_k), s_));
  }

 private:
  float chunk_max(int64_t begin) const {
    const int64_t end = begin + chunk_ < vocab_ ? begin + chunk_ : vocab_;
    f32 largest = set1(kNegativeInfinity);
    int64_t i = begin;
    for (; i + W <= end; i += W) largest = max(load(logits_ + i), largest);  // a NaN leaves the second operand
    float result = reduce_max(largest);
    for (; i < end; ++i) result = logits_[i] > result ? logits_[i] : result;
    return result;
  }

  // Without a branch: which logits stay cannot be predicted.
  int64_t keep(const Candidates& c, int64_t i, int64_t count, bool stays) const {
    const float logit = c.logits[i];
    s_.ids[count] = c.ids ? c.ids[i] : static_cast<int32_t>(i);
    if (c.weights) s_.weights[count] = c.weights[i];
    s_.logits[count] = logit;
    return count + stays;
  }

  const float* logits_;
  int64_t vocab_;
  const SampleScratch& s_;
  int64_t chunk_;
  int64_t num_chunks_;
  float largest_;
};

// Softmax before it is normalized: exp((logit - largest) / temperature).
class Weigher {
 public:
  Weigher(float largest, double temperature) : largest_(largest), rate_(1.0 / temperature) {}

  void weigh(const float* logits, int64_t count, double* weights) const {
    int64_t i = 0;
    for (; i + kDoubles <= count; i += kDoubles) weigh_vector(logits + i, weights + i);
    if (i == count) return;
    float last[kDoubles] = {};
    double last_weights[kDoubles];
    for (int64_t j = i; j < count; ++j) last[j - i] = logits[j];
    weigh_vector(last, last_weights);
    for (int64_t j = i; j < count; ++j) weights[j] = last_weights[j - i];
  }

 private:
  void weigh_vector(const float* logits, double* weights) const {
    half_f32 narrow;
    std::memcpy(&narrow, logits, sizeof narrow);
    const f64 wide = __builtin_convertvector(narrow, f64);
    // The largest weighs 1, whatever the temperature and even if it is infinite.
    const i64 below = wide != static_cast<double>(largest_);
    const f64 result = exp_weight((f64)((i64)((wide - largest_) * rate_) & below));
    std::memcpy(weights, &result, sizeof result);
  }

  float largest_;
  double rate_;
};

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

}  // namespace quire::QUIRE_ISA
