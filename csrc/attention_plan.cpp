// Checks a batch, cuts it into items of about equal work, and runs them on the thread pool. How it cuts may depend on
// the batch and the number of threads, since no cut changes the bits of a row.
#include "attention_plan.h"

#include <algorithm>
#include <cstdlib>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kernel_table.h"
#include "thread_pool.h"

namespace quire {
namespace {

// Multiply-adds below which the batch is done before a sleeping worker would have woken.
constexpr int64_t kInlineWork = 1 << 20;
// More items than threads, so that the last ones to finish do not leave the other threads idle for long.
constexpr int64_t kItemsPerThread = 4;
// Runs of items, in each of which the first keys of an item are fetched during the one before.
constexpr int64_t kTasksPerThread = 16;

// A cache-line aligned array of floats that only grows.
class FloatBuffer {
 public:
  FloatBuffer() = default;
  FloatBuffer(const FloatBuffer&) = delete;
  FloatBuffer& operator=(const FloatBuffer&) = delete;
  ~FloatBuffer() { std::free(data_); }

  float* reserve(int64_t count) {
    if (count > size_) {
      std::free(data_);
      size_ = 0;
      data_ = static_cast<float*>(std::aligned_alloc(64, static_cast<size_t>(count + 15) / 16 * 64));
      if (data_ == nullptr) throw std::bad_alloc();
      size_ = count;
    }
    return data_;
  }

