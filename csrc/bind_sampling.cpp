#include <stdexcept>
#include <string>
#include <vector>

#include "binding.h"
#include "thread_pool.h"

namespace quire {
namespace {

// What a thread keeps from call to call.
struct ThreadState {
  std::vector<float> chunk_max, logits;
  std::vector<double> histogram, weights;
  std::vector<int32_t> ids;
};

SampleScratch thread_scratch(int64_t vocab) {
  static thread_local ThreadState state;
  if (state.weights.size() < static_cast<size_t>(vocab)) {
    state.chunk_max.resize(kMaxChunks);
    state.histogram.resize(kHistograms * kMaxRadixBins);
    state.weights.resize(static_cast<size_t>(vocab));
    state.logits.resize(static_cast<size_t>(vocab));
    state.ids.resize(static_cast<size_t>(vocab));
  }
  return {state.chunk_max.data(), state.histogram.data(), state.weights.data(), state.logits.data(), state.ids.data()};
}

void refuse(int64_t row, const char* name, double value, const char* allowed) {
  throw std::invalid_argument("sample: row " + std::to_string(row) + " has " + name + " " + std::to_string(value) +
                              ", allowed is " + allowed);
}

void check(const SampleArgs& args) {
  for (int64_t row = 0; row < args.num_rows; ++row) {
    // Written so that NaN is refused.
    if (!(args.temperature[row] >= 0.0)) refuse(row, "temperature", args.temperature[row], "0 or more");
    if (args.top_k[row] < 0) refuse(row, "top_k", static_cast<double>(args.top_k[row]), "0 (all) or more");
    if (!(args.top_p[row] >= 0.0 && args.top_p[row] <= 1.0)) refuse(row, "top_p", args.top_p[row], "0 to 1");
    if (!(args.uniform[row] >= 0.0 && args.uniform[row] < 1.0)) {
      refuse(row, "uniform", args.uniform[row], "0 to 1, 1 excluded");
    }
  }
}

void sample(const SampleArgs& args) {
  check(args);
  const auto sample_row = kernels().sampling.sample_row;
  auto task = [&](int64_t row, int) { args.out[row] = sample_row(args, row, thread_scratch(args.vocab)); };
  parallel_for(args.num_rows, task);
}

}  // namespace

void bind_sampling(nb::module_& module) {
  module.def(
      "sample",
      [](Address logits, int64_t row_stride, int64_t num_rows, int64_t vocab, Address temperature, Address top_k,
         Address top_p, Address uniform, Address out) {
        sample({pointer<float>(logits), row_stride, num_rows, vocab, pointer<double>(temperature),
                pointer<int64_t>(top_k), pointer<double>(top_p), pointer<double>(uniform), pointer<int64_t>(out)});
      },
      Unlocked());
}

}  // namespace quire
