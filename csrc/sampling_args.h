// Sampling: the plain values shared by the binding and the kernels of each instruction set.
#pragma once

#include <cstdint>

namespace quire {

// Rows are first reduced to this many maxima at most; a top-k up to it needs one pass over the row.
constexpr int64_t kMaxChunks = 1024;
constexpr int kHistograms = 4;
constexpr int kMaxRadixBins = 2048;

struct SampleArgs {
  const float* logits;  // [num_rows, vocab]
  int64_t row_stride;
  int64_t num_rows;
  int64_t vocab;
  const double* temperature;  // [num_rows] each
  const int64_t* top_k;
  const double* top_p;
  const double* uniform;
  int64_t* out;
};

// What one thread needs.
struct SampleScratch {
  float* chunk_max;   // [kMaxChunks]
  double* histogram;  // [kHistograms, kMaxRadixBins]
  double* weights;    // [vocab] each: the candidates
  float* logits;
  int32_t* ids;
};

struct SamplingTable {
  int64_t (*sample_row)(const SampleArgs& args, int64_t row, const SampleScratch& scratch);
};

}  // namespace quire
