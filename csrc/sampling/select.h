// Choosing the largest logits of a row without sorting the vocabulary. A row is narrowed to its candidates by cheap
// bounds, and the cut is found by a radix histogram over order-preserving integer keys (as in radix select, Alabi et
// al. 2012).
#pragma once

#include <cstring>

#include "isa/simd.h"
#include "sampling/args.h"

namespace quire::QUIRE_ISA {

constexpr float kNegativeInfinity = -__builtin_inff();

// Unsigned integers in the order of the floats; NaN counts as -inf, -0 as 0. Without a branch: signs cannot be
// predicted.
QUIRE_INLINE uint32_t order_key(float x) {
  const float plain = x != x ? kNegativeInfinity : x + 0.0f;
  const int32_t bits = __builtin_bit_cast(int32_t, plain);
  return static_cast<uint32_t>(bits ^ (bits >> 31 | INT32_MIN));
}

// The float of a key.
QUIRE_INLINE float key_value(uint32_t key) { return __builtin_bit_cast(float, key >> 31 ? key & 0x7fffffffu : ~key); }

// The smallest float that is not less.
QUIRE_INLINE float round_up(double x) {
  const float nearest = static_cast<float>(x);
  return nearest < x ? key_value(order_key(nearest) + 1) : nearest;
}

// The candidates of one row, in id order. `ids` null: candidate i is token i.
struct Candidates {
  const float* logits;
  const int32_t* ids;
  int64_t count;
};

// The last candidate that stays: all with a larger logit stay, and those with this one up to index `last`. NaN is -inf.
struct Cut {
  float logit;
  int64_t last;  // among the candidates; not a token id
  double mass;   // of all that stay
};

// Adds the weights (null: each 1) of the candidates `members` (null: all) into a bin each by their keys. Many are added
// into several histograms by turns, so that an addition need not wait for the one before it. Returns how many.
static inline int fill_histograms(const Candidates& c, const double* weights, const int32_t* members, int64_t count,
                                  uint32_t lowest, int shift, double* histograms) {
  constexpr int kBlock = 64;
  const int num_histograms = count < kRadixBins ? 1 : kHistograms;
  std::memset(histograms, 0, sizeof(double) * static_cast<size_t>(num_histograms * kRadixBins));
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int n = static_cast<int>(count - begin < kBlock ? count - begin : kBlock);
    uint32_t bin_of[kBlock];
    double weight[kBlock];
    for (int i = 0; i < n; ++i) {
      const int64_t index = members ? members[begin + i] : begin + i;
      bin_of[i] = (order_key(c.logits[index]) - lowest) >> shift;
      weight[i] = weights ? weights[index] : 1.0;
    }
    for (int i = 0; i < n; ++i) histograms[(i & (num_histograms - 1)) * kRadixBins + bin_of[i]] += weight[i];
  }
  return num_histograms;
}

// The bin that holds the last candidate whose preceding mass is less than `target`. `mass` is advanced by the bins
// above it.
static inline uint32_t find_bin(const double* histograms, int num_histograms, double target, double& mass) {
  int lowest = -1;
  double below_lowest = mass;
  for (int bin = kRadixBins - 1; bin >= 0; --bin) {
    double in_bin = 0.0;
    for (int h = 0; h < num_histograms; ++h) in_bin += histograms[h * kRadixBins + bin];
    if (in_bin == 0.0) continue;
    lowest = bin;
    below_lowest = mass;
    if (mass + in_bin >= target) break;
    mass += in_bin;
  }
  mass = below_lowest;
  return static_cast<uint32_t>(lowest);
}

QUIRE_INLINE i32 lane_numbers() {
  i32 lanes;
  for (int i = 0; i < W; ++i) lanes[i] = i;
  return lanes;
}

// Lists those of the candidates `members` (null: all) whose key is within 2^shift from `lowest` on in `list`, which may
// be `members`, and returns how many there are.
static inline int64_t list_bin(const Candidates& c, const int32_t* members, int64_t count, uint32_t lowest, int shift,
                               int32_t* list) {
  int64_t num_listed = 0, i = 0;
#if defined(QUIRE_MOVES_LANES)
  typedef uint32_t u32 __attribute__((vector_size(4 * W)));
  for (; !members && i + W <= count; i += W) {
    const i32 bits = as_int(max(load(c.logits + i), set1(kNegativeInfinity)) + 0.0f);
    const u32 keys = (u32)(bits ^ (bits >> 31 | INT32_MIN));
    const i32 is_in = (i32)((keys - lowest) >> shift == 0);
    store_lanes(list + num_listed, move_together(lane_numbers() + static_cast<int32_t>(i), is_in));
    num_listed += __builtin_popcount(lane_bits(is_in));
  }
#endif
  // Without a branch: which ones are in the bin cannot be predicted.
  for (; i < count; ++i) {
    const int32_t index = members ? members[i] : static_cast<int32_t>(i);
    list[num_listed] = index;
    num_listed += (order_key(c.logits[index]) - lowest) >> shift == 0;
  }
  return num_listed;
}

