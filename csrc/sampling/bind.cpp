#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/binding.h"
#include "base/checks.h"
#include "runtime/memory.h"
#include "runtime/thread_pool.h"

namespace quire {
namespace {

// What a thread keeps from call to call.
struct ThreadState {
  std::vector<float> chunk_max, logits, row;
  std::vector<double> histograms, sums, weights;
  std::vector<int32_t> ids, members, counts;
};

SampleScratch thread_scratch(int64_t vocab) {
  static thread_local ThreadState state;
  ask_for_memory();
  if (state.weights.size() < static_cast<size_t>(vocab)) {
    const size_t size = std::max(static_cast<size_t>(vocab), static_cast<size_t>(kMaxChunks));
    state.chunk_max.resize(kMaxChunks);
    state.histograms.resize(kHistograms * kRadixBins);
    state.sums.resize(size / kRun + 1);
    for (auto* floats : {&state.logits, &state.row}) floats->resize(size);
    for (auto* integers : {&state.ids, &state.members, &state.counts}) integers->resize(size);
    state.weights.resize(size);  // last: it says that all have their size
  }
  return {state.chunk_max.data(), state.histograms.data(), state.weights.data(),
          state.sums.data(),      state.logits.data(),     state.ids.data(),
          state.members.data(),   state.row.data(),        state.counts.data()};
}

void refuse(int64_t row, const char* name, double value, const char* allowed) {
  throw std::invalid_argument("sample: row " + std::to_string(row) + " has " + name + " " + std::to_string(value) +
                              ", allowed is " + allowed);
}

void check_ids(const char* name, const TokenLists& lists, int64_t num_ids, int64_t vocab) {
  bool is_fine = lists.starts[0] == 0 && lists.starts[lists.num_lists] == num_ids;
  for (int64_t i = 0; i < lists.num_lists; ++i) is_fine &= lists.starts[i] <= lists.starts[i + 1];
  if (!is_fine) {
    throw std::invalid_argument(std::string("sample: the starts of ") + name + " must rise from 0 to " +
                                std::to_string(num_ids));
  }
  uint32_t largest = 0;  // as unsigned, a negative id is too large
  for (int64_t i = 0; i < num_ids; ++i) largest = std::max(largest, static_cast<uint32_t>(lists.ids[i]));
  if (num_ids > 0 && largest >= static_cast<uint32_t>(vocab)) {
    throw std::invalid_argument(std::string("sample: ") + name + " has token id " +
                                std::to_string(static_cast<int32_t>(largest)) + ", which is not in [0, " +
                                std::to_string(vocab) + ")");
  }
}

void check(const SampleArgs& args) {
  for (int64_t row = 0; row < args.num_rows; ++row) {
    // Written so that NaN is refused.
    if (!(args.temperature[row] >= 0.0)) refuse(row, "temperature", args.temperature[row], "0 or more");
    if (args.top_k[row] < 0) refuse(row, "top_k", static_cast<double>(args.top_k[row]), "0 (all) or more");
    if (!(args.top_p[row] >= 0.0 && args.top_p[row] <= 1.0)) refuse(row, "top_p", args.top_p[row], "0 to 1");
    if (!(args.min_p[row] >= 0.0 && args.min_p[row] <= 1.0)) refuse(row, "min_p", args.min_p[row], "0 to 1");
    if (!(args.uniform[row] >= 0.0 && args.uniform[row] < 1.0)) {
      refuse(row, "uniform", args.uniform[row], "0 to 1, 1 excluded");
    }
    if (!args.changes) continue;
    const LogitChanges& changes = *args.changes;
    const auto check_index = [&](const char* name, int64_t index, int64_t count) {
      if (index < -1 || index >= count) refuse(row, name, static_cast<double>(index), "-1 or an index of a list given");
    };
    check_index("mask_of", changes.mask_of[row], changes.num_masks);
    check_index("history_of", changes.history_of[row], changes.histories.num_lists);
    const float repetition = changes.penalties[3 * row];
    if (!(repetition > 0.0f)) refuse(row, "repetition_penalty", repetition, "more than 0");
  }
}

LogitChanges make_changes(const int32_t* mask_of, const uint32_t* masks, const int64_t* banned_starts,
                          const int32_t* banned, const int64_t* biased_starts, const int32_t* biased, const float* bias,
                          const int32_t* history_of, const int64_t* history_starts, const int32_t* histories,
                          const int64_t* num_prompt_tokens, const float* penalties, int64_t num_rows, int64_t num_masks,
                          int64_t num_banned, int64_t num_biased, int64_t num_histories, int64_t num_past,
                          int64_t vocab) {
  const LogitChanges changes{.mask_of = mask_of,
                             .masks = masks,
                             .num_masks = num_masks,
                             .banned = {banned_starts, banned, num_rows},
                             .biased = {biased_starts, biased, num_rows},
                             .bias = bias,
                             .history_of = history_of,
                             .histories = {history_starts, histories, num_histories},
                             .num_prompt_tokens = num_prompt_tokens,
                             .penalties = penalties};
  check_ids("banned", changes.banned, num_banned, vocab);
  check_ids("biased", changes.biased, num_biased, vocab);
  check_ids("histories", changes.histories, num_past, vocab);
  for (int64_t i = 0; i < num_histories; ++i) {
    const int64_t length = history_starts[i + 1] - history_starts[i];
    if (num_prompt_tokens[i] < 0 || num_prompt_tokens[i] > length) {
      refuse(i, "num_prompt_tokens", static_cast<double>(num_prompt_tokens[i]), "0 to the history's length");
    }
  }
  return changes;
}

// Likeliest first, of equals the lower id.
void sort_top(const LogprobArgs& args, int64_t row) {
  struct Top {
    float logit;
    int32_t id;
    float logprob;
  };
  const float* logits = args.logits + args.rows[row] * args.row_stride;
  int32_t* ids = args.out_ids + row * (1 + args.num_top) + 1;
  float* logprobs = args.out + row * (1 + args.num_top) + 1;
  std::vector<Top> top(static_cast<size_t>(args.num_top));
  for (size_t i = 0; i < top.size(); ++i) {
    const float logit = logits[ids[i]];
    top[i] = {logit == logit ? logit : -__builtin_inff(), ids[i], logprobs[i]};
  }
  std::sort(top.begin(), top.end(),
            [](const Top& a, const Top& b) { return a.logit != b.logit ? a.logit > b.logit : a.id < b.id; });
  for (size_t i = 0; i < top.size(); ++i) {
    ids[i] = top[i].id;
    logprobs[i] = top[i].logprob;
  }
}

}  // namespace

void bind_sampling(nb::module_& module) {
  nb::class_<LogitChanges>(module, "LogitChanges");
  add_function(module, "logit_changes", &make_changes);
  nb::class_<SampleArgs>(module, "SampleArgs");
  add_function(
      module, "sample_args",
      +[](const float* logits, int64_t row_stride, int64_t num_rows, int64_t vocab, const double* temperature,
          const int64_t* top_k, const double* top_p, const double* min_p, const double* uniform, nb::handle changes) {
        const auto* given = changes.is_none() ? nullptr : nb::cast<const LogitChanges*>(changes);
        const SampleArgs args{logits, row_stride, num_rows, vocab, temperature, top_k, top_p, min_p, uniform, given};
        check(args);
        return args;
      },
      nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
      nb::arg().none(), nb::keep_alive<0, 10>());
  add_function(
      module, "sample",
      +[](const SampleArgs& args, int64_t* out) {
        const auto sample_row = kernels().sampling.sample_row;
        auto task = [&](int64_t row, int) { out[row] = sample_row(args, row, thread_scratch(args.vocab)); };
        parallel_for(args.num_rows, task);
      },
      Unlocked());
  add_function(
      module, "processed_logits",
      +[](const SampleArgs& args, const int64_t* rows, int64_t count, float* out) {
        check_range("processed_logits: row", rows, count, args.num_rows);
        const auto process_row = kernels().sampling.process_row;
        auto task = [&](int64_t i, int) {
          process_row(args, rows[i], out + i * args.vocab, thread_scratch(args.vocab));
        };
        parallel_for(count, task);
      },
      Unlocked());
  add_function(
      module, "top_logprobs",
      +[](const float* logits, int64_t row_stride, int64_t num_logits, int64_t vocab, const int64_t* rows,
          const int64_t* token_ids, int64_t num_rows, int64_t num_top, bool normalized, int32_t* out_ids, float* out,
          int32_t* ranks) {
        check_range("top_logprobs: row", rows, num_rows, num_logits);
        check_range("top_logprobs: token id", token_ids, num_rows, vocab);
        const LogprobArgs args{logits,  row_stride, vocab,   rows, token_ids, num_rows,
                               num_top, normalized, out_ids, out,  ranks};
        const auto logprob_row = kernels().sampling.logprob_row;
        auto task = [&](int64_t row, int) {
          logprob_row(args, row, thread_scratch(vocab));
          sort_top(args, row);
        };
        parallel_for(num_rows, task);
      },
      Unlocked());
}

}  // namespace quire
