// What is done to a row's logits before a token is drawn: mask, banned tokens, biases, penalties.
#pragma once

#include "sampling/select.h"

namespace quire::QUIRE_ISA {

QUIRE_INLINE const uint32_t* mask_of_row(const SampleArgs& args, int64_t row) {
  const LogitChanges* changes = args.changes;
  if (!changes || changes->mask_of[row] < 0) return nullptr;
  return changes->masks + changes->mask_of[row] * ((args.vocab + 31) / 32);
}

// out = logits, -inf where the mask has no bit.
static inline void copy_masked(const float* logits, const uint32_t* mask, int64_t vocab, float* out) {
  static_assert(W <= 32);
  i32 lanes;
  for (int i = 0; i < W; ++i) lanes[i] = static_cast<int32_t>(1u << i);
  const f32 cut = set1(-__builtin_inff());
  int64_t i = 0;
  for (; i + W <= vocab; i += W) {
    const int32_t bits = static_cast<int32_t>(mask[i / 32] >> (i % 32));
    store(out + i, select((lanes & bits) != 0, load(logits + i), cut));
  }
  for (; i < vocab; ++i) out[i] = mask[i / 32] >> (i % 32) & 1 ? logits[i] : -__builtin_inff();
}

// The penalties of a row: repetition for tokens of the prompt and output, the others by their number in the output.
static inline void penalize(const LogitChanges& changes, int64_t row, float* logits, int32_t* counts) {
  const int64_t history = changes.history_of[row];
  const int64_t begin = changes.histories.starts[history], end = changes.histories.starts[history + 1];
  const int64_t output = begin + changes.num_prompt_tokens[history];
  const int32_t* ids = changes.histories.ids;
  const float* penalties = changes.penalties + 3 * row;
  const float repetition = penalties[0], frequency = penalties[1], presence = penalties[2];
  for (int64_t i = output; i < end; ++i) ++counts[ids[i]];
  for (int64_t i = begin; i < end; ++i) {
    int32_t& count = counts[ids[i]];
    if (count < 0) continue;
    float& logit = logits[ids[i]];
    logit = logit > 0 ? logit / repetition : logit * repetition;
    logit -= frequency * static_cast<float>(count);
    if (count > 0) logit -= presence;
    count = -1;  // done
  }
  for (int64_t i = begin; i < end; ++i) counts[ids[i]] = 0;
}

// The logits that row is drawn from: its own where nothing changes, else a changed copy in the scratch.
static inline const float* changed_logits(const SampleArgs& args, int64_t row, const SampleScratch& scratch) {
  const float* logits = args.logits + row * args.row_stride;
  const LogitChanges* changes = args.changes;
  if (!changes) return logits;
  const uint32_t* mask = mask_of_row(args, row);
  const TokenLists &banned = changes->banned, &biased = changes->biased;
  const bool is_plain = !mask && banned.starts[row] == banned.starts[row + 1] &&
                        biased.starts[row] == biased.starts[row + 1] && changes->history_of[row] < 0;
  if (is_plain) return logits;
  if (mask) {
    copy_masked(logits, mask, args.vocab, scratch.row);
  } else {
    std::memcpy(scratch.row, logits, sizeof(float) * static_cast<size_t>(args.vocab));
  }
  for (int64_t i = banned.starts[row]; i < banned.starts[row + 1]; ++i) scratch.row[banned.ids[i]] = -__builtin_inff();
  for (int64_t i = biased.starts[row]; i < biased.starts[row + 1]; ++i) scratch.row[biased.ids[i]] += changes->bias[i];
  if (changes->history_of[row] >= 0) penalize(*changes, row, scratch.row, scratch.counts);
  return scratch.row;
}

// Where the changes leave nothing: the likeliest token that the mask allows, the first one if none has a likelihood.
static inline int64_t likeliest_allowed(const SampleArgs& args, int64_t row) {
  const float* logits = args.logits + row * args.row_stride;
  const uint32_t* mask = mask_of_row(args, row);
  int64_t best = -1;
  for (int64_t i = 0; mask && i < args.vocab; ++i) {
    const bool is_allowed = mask[i / 32] >> (i % 32) & 1;
    if (is_allowed && (best < 0 || order_key(logits[i]) > order_key(logits[best]))) best = i;
  }
  return best < 0 ? 0 : best;
}

}  // namespace quire::QUIRE_ISA
