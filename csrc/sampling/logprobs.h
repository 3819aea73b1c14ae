// Log-probabilities of a token and of the likeliest ones, and the token's rank.
#pragma once

#include "sampling/sampling.h"

namespace quire::QUIRE_ISA {

// log of the sum of exp(logit - largest) over a row that holds more than -inf.
static inline double log_sum(const float* logits, int64_t vocab, float largest) {
  constexpr int64_t kBlock = 512;
  const Weigher<false> weigher(largest, 1.0);
  double total = 0.0;
  for (int64_t i = 0; i < vocab; i += kBlock) {
    const int64_t count = vocab - i < kBlock ? vocab - i : kBlock;
    double weights[kBlock];
    weigher.weigh(logits + i, count, weights);
    total += sum_weights(weights, count);
  }
  return __builtin_log(total);
}

// 1 + how many logits are larger.
static inline int32_t rank_of(const float* logits, int64_t vocab, float logit) {
  const float bound = logit == logit ? logit : kNegativeInfinity;
  const f32 bounds = set1(bound);
  i32 larger = {};
  int64_t i = 0;
  for (; i + W <= vocab; i += W) larger -= (i32)(load(logits + i) > bounds);
  int32_t rank = 1;
  for (int j = 0; j < W; ++j) rank += larger[j];
  for (; i < vocab; ++i) rank += logits[i] > bound;
  return rank;
}

static void logprob_row(const LogprobArgs& args, int64_t index, const SampleScratch& scratch) {
  const float* logits = args.logits + args.rows[index] * args.row_stride;
  const Row row(logits, args.vocab, scratch);
  const float largest = row.largest();
  const bool normalized = args.normalized && largest != kNegativeInfinity;
  const double shift = normalized ? log_sum(logits, args.vocab, largest) : 0.0;
  const auto logprob = [&](float logit) {
    if (logit != logit) return kNegativeInfinity;
    if (!normalized) return logit;
    const double below = logit == largest ? 0.0 : static_cast<double>(logit) - largest;
    return static_cast<float>(below - shift);
  };
  int32_t* ids = args.out_ids + index * (1 + args.num_top);
  float* out = args.out + index * (1 + args.num_top);
  const int64_t token_id = args.token_ids[index];
  args.ranks[index] = rank_of(logits, args.vocab, logits[token_id]);
  ids[0] = static_cast<int32_t>(token_id);
  out[0] = logprob(logits[token_id]);
  if (args.num_top == 0) return;
  const Candidates top = row.take_top_k(args.num_top);
  for (int64_t i = 0; i < top.count; ++i) {
    ids[1 + i] = top.ids[i];
    out[1 + i] = logprob(top.logits[i]);
  }
}

constexpr SamplingTable kSampling = {.sample_row = sample_row, .process_row = process_row, .logprob_row = logprob_row};

}  // namespace quire::QUIRE_ISA
