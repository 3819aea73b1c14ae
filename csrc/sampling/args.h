// Sampling: the plain values shared by the binding and the kernels of each instruction set.
#pragma once

#include <cstdint>

namespace quire {

// Rows are first reduced to this many maxima at most; a top-k up to it needs one pass over the row.
constexpr int64_t kMaxChunks = 1024;
// Weights are summed by runs of this many candidates, so that a draw has to look into one run only.
constexpr int64_t kRun = 256;
constexpr int kHistograms = 4;
constexpr int kRadixBits = 11;
constexpr int kRadixBins = 1 << kRadixBits;

// List i is ids[starts[i]] to ids[starts[i + 1]].
struct TokenLists {
  const int64_t* starts;
  const int32_t* ids;
  int64_t num_lists;
};

// What is done to logits before a token is drawn, in this order.
struct LogitChanges {
  const int32_t* mask_of;  // [num_rows]; -1: none
  const uint32_t* masks;   // [num_masks, num_words]: bit t % 32 of word t / 32 tells whether token t may be drawn
  int64_t num_masks;
  TokenLists banned;  // one list per row
  TokenLists biased;  // one list per row
  const float* bias;
  const int32_t* history_of;         // [num_rows]; -1: none, and no penalties
  TokenLists histories;              // prompt and output
  const int64_t* num_prompt_tokens;  // [num_histories]
  const float* penalties;            // [num_rows, 3]: repetition, frequency, presence
};

struct SampleArgs {
  const float* logits;  // [num_rows, vocab]
  int64_t row_stride;
  int64_t num_rows;
  int64_t vocab;
  const double* temperature;  // [num_rows] each
  const int64_t* top_k;
  const double* top_p;
  const double* min_p;
  const double* uniform;
  const LogitChanges* changes;  // null: none
};

struct LogprobArgs {
  const float* logits;  // [.., vocab]
  int64_t row_stride;
  int64_t vocab;
  const int64_t* rows;       // [num_rows]: of the logits
  const int64_t* token_ids;  // [num_rows]
  int64_t num_rows;
  int64_t num_top;
  bool normalized;
  int32_t* out_ids;  // [num_rows, 1 + num_top]
  float* out;        // [num_rows, 1 + num_top]
  int32_t* ranks;    // [num_rows]
};

// What one thread needs: [vocab] each, but where it says otherwise.
struct SampleScratch {
  float* chunk_max;    // [kMaxChunks]
  double* histograms;  // [kHistograms, kRadixBins]
  double* weights;     // of candidates
  double* sums;        // [vocab / kRun + 1], of their runs
  float* logits;
  int32_t* ids;
  int32_t* members;  // of one bin of the histogram
  float* row;        // a row's changed logits
  int32_t* counts;   // how often a token came; all 0 between rows
};

struct SamplingTable {
  int64_t (*sample_row)(const SampleArgs& args, int64_t row, const SampleScratch& scratch);
  // out [vocab]: the logits that the draw is made from, divided by the temperature; -inf where they were cut.
  void (*process_row)(const SampleArgs& args, int64_t row, float* out, const SampleScratch& scratch);
  // Writes row `row` of the results, the likeliest tokens in the order of their ids.
  void (*logprob_row)(const LogprobArgs& args, int64_t row, const SampleScratch& scratch);
};

}  // namespace quire
