// Routers of mixtures of experts (Shazeer et al. 2017): the experts of each row, best first, and what their results
// count. Equal values go to the lower index, and a logit that is not a number counts as the lowest. A row is computed
// alone.
#pragma once

#include "base/kernel_table.h"
#include "elementwise/activation.h"
#include "experts/grouping.h"
#include "isa/rows.h"

namespace quire::QUIRE_ISA {

// One row: what experts are chosen by, and which cannot be chosen (any more).
struct Choice {
  float by[kMostExperts];
  bool is_out[kMostExperts];

  // The best of [begin, end); -1 if there is none.
  QUIRE_MEMBER int64_t best(int64_t begin, int64_t end) const {
    int64_t found = -1;
    for (int64_t i = begin; i < end; ++i) {
      if (!is_out[i] && (found < 0 || by[i] > by[found])) found = i;
    }
    return found;
  }
};

// values [count] -> e^(value - highest), and their sum.
static float exponentials(const float* values, float highest, int64_t count, float* out) {
  for_parts(count, [&](int64_t i, int64_t n) { store_some(out + i, exp(load_some(values + i, n) - highest), n); });
  return sum_parts(count, [&](int64_t i, int64_t n) { return load_some(out + i, n); });
}

static float highest_of(const float* values, int64_t count) {
  float highest = -__builtin_inff();
  for (int64_t i = 0; i < count; ++i) highest = values[i] > highest ? values[i] : highest;
  return highest;
}

static void score(const RouteArgs& args, const float* logits, float* scores) {
  const int64_t count = args.num_experts;
  if (args.scoring == kSigmoid) {
    for_parts(count, [&](int64_t i, int64_t n) { store_some(scores + i, sigmoid(load_some(logits + i, n)), n); });
    for (int64_t i = 0; i < count; ++i) scores[i] = logits[i] == logits[i] ? scores[i] : logits[i];
  } else {
    const float sum = exponentials(logits, highest_of(logits, count), count, scores);
    for (int64_t i = 0; i < count; ++i) scores[i] = scores[i] / sum;
  }
}

// Rules out the experts of all but the best groups.
static void limit_groups(const RouteArgs& args, Choice& choice) {
  const int64_t size = args.num_experts / args.num_groups;
  Choice groups;
  for (int64_t g = 0; g < args.num_groups; ++g) {
    const int64_t begin = g * size, first = choice.best(begin, begin + size);
    groups.by[g] = choice.by[first];
    groups.is_out[g] = false;
    if (!args.has_pairs) continue;
    choice.is_out[first] = true;
    groups.by[g] = groups.by[g] + choice.by[choice.best(begin, begin + size)];
    choice.is_out[first] = false;
  }
  for (int64_t i = 0; i < args.top_groups; ++i) groups.is_out[groups.best(0, args.num_groups)] = true;
  for (int64_t i = 0; i < args.num_experts; ++i) choice.is_out[i] = !groups.is_out[i / size];
}

// What the best of the logits that are left counts: its share of those that are nearly as large (Liu et al. 2023,
// SparseMixer-v2).
static float share_of(const RouteArgs& args, const Choice& choice, const float* logits, int64_t best, float* scratch) {
  const float highest = logits[best];
  for (int64_t i = 0; i < args.num_experts; ++i) {
    const float magnitude = logits[i] < 0 ? -logits[i] : logits[i];
    const float factor = magnitude > highest ? magnitude : highest;
    const bool is_far = (highest - logits[i]) / factor > 2 * args.jitter;
    scratch[i] = choice.is_out[i] || is_far ? -__builtin_inff() : logits[i];
  }
  return 1 / exponentials(scratch, highest, args.num_experts, scratch);
}

static void route_row(const RouteArgs& args, const float* logits, int32_t* ids, float* weights) {
  alignas(64) float scores[kMostExperts];
  Choice choice;
  const bool is_sparse_mixer = args.scoring == kSparseMixer;
  if (!is_sparse_mixer) score(args, logits, scores);
  const bool by_scores = args.bias != nullptr || args.has_pairs;  // else logits, which have the same order
  for (int64_t i = 0; i < args.num_experts; ++i) {
    float by = by_scores ? scores[i] : logits[i];
    if (args.bias != nullptr) by = by + args.bias[i];
    choice.by[i] = by == by ? by : -__builtin_inff();
    choice.is_out[i] = false;
  }
  if (args.num_groups > 1) limit_groups(args, choice);
  float sum = 0;
  for (int64_t rank = 0; rank < args.top_k; ++rank) {
    const int64_t best = choice.best(0, args.num_experts);
    ids[rank] = int32_t(best);
    weights[rank] = is_sparse_mixer ? share_of(args, choice, logits, best, scores) : scores[best];
    sum = sum + weights[rank];
    choice.is_out[best] = true;
  }
  for (int64_t rank = 0; rank < args.top_k; ++rank) {
    if (args.is_normalized) weights[rank] = weights[rank] / (sum + 1e-20f);
    weights[rank] = weights[rank] * args.scale;
  }
}

static void route(const RouteArgs& args) {
  for_rows(args.rows, args.num_experts * (args.top_k + 4), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      route_row(args, args.logits + row * args.num_experts, args.ids + row * args.top_k,
                args.weights + row * args.top_k);
    }
  });
}

}  // namespace quire::QUIRE_ISA
