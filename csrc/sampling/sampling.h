// Drawing one token per row: the cuts of top-k, min-p and top-p by selection, then the cumulative distribution inverted
// in id order.
#pragma once

#include "sampling/changes.h"
#include "sampling/select.h"
#include "sampling/weights.h"

namespace quire::QUIRE_ISA {

// The candidates of one row that top-k, min-p and top-p leave, and the token that is drawn among them. The row holds
// more than -inf; temperature is not 0. Rough weights take half the time. Where is_certain() says so, which is nearly
// always, exact weights would have given the same candidates or token.
template <bool kRough>
class RowDraw {
 public:
  RowDraw(const SampleArgs& args, int64_t row_index, const Row& row, const SampleScratch& scratch)
      : row_(row),
        s_(scratch),
        weigher_(row.largest(), args.temperature[row_index]),
        vocab_(args.vocab),
        temperature_(args.temperature[row_index]),
        top_k_(args.top_k[row_index]),
        top_p_(args.top_p[row_index]),
        min_p_(args.min_p[row_index]),
        uniform_(args.uniform[row_index]) {}

  Candidates candidates() {
    Candidates c = take_top_k_and_min_p();
    if (top_p_ >= 1.0) return c;
    const Cut cut = cut_top_p(c);
    return row_.apply(c, cut);
  }

  // The first of the candidates whose cumulative weight exceeds `uniform` times the total.
  int64_t token() {
    Candidates c = take_top_k_and_min_p();
    const double* stored = nullptr;  // the weights of the candidates, where top-p has needed them
    if (top_p_ < 1.0) {
      const Cut cut = cut_top_p(c);
      drop_weights(c, cut, s_.weights);
      stored = s_.weights;
    }
    const double* const sums = s_.sums;
    const double total = stored ? sum_runs(stored, c.count, s_.sums) : weigher_.sum_runs(c.logits, c.count, s_.sums);
    const double target = uniform_ * total;
    const int64_t num_runs = (c.count + kRun - 1) / kRun;
    int64_t last_run = 0;  // the last run with any weight
    for (int64_t run = 0; run < num_runs; ++run) last_run = sums[run] > 0.0 ? run : last_run;
    double before = 0.0;
    int64_t drawn = 0;  // the last one with any weight, should rounding keep the sum from exceeding the target
    for (int64_t run = 0; run <= last_run; before += sums[run++]) {
      if (before + sums[run] <= target && run < last_run) continue;
      const int64_t begin = run * kRun, count = c.count - begin < kRun ? c.count - begin : kRun;
      double computed[kRun], cumulative = before;
      if (!stored) weigher_.weigh(c.logits + begin, count, computed);
      const double* const weights = stored ? stored + begin : computed;
      for (int64_t i = 0; i < count; ++i) {
        if (weights[i] == 0.0) continue;
        drawn = c.ids ? c.ids[begin + i] : begin + i;
        const double previous = cumulative;
        cumulative += weights[i];
        if (cumulative > target) {
          note_margin(previous, target, cumulative, total);
          return drawn;
        }
      }
    }
    is_certain_ = !kRough;
    return drawn;
  }

  // Whether exact weights would give the same.
  bool is_certain() const { return is_certain_; }

 private:
  Candidates take_top_k_and_min_p() const {
    const Candidates c = top_k_ > 0 && top_k_ < vocab_ ? row_.take_top_k(top_k_) : row_.all();
    // A probability is min_p times the largest where the logit is the largest + temperature * log(min_p).
    return min_p_ > 0.0 ? row_.take_above(c, round_up(logit_of(min_p_))) : c;
  }

  // Where top-p cuts the candidates, of which it takes those that may stay, and weighs them.
  Cut cut_top_p(Candidates& c) {
    const double total = weigher_.sum_runs(c.logits, c.count, s_.sums), target = top_p_ * total;
    // All candidates this light together weigh less than what top-p leaves out, so they need not be looked at.
    const double light = total * (1.0 - top_p_) / static_cast<double>(c.count) * (1.0 - 1e-9);
    double bound = logit_of(light);
    if (bound != __builtin_inf()) bound -= 1e-6 * __builtin_fabs(bound);  // for rounding errors
    c = row_.take_above(c, round_up(bound));
    weigher_.weigh(c.logits, c.count, s_.weights);
    const Cut cut = find_cut(c, s_.weights, target, round_up(bound), row_.largest(), s_);
    note_margin(cut.mass - s_.weights[cut.last], target, cut.mass, total);
    return cut;
  }

  // To be called with the two sums of weights between which `target` lies. Rough weights are only certain of it if it
  // is further from both than their sums can be wrong: by 1e-10 of the total at most, for up to 500,000 candidates.
  void note_margin(double below, double target, double above, double total) {
    constexpr double kTolerance = kRough ? 1e-9 : 0.0;
    is_certain_ &= target - below >= kTolerance * total && above - target >= kTolerance * total;
  }

  // Of a token with this share of the largest weight.
  double logit_of(double share) const {
    const double largest = row_.largest();
    return share == 1.0 || largest == __builtin_inf() ? largest : largest + temperature_ * __builtin_log(share);
  }

  const Row& row_;
  const SampleScratch& s_;
  Weigher<kRough> weigher_;
  int64_t vocab_;
  double temperature_;
  int64_t top_k_;
  double top_p_, min_p_, uniform_;
  bool is_certain_ = true;
};

static int64_t sample_row(const SampleArgs& args, int64_t index, const SampleScratch& scratch) {
  const Row row(changed_logits(args, index, scratch), args.vocab, scratch);
  if (row.largest() == kNegativeInfinity) return likeliest_allowed(args, index);
  if (args.temperature[index] == 0.0) return row.first_largest();
  RowDraw<true> rough(args, index, row, scratch);
  const int64_t token = rough.token();
  return rough.is_certain() ? token : RowDraw<false>(args, index, row, scratch).token();
}

static void process_row(const SampleArgs& args, int64_t index, float* out, const SampleScratch& scratch) {
  const Row row(changed_logits(args, index, scratch), args.vocab, scratch);
  const double temperature = args.temperature[index];
  const bool is_cut = temperature != 0.0 && row.largest() != kNegativeInfinity;
  const Candidates kept = is_cut ? RowDraw<false>(args, index, row, scratch).candidates() : row.all();
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