// Order by logit, lower id first among equals: the candidates whose preceding mass is less than `target` stay, the
// first one always. At least one candidate has weight; weights null: each has 1. All logits lie between `low` and
// `high`. A histogram over the first 11 bits of the keys' range finds the bin in which the cut falls, another one over
// the next 11 bits divides that bin, until one key is left (at most three rounds).
static inline Cut find_cut(const Candidates& c, const double* weights, double target, float low, float high,
                           const SampleScratch& s) {
  double mass = 0.0;
  uint32_t lowest = order_key(low);
  const uint32_t range = order_key(high) - lowest;
  int shift = range >> kRadixBits ? 32 - kRadixBits - __builtin_clz(range) : 0;
  const int32_t* members = nullptr;
  int64_t count = c.count;
  for (;; shift = shift > kRadixBits ? shift - kRadixBits : 0) {
    const int num_histograms = fill_histograms(c, weights, members, count, lowest, shift, s.histograms);
    lowest += find_bin(s.histograms, num_histograms, target, mass) << shift;
    count = list_bin(c, members, count, lowest, shift, s.members);
    members = s.members;
    if (shift == 0 || count == 1) break;
  }
  Cut cut{key_value(order_key(c.logits[members[0]])), -1, mass};
  for (int64_t i = 0; i < count; ++i) {
    if (cut.last >= 0 && cut.mass >= target) break;
    cut.last = members[i];
    cut.mass += weights ? weights[members[i]] : 1.0;
  }
  return cut;
}

// Makes the weights of what does not stay 0.
static inline void drop_weights(const Candidates& c, Cut cut, double* weights) {
  for (int64_t i = 0; i < c.count; ++i) weights[i] = c.logits[i] >= cut.logit ? weights[i] : 0.0;
  for (int64_t i = cut.last + 1; i < c.count; ++i) weights[i] = c.logits[i] == cut.logit ? 0.0 : weights[i];
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

  Candidates all() const { return {logits_, nullptr, vocab_}; }

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

  // The candidates up to the cut, moved into the scratch. May be done in place.
  Candidates apply(const Candidates& c, Cut cut) const {
    int64_t count = 0;
    if (c.ids) {
      count = keep(c, cut, 0, c.count, 0);
    } else {
      for (int64_t chunk = 0; chunk < num_chunks_; ++chunk) {
        if (s_.chunk_max[chunk] < cut.logit) continue;
        const int64_t end = (chunk + 1) * chunk_;
        count = keep(c, cut, chunk * chunk_, end < vocab_ ? end : vocab_, count);
      }
    }
    return {s_.logits, s_.ids, count};
  }

  // The candidates with at least this logit, whatever their index.
  Candidates take_above(const Candidates& c, float bound) const { return apply(c, {bound, c.count, 0.0}); }

  // Of the whole row; top_k at most vocab.
  Candidates take_top_k(int64_t top_k) const {
    const double target = static_cast<double>(top_k);
    Candidates c = all();
    float bound = kNegativeInfinity;
    if (top_k <= num_chunks_) {
      // At least k logits reach the k-th largest of the chunk maxima, so the top k are among those that do.
      const Candidates maxima{s_.chunk_max, nullptr, num_chunks_};
      bound = find_cut(maxima, nullptr, target, kNegativeInfinity, largest_, s_).logit;
      c = take_above(c, bound);
    }
    return apply(c, find_cut(c, nullptr, target, bound, largest_, s_));
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

  // Moves those of the candidates [begin, end) that stay to where `count` others are, and returns how many there are.
  int64_t keep(const Candidates& c, Cut cut, int64_t begin, int64_t end, int64_t count) const {
    int64_t i = begin;
    for (; i + W <= end; i += W) {
      const f32 logits = max(load(c.logits + i), set1(kNegativeInfinity));
#if defined(QUIRE_MOVES_LANES)
      const i32 places = lane_numbers() + static_cast<int32_t>(i), ids = c.ids ? load_lanes(c.ids + i) : places;
      const i32 stays = (logits > cut.logit) | ((logits == cut.logit) & (places <= static_cast<int32_t>(cut.last)));
      store_lanes(s_.logits + count, move_together(as_int(logits), stays));
      store_lanes(s_.ids + count, move_together(ids, stays));
      count += __builtin_popcount(lane_bits(stays));
#else
      if (reduce_max(logits) >= cut.logit) count = keep_lanes(c, cut, i, i + W, count);
#endif
    }
    return keep_lanes(c, cut, i, end, count);
  }

  // Without a branch: which logits stay cannot be predicted.
  int64_t keep_lanes(const Candidates& c, Cut cut, int64_t begin, int64_t end, int64_t count) const {
    for (int64_t i = begin; i < end; ++i) {
      const float logit = c.logits[i] == c.logits[i] ? c.logits[i] : kNegativeInfinity;
      s_.ids[count] = c.ids ? c.ids[i] : static_cast<int32_t>(i);
      s_.logits[count] = logit;
      count += (logit > cut.logit) | ((logit == cut.logit) & (i <= cut.last));
    }
    return count;
  }

  const float* logits_;
  int64_t vocab_;
  const SampleScratch& s_;
  int64_t chunk_;
  int64_t num_chunks_;
  float largest_;
};

}  // namespace quire::QUIRE_ISA
