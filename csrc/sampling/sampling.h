// Drawing one token per row: the cuts of top-k, min-p and top-p by selection, then the cumulative distribution inverted
// in id order.
#pragma once

#include "sampling/changes.h"
#include "sampling/select.h"

namespace quire::QUIRE_ISA {

// The candidates that top-k, min-p and top-p leave, with weights. The row holds more than -inf; temperature is not 0.
class Cutter {
 public:
  Cutter(const SampleArgs& args, int64_t row_index, const Row& row, const SampleScratch& scratch)
      : row_(row),
        s_(scratch),
        vocab_(args.vocab),
        temperature_(args.temperature[row_index]),
        top_k_(args.top_k[row_index]),
        top_p_(args.top_p[row_index]),
        min_p_(args.min_p[row_index]) {}

  Candidates cut() const {
    Candidates c = top_k_ > 0 && top_k_ < vocab_ ? row_.take_top_k(top_k_) : row_.all();
    if (min_p_ > 0.0) c = take_min_p(c);
    Weigher(row_.largest(), temperature_).weigh(c.logits, c.count, s_.weights);
    c.weights = s_.weights;
    return top_p_ < 1.0 ? take_top_p(c) : c;
  }

 private:
  // A probability is min_p times the largest where the logit is the largest + temperature * log(min_p).
  Candidates take_min_p(const Candidates& c) const {
    const double bound = logit_of(min_p_);
    return row_.compact_above(c, bound, [&](int64_t i) { return c.logits[i] >= bound; });
  }

  Candidates take_top_p(const Candidates& c) const {
    const double total = sum_weights(c.weights, c.count);
    if (c.ids) return row_.apply(c, find_cut(c, top_p_ * total, s_));
    // All candidates this light together weigh less than what top-p leaves out.
    const double light = total * (1.0 - top_p_) / static_cast<double>(c.count) * (1.0 - 1e-9);
    double bound = light > 0.0 ? logit_of(light) : kNegativeInfinity;
    bound -= 1e-6 * __builtin_fabs(bound);  // a rounding error more, which the slack in `light` covers
    return row_.apply(c, find_cut(c, top_p_ * total, s_, row_.list_above(bound)));
  }

  // Of a token with this share of the largest weight.
  double logit_of(double weight) const {
    const double largest = row_.largest();
    return largest == __builtin_inf() ? largest : largest + temperature_ * __builtin_log(weight);
  }

  const Row& row_;
  const SampleScratch& s_;
  int64_t vocab_;
  double temperature_;
  int64_t top_k_;
  double top_p_, min_p_;
};

// The first candidate whose cumulative weight exceeds `uniform` times the total.
static inline int64_t invert(const Candidates& c, double uniform) {
  constexpr int64_t kRun = 256;
  const auto token = [&](int64_t i) { return c.ids ? c.ids[i] : i; };
  const auto run_sum = [&](int64_t i) { return sum_weights(c.weights + i, c.count - i < kRun ? c.count - i : kRun); };
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
        if (cumulative > target) return token(j);
        drawn = j;
      }
    }
    before = after;
  }
  return token(drawn);
}

static int64_t sample_row(const SampleArgs& args, int64_t index, const SampleScratch& scratch) {
  const Row row(changed_logits(args, index, scratch), args.vocab, scratch);
  if (row.largest() == kNegativeInfinity) return likeliest_allowed(args, index);
  if (args.temperature[index] == 0.0) return row.first_largest();
  return invert(Cutter(args, index, row, scratch).cut(), args.uniform[index]);
}

static void process_row(const SampleArgs& args, int64_t index, float* out, const SampleScratch& scratch) {
  const Row row(changed_logits(args, index, scratch), args.vocab, scratch);
  const double temperature = args.temperature[index];
  const bool is_cut = temperature != 0.0 && row.largest() != kNegativeInfinity;
  const Candidates kept = is_cut ? Cutter(args, index, row, scratch).cut() : row.all();
  if (kept.ids) {
    for (int64_t i = 0; i < args.vocab; ++i) out[i] = kNegativeInfinity;
  }
  for (int64_t i = 0; i < kept.count; ++i) {
    const double logit = kept.logits[i];
    const float scaled = static_cast<float>(is_cut ? logit / temperature : logit);
    out[kept.ids ? kept.ids[i] : i] = scaled == scaled ? scaled : kNegativeInfinity;
  }
}

}  // namespace quire::QUIRE_ISA