 private:
  float* data_ = nullptr;
  int64_t size_ = 0;
};

// What a thread keeps from call to call.
struct ThreadState {
  FloatBuffer floats;
  std::vector<int64_t> positions;
};

AttentionScratch thread_scratch(DType dtype, const AttentionArgs& args, int64_t rows) {
  static thread_local ThreadState state;
  const int64_t lanes = args.int8_cache ? args.head_dim / 4 + 2 : args.head_dim / (dtype == kBFloat16 ? 2 : 1);
  const int64_t packed = args.block_size % 16 == 0 ? 0 : lanes * kTileKeys;  // vectors are 4, 8 or 16 lanes wide
  state.positions.resize(static_cast<size_t>(rows));
  float* next = state.floats.reserve(rows * (2 * args.row_stride + args.head_dim + 6) +
                                     kTileKeys * (kPassRows + args.row_stride) + packed);
  const auto take = [&next](int64_t count) { return std::exchange(next, next + count); };
  return {.total = take(rows * (args.row_stride + 1)),
          .part = take(rows * (args.row_stride + 1)),
          .scores = take(kPassRows * kTileKeys),
          .values = take(kTileKeys * args.row_stride),
          .packed_keys = take(packed),
          .queries = take(rows * args.head_dim),
          .query_scales = take(rows),
          .references = take(rows),
          .decay = take(rows),
          .steps = take(rows),
          .positions = state.positions.data()};
}

// The work of one call, in arrays that the calling thread keeps from call to call.
struct Plan {
  std::vector<AttentionItem> items;
  std::vector<AttentionItem> split;  // the items whose sections were spread over several others
  FloatBuffer partials;
  int64_t work = 0;  // sum of the items' costs
};

int64_t first_visible(const AttentionArgs& args, int64_t position) {
  return position < args.sliding_window ? 0 : position - args.sliding_window + 1;
}

[[noreturn]] void refuse(int64_t seq, const std::string& what) {
  throw std::invalid_argument("paged_attention, sequence " + std::to_string(seq) + ": " + what);
}

void check_sequence(const AttentionArgs& args, int64_t s) {
  const int64_t query_len = int64_t{args.query_start[s + 1]} - args.query_start[s], seq_len = args.seq_lens[s];
  if (query_len < 0) refuse(s, "query_start decreases");
  if (query_len > seq_len) {
    refuse(s, std::to_string(query_len) + " query tokens, but seq_lens says " + std::to_string(seq_len));
  }
  if (query_len == 0) return;
  const int64_t blocks = (seq_len + args.block_size - 1) / args.block_size;
  if (blocks > args.table_width) {
    refuse(s, std::to_string(seq_len) + " tokens need " + std::to_string(blocks) + " blocks, the block table has " +
                  std::to_string(args.table_width));
  }
  const int32_t* table = args.block_tables + s * args.table_stride;
  for (int64_t b = first_visible(args, seq_len - query_len) / args.block_size; b < blocks; ++b) {
    if (table[b] < 0 || table[b] >= args.num_blocks) {
      refuse(s, "block id " + std::to_string(table[b]) + " of logical block " + std::to_string(b) + " is not in [0, " +
                    std::to_string(args.num_blocks) + ")");
    }
  }
}

void check(const AttentionArgs& args) {
  for (int64_t s = 0; s < args.num_seqs; ++s) check_sequence(args, s);
  if (args.query_start[0] != 0 || args.query_start[args.num_seqs] != args.num_tokens) {
    throw std::invalid_argument("paged_attention: query_start must run from 0 to the number of query tokens, " +
                                std::to_string(args.num_tokens) + "; it runs from " +
                                std::to_string(args.query_start[0]) + " to " +
                                std::to_string(args.query_start[args.num_seqs]));
  }
}

// One item per query tile and key/value head, all sections in it.
void make_items(const AttentionArgs& args, int64_t tokens_per_item, Plan& plan) {
  const int64_t group = args.num_heads / args.num_kv_heads;
  for (int64_t s = 0; s < args.num_seqs; ++s) {
    const int64_t begin = args.query_start[s], end = args.query_start[s + 1];
    const int64_t context = args.seq_lens[s] - end;  // token t is at position context + t
    for (int64_t t = begin; t < end; t += tokens_per_item) {
      const int64_t token_end = std::min(end, t + tokens_per_item);
      const int64_t first_key = first_visible(args, context + t), last_key = context + token_end - 1;
      const int64_t cost = (token_end - t) * group * (last_key + 1 - first_key);
      for (int64_t head = 0; head < args.num_kv_heads; ++head) {
        plan.items.push_back(
            {s, head, t, token_end, first_key / kSectionKeys, last_key / kSectionKeys + 1, nullptr, cost});
        plan.work += cost;
      }
    }
  }
}

// Spread the sections of items that are a large part of the whole over several items.
void split_items(const AttentionArgs& args, int64_t limit, Plan& plan) {
  const int64_t group = args.num_heads / args.num_kv_heads;
  const auto state_floats = [&](const AttentionItem& item) {
    return (item.token_end - item.token_begin) * group * (args.row_stride + 1);
  };
  const auto is_large = [&](const AttentionItem& item) {
    return item.cost > limit && item.section_end - item.section_begin > 1;
  };
  int64_t floats = 0;
  for (const AttentionItem& item : plan.items) {
    if (is_large(item)) floats += (item.section_end - item.section_begin) * state_floats(item);
  }
  if (floats == 0) return;
  float* partials = plan.partials.reserve(floats);
  for (size_t i = 0, count = plan.items.size(); i < count; ++i) {
    AttentionItem whole = plan.items[i];
    if (!is_large(whole)) continue;
    whole.partials = partials;
    plan.split.push_back(whole);
    const int64_t sections = whole.section_end - whole.section_begin;
    const int64_t pieces = std::min(sections, (whole.cost + limit - 1) / limit);
    for (int64_t p = 0; p < pieces; ++p) {
      AttentionItem piece = whole;
      piece.section_begin = whole.section_begin + sections * p / pieces;
      piece.section_end = whole.section_begin + sections * (p + 1) / pieces;
      piece.partials = partials + (piece.section_begin - whole.section_begin) * state_floats(whole);
      piece.cost = whole.cost / pieces;
      if (p == 0) {
        plan.items[i] = piece;
      } else {
        plan.items.push_back(piece);
      }
    }
    partials += sections * state_floats(whole);
  }
}

}  // namespace

void paged_attention(DType dtype, const AttentionArgs& args) {
  static thread_local Plan plan;
  check(args);
  plan.items.clear();
  plan.split.clear();
  plan.work = 0;
  const int64_t group = args.num_heads / args.num_kv_heads;
  const int64_t tokens_per_item = std::max<int64_t>(1, kItemRows / group);
  make_items(args, tokens_per_item, plan);

  const int64_t threads = num_threads(), rows = tokens_per_item * group;
  const AttentionTable& table = kernels().attention;
  const bool is_small = threads == 1 || 2 * plan.work * args.head_dim < kInlineWork;
  if (!is_small) {
    split_items(args, std::max<int64_t>(1, plan.work / (kItemsPerThread * threads)), plan);
    std::stable_sort(plan.items.begin(), plan.items.end(),
                     [](const AttentionItem& a, const AttentionItem& b) { return a.cost > b.cost; });
  }
  const auto run = [&](const std::vector<AttentionItem>& items, AttentionTable::Kernel kernel) {
    const int64_t count = static_cast<int64_t>(items.size());
    const int64_t tasks = is_small ? std::min<int64_t>(count, 1) : std::min(count, kTasksPerThread * threads);
    auto task = [&](int64_t i, int) {
      const int64_t begin = count * i / tasks, end = count * (i + 1) / tasks;
      kernel(args, items.data() + begin, end - begin, thread_scratch(dtype, args, rows));
    };
    parallel_for(tasks, task);
  };
  run(plan.items, args.int8_cache ? table.int8_items[dtype] : table.items[dtype]);
  run(plan.split, table.finish[dtype]);
}

}  // namespace quire
