// What is done to scores before the softmax in some models: they are capped, or get terms for the distance of query and
// key.
#pragma once

#include "attention/look_ahead.h"
#include "attention/plan.h"
#include "attention/tiles/tile.h"

namespace quire::QUIRE_ISA {

// Adds what the distances, from `distance` on, add to vectors [vector, end) of the scores of row r, which are those of
// keys from `start` on. `token` and `head` are the row's.
static inline void add_relative(const AttentionArgs& a, const AttentionScratch& s, int64_t seq, int64_t token,
                                int64_t head, int64_t r, int64_t start, int64_t vector, int64_t end, float* scores) {
  const RelativeTerms& relative = a.relative;
  const int64_t first = relative.reach + start - s.positions[r];
  if (relative.bias != nullptr) {
    const float* bias = relative.bias + head * (2 * relative.reach + 16) + first;
    for (int64_t i = vector * W; i < end * W; i += W) {
      store(scores + i, fma(load(bias + i), set1(kLog2E), load(scores + i)));
    }
  }
  if (relative.term == nullptr) return;
  const int64_t row = a.num_heads * relative.num_terms, offset = head * relative.num_terms;
  const int64_t last = min_of(end * W, s.end_keys[r] - start);
  for (int64_t i = max_of(vector * W, s.first_keys[r] - start); i < last; ++i) {
    const int64_t term = offset + relative.term[first + i];
    float sum = 0.0f;
    if (relative.of_query != nullptr) sum += relative.of_query[token * row + term];
    if (relative.of_key != nullptr) sum += relative.of_key[(a.query_start[seq] + start + i) * row + term];
    scores[i] += sum * (a.scale * kLog2E);
  }
}

// Caps vectors [vector, end) of the scores of rows [row, row + rows), and adds what depends on distances. Not inlined:
// plain attention's loop keeps its registers.
__attribute__((noinline)) static void change_scores(const AttentionArgs& a, const AttentionItem& item,
                                                    const AttentionScratch& s, int64_t start, int64_t row, int64_t rows,
                                                    int64_t vector, int64_t end, float* scores) {
  const int64_t group = a.num_heads / a.num_kv_heads, token_rows = group * item.num_kv_heads;
  for (int64_t r = row; r < row + rows; ++r, scores += kTileKeys) {
    const int64_t token = item.token_begin + r / token_rows, head = item.kv_head * group + r % token_rows;
    if (a.softcap > 0) cap_scores(scores, vector, end, a.softcap * kLog2E);
    if (a.slopes != nullptr) add_slope(scores, vector, end, a.slopes[head] * kLog2E, start - s.positions[r]);
    add_relative(a, s, item.seq, token, head, r, start, vector, end, scores);
  }
}

}  // namespace quire::QUIRE_ISA
