#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "binding.h"
#include "runtime/memory.h"
#include "runtime/thread_pool.h"

namespace quire {
namespace {

// What a thread keeps from call to call.
struct ThreadState {
  std::vector<float> chunk_max, logits, row;
  std::vector<double> histogram, weights;
  std::vector<int32_t> ids, members, counts;
};

SampleScratch thread_scratch(int64_t vocab) {
  static thread_local ThreadState state;
  ask_for_memory();
  if (state.weights.size() < static_cast<size_t>(vocab)) {
    const size_t size = std::max(static_cast<size_t>(vocab), static_cast<size_t>(kMaxChunks));
    state.chunk_max.resize(kMaxChunks);
    state.histogram.resize(kHistograms * kMaxRadixBins);
    for (auto* floats : {&state.logits, &state.row}) floats->resize(size);
    for (auto* integers : {&state.ids, &state.members, &state.counts}) integers->resize(size);
    state.weights.resize(size);  // last: it says that all have their size
  }
  return {state.chunk_max.data(), state.histogram.data(), state.weights.data(), state.logits.data(),
          state.ids.data(),       state.members.data(),   state.row.data(),     state.counts.data()};
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

// The changes as Python passes them: addresses, in the order of LogitChanges, and how long the lists are.
struct Changes {
  Changes(const std::vector<Address>& at, int64_t num_rows, int64_t num_masks, int64_t num_banned, int64_t num_biased,
          int64_t num_histories, int64_t num_past, int64_t vocab)
      : values{.mask_of = pointer<int32_t>(at[0]),
               .masks = pointer<uint32_t>(at[1]),
               .num_masks = num_masks,
               .banned = {pointer<int64_t>(at[2]), pointer<int32_t>(at[3]), num_rows},
               .biased = {pointer<int64_t>(at[4]), pointer<int32_t>(at[5]), num_rows},
               .bias = pointer<float>(at[6]),
               .history_of = pointer<int32_t>(at[7]),
               .histories = {pointer<int64_t>(at[8]), pointer<int32_t>(at[9]), num_histories},
               .num_prompt_tokens = pointer<int64_t>(at[10]),
               .penalties = pointer<float>(at[11])} {
    check_ids("banned", values.banned, num_banned, vocab);
    check_ids("biased", values.biased, num_biased, vocab);
    check_ids("histories", values.histories, num_past, vocab);
    for (int64_t i = 0; i < num_histories; ++i) {
      const int64_t length = values.histories.starts[i + 1] - values.histories.starts[i];
      if (values.num_prompt_tokens[i] < 0 || values.num_prompt_tokens[i] > length) {
        refuse(i, "num_prompt_tokens", static_cast<double>(values.num_prompt_tokens[i]), "0 to the history's length");
      }
    }
  }
  LogitChanges values;
};

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
  nb::class_<Changes>(module, "LogitChanges")
      .def(nb::init<const std::vector<Address>&, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>());
  nb::class_<SampleArgs>(module, "SampleArgs")
      .def(
          "__init__",
          [](SampleArgs* self, Address logits, int64_t row_stride, int64_t num_rows, int64_t vocab, Address temperature,
             Address top_k, Address top_p, Address min_p, Address uniform, const Changes* changes) {
            new (self) SampleArgs{pointer<float>(logits),
                                  row_stride,
                                  num_rows,
                                  vocab,
                                  pointer<double>(temperature),
                                  pointer<int64_t>(top_k),
                                  pointer<double>(top_p),
                                  pointer<double>(min_p),
                                  pointer<double>(uniform),
                                  changes ? &changes->values : nullptr};
            check(*self);
          },
          nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
          nb::arg().none(), nb::keep_alive<1, 11>());
  module.def(
      "sample",
      [](const SampleArgs& args, Address out) {
        const auto sample_row = kernels().sampling.sample_row;
        auto task = [&](int64_t row, int) {
          pointer<int64_t>(out)[row] = sample_row(args, row, thread_scratch(args.vocab));
        };
        parallel_for(args.num_rows, task);
      },
      Unlocked());
  module.def(
      "processed_logits",
      [](const SampleArgs& args, Address rows, int64_t count, Address out) {
        check_range("processed_logits: row", pointer<int64_t>(rows), count, 1, args.num_rows);
        const auto process_row = kernels().sampling.process_row;
        auto task = [&](int64_t i, int) {
          process_row(args, pointer<int64_t>(rows)[i], pointer<float>(out) + i * args.vocab,
                      thread_scratch(args.vocab));
        };
        parallel_for(count, task);
      },
      Unlocked());
  module.def(
      "top_logprobs",
      [](Address logits, int64_t row_stride, int64_t num_logits, int64_t vocab, Address rows, Address token_ids,
         int64_t num_rows, int64_t num_top, bool normalized, Address out_ids, Address out, Address ranks) {
        const LogprobArgs args{pointer<float>(logits),
                               row_stride,
                               vocab,
                               pointer<int64_t>(rows),
                               pointer<int64_t>(token_ids),
                               num_rows,
                               num_top,
                               normalized,
                               pointer<int32_t>(out_ids),
                               pointer<float>(out),
                               pointer<int32_t>(ranks)};
        check_range("top_logprobs: row", args.rows, num_rows, 1, num_logits);
        check_range("top_logprobs: token id", args.token_ids, num_rows, 1, vocab);
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
