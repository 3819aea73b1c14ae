// Checks a batch, cuts it into items of about equal work, and runs them on the thread pool. How it cuts may depend on
// the batch and the number of threads, since no cut changes the bits of a row.
#include "attention/plan.h"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/kernel_table.h"
#include "runtime/memory.h"
#include "runtime/thread_pool.h"

namespace quire {
namespace {

// Multiply-adds below which the batch is done before a sleeping worker would have woken.
constexpr int64_t kInlineWork = 1 << 20;
// The same where all workers are awake, as between the kernels of a step.
constexpr int64_t kInlineWorkAwake = 1 << 15;
// More items than threads, so that the last ones to finish do not leave the other threads idle for long.
constexpr int64_t kItemsPerThread = 4;
// Query rows that share one pass over the keys where there are enough of them for all threads, but of latents: each
// item makes values, and keys of a text without a cache, into lanes for itself.
constexpr int64_t kManyItemRows = 384;
// Runs of items, in each of which the first keys of an item are fetched during the one before. Items of many rows fetch
// nothing ahead, and more runs of them leave threads idle for less of the time. Fewer where each would take less than a
// microsecond or two.
constexpr int64_t kTasksPerThread = 6, kTasksOfManyRows = 32, kManyRows = 32, kTaskWork = 1 << 16;
// Keys and values of a tile: with those fetched for the next two they fit into a common second-level cache.
constexpr int64_t kTileBytes = 128 * 1024;

// A cache-line aligned array of floats that only grows.
class FloatBuffer {
 public:
  FloatBuffer() = default;
  FloatBuffer(const FloatBuffer&) = delete;
  FloatBuffer& operator=(const FloatBuffer&) = delete;
  ~FloatBuffer() { std::free(data_); }

  float* reserve(int64_t count) {
    if (count > size_) {
      std::free(std::exchange(data_, nullptr));
      size_ = 0;
      data_ = static_cast<float*>(aligned_memory(count * int64_t{sizeof(float)}));
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

AttentionScratch thread_scratch(DType dtype, const AttentionArgs& args, int64_t rows, float* partials) {
  static thread_local ThreadState state;
  ask_for_memory();
  const int64_t lanes = args.int8_cache ? args.head_dim / 4 + 2 : args.head_dim / (dtype == kBFloat16 ? 2 : 1);
  // Vectors are 4, 8 or 16 lanes wide.
  const int64_t packed = args.has_latents()                                  ? lanes * ((rows + 15) / 16 * 16)
                         : args.block_size % 16 == 0 && !args.has_key_rows() ? 0
                                                                             : lanes * kTileKeys;
  state.positions.resize(3 * static_cast<size_t>(rows));
  float* next = state.floats.reserve(rows * (2 * args.row_stride + args.head_dim + 6) +
                                     kTileKeys * (kPassRows + args.row_stride) + packed);
  const auto take = [&next](int64_t count) { return std::exchange(next, next + count); };
  return {.partials = partials,
          .total = take(rows * (args.row_stride + 1)),
          .part = take(rows * (args.row_stride + 1)),
          .scores = take(kPassRows * kTileKeys),
          .values = take(kTileKeys * args.row_stride),
          .packed_keys = take(packed),
          .queries = take(rows * args.head_dim),
          .query_scales = take(rows),
          .references = take(rows),
          .decay = take(rows),
          .steps = take(rows),
          .positions = state.positions.data(),
          .first_keys = state.positions.data() + rows,
          .end_keys = state.positions.data() + 2 * rows};
}

// What a plan is made of: equal ones make equal plans.
struct PlanKey {
  AttentionArgs args;  // but for where keys, values and queries lie
  DType dtype;
  int64_t threads;  // 0: of no call
  bool are_awake;
  std::vector<int32_t> numbers;  // query_start, seq_lens and the blocks of each sequence

  bool operator==(const PlanKey&) const = default;
};

// The work of a call, in arrays that the calling thread keeps from call to call.
struct Plan {
  PlanKey key = {};
  std::vector<AttentionItem> items;
  std::vector<AttentionItem> split;  // the items whose sections were spread over several others
  std::vector<int64_t> tasks;        // first item of each task, and the number of items
  FloatBuffer partials;
  int64_t partial_floats = 0;
  int64_t work = 0;           // sum of the items' costs
  int64_t task_cost = 0;      // from which on a task is large enough
  int64_t rows = 0;           // the most of an item
  int64_t sections_read = 0;  // once for each key/value head
};

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
  if ((args.relative.bias != nullptr || args.relative.term != nullptr) && seq_len > args.relative.reach + 1) {
    refuse(s, std::to_string(seq_len) + " tokens, but relative positions reach " + std::to_string(args.relative.reach));
  }
  if (args.block_tables == nullptr) {
    if (query_len != seq_len) refuse(s, "without a cache a sequence is whole, but not all of its tokens are queries");
    return;
  }
  const int64_t blocks = (seq_len + args.block_size - 1) / args.block_size;
  if (blocks > args.table_width) {
    refuse(s, std::to_string(seq_len) + " tokens need " + std::to_string(blocks) + " blocks, the block table has " +
                  std::to_string(args.table_width));
  }
  const int32_t* table = args.block_tables + s * args.table_stride;
  for (int64_t b = args.first_key(seq_len - query_len) / args.block_size; b < blocks; ++b) {
    if (table[b] < 0 || table[b] >= args.num_blocks) {
      refuse(s, "block id " + std::to_string(table[b]) + " of logical block " + std::to_string(b) + " is not in [0, " +
                    std::to_string(args.num_blocks) + ")");
    }
  }
}

void check_terms(const RelativeTerms& relative) {
  const int32_t* end = relative.term + 2 * relative.reach + 1;
  const int32_t* wrong =
      std::find_if(relative.term, end, [&](int32_t term) { return term < 0 || term >= relative.num_terms; });
  if (wrong != end) {
    throw std::invalid_argument("encoder_attention: term " + std::to_string(*wrong) + " is not in [0, " +
                                std::to_string(relative.num_terms) + ")");
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

// Of arguments that may be wrong.
void describe(DType dtype, const AttentionArgs& args, PlanKey& key) {
  key.args = args;
  key.args.query = key.args.k_cache = key.args.v_cache = key.args.out = nullptr;
  key.args.query_start = key.args.seq_lens = nullptr;
  key.dtype = dtype;
  key.threads = num_threads();
  key.are_awake = workers_are_awake();
  key.numbers.assign(args.query_start, args.query_start + args.num_seqs + 1);
  key.numbers.insert(key.numbers.end(), args.seq_lens, args.seq_lens + args.num_seqs);
  for (int64_t s = 0; args.block_tables != nullptr && s < args.num_seqs; ++s) {
    const int64_t blocks = (args.seq_lens[s] + args.block_size - 1) / args.block_size;
    const int32_t* table = args.block_tables + s * args.table_stride;
    key.numbers.insert(key.numbers.end(), table, table + std::clamp<int64_t>(blocks, 0, args.table_width));
  }
}

int64_t query_len(const AttentionArgs& args, int64_t s) { return args.query_start[s + 1] - args.query_start[s]; }
int64_t context_len(const AttentionArgs& args, int64_t s) { return args.seq_lens[s] - query_len(args, s); }

int64_t state_floats(const AttentionArgs& args, int64_t rows) { return rows * (args.row_stride + 1); }

struct Sections {
  int64_t begin, end;
  int64_t count() const { return end - begin; }
};

thread_local int64_t sections_read = 0;

// Those that all query tokens of sequence s see all keys of.
Sections whole_sections(const AttentionArgs& args, int64_t s) {
  const int64_t first_key = args.first_key(args.seq_lens[s] - 1);
  return {(first_key + kSectionKeys - 1) / kSectionKeys, (context_len(args, s) + 1) / kSectionKeys};
}

// The part of `sections`, of sequence s, that `other` has in the same blocks.
Sections shared_sections(const AttentionArgs& args, int64_t s, int64_t other, Sections sections) {
  const Sections whole = whole_sections(args, other);
  const int64_t begin = std::max(sections.begin, whole.begin), end = std::min(sections.end, whole.end);
  const int32_t *table = args.block_tables + s * args.table_stride,
                *other_table = args.block_tables + other * args.table_stride;
  int64_t block = begin * kSectionKeys / args.block_size;
  while (block * args.block_size < end * kSectionKeys && table[block] == other_table[block]) ++block;
  return {begin, std::min(end, block * args.block_size / kSectionKeys)};
}

// The item's share of sections [begin, end).
AttentionItem part_of(const AttentionArgs& args, const AttentionItem& item, int64_t begin, int64_t end) {
  AttentionItem part = item;
  part.section_begin = begin;
  part.section_end = end;
  part.state += (begin - item.section_begin) * state_floats(args, item.state_rows);
  part.cost = item.cost * (end - begin) / (item.section_end - item.section_begin);
  return part;
}

// All sections of the keys that tokens [begin, end) of sequence s see, for `heads` key/value heads.
AttentionItem whole_item(const AttentionArgs& args, int64_t s, int64_t kv_head, int64_t heads, int64_t begin,
                         int64_t end) {
  const int64_t position = context_len(args, s) - args.query_start[s];  // of token t: this and t
  const int64_t first_key = args.first_key(position + begin), last_key = args.end_key(s, position + end - 1) - 1;
  const int64_t rows = (end - begin) * (args.num_heads / args.num_kv_heads) * heads;
  const int64_t section_begin = first_key / kSectionKeys, section_end = last_key / kSectionKeys + 1;
  return {s, kv_head, heads, begin, end, section_begin, section_end, -1, rows, 0, rows * (last_key + 1 - first_key)};
}

// How many key/value heads an item of a single token may have, as long as there are enough items for all threads.
int64_t heads_per_item(DType dtype, const AttentionArgs& args) {
  const int64_t element = args.int8_cache ? 1 : dtype == kBFloat16 ? 2 : 4;
  const int64_t most =
      std::min(kTileBytes / (2 * kTileKeys * args.head_dim * element), kItemRows * args.num_kv_heads / args.num_heads);
  int64_t sections = 0;
  for (int64_t s = 0; s < args.num_seqs; ++s) sections += (args.seq_lens[s] + kSectionKeys - 1) / kSectionKeys;
  const int64_t wanted = kItemsPerThread * num_threads();
  for (int64_t heads = args.num_kv_heads; heads > 1; --heads) {
    if (args.num_kv_heads % heads == 0 && heads <= most && sections * (args.num_kv_heads / heads) >= wanted) {
      return heads;
    }
  }
  return 1;
}

void add_item(const AttentionItem& item, Plan& plan) {
  if (item.section_begin == item.section_end) return;
  plan.items.push_back(item);
  plan.work += item.cost;
}

// For sequences [begin, end), the `shared` sections in items of their own, for all of their tokens together.
void add_sharing_items(const AttentionArgs& args, int64_t begin, int64_t end, Sections shared, int64_t tokens_per_item,
                       int64_t kv_head, Plan& plan) {
  const int64_t group = args.num_heads / args.num_kv_heads;
  const int64_t first_token = args.query_start[begin], last_token = args.query_start[end];
  const int64_t rows = (last_token - first_token) * group, states = plan.partial_floats;
  for (int64_t s = begin; s < end; ++s) {
    AttentionItem item = whole_item(args, s, kv_head, 1, args.query_start[s], args.query_start[s + 1]);
    item.state = states + item.section_begin * state_floats(args, rows);
    item.state_rows = rows;
    item.state_row = (item.token_begin - first_token) * group;
    plan.split.push_back(item);
    plan.partial_floats = std::max(plan.partial_floats, states + item.section_end * state_floats(args, rows));
    add_item(part_of(args, item, item.section_begin, shared.begin), plan);
    add_item(part_of(args, item, shared.end, item.section_end), plan);
  }
  for (int64_t t = first_token, s = begin; t < last_token; t += tokens_per_item) {
    while (args.query_start[s + 1] <= t) ++s;
    const int64_t token_end = std::min(last_token, t + tokens_per_item);
    const int64_t cost = (token_end - t) * group * shared.count() * kSectionKeys;
    add_item({s, kv_head, 1, t, token_end, shared.begin, shared.end, states + shared.begin * state_floats(args, rows),
              rows, (t - first_token) * group, cost},
             plan);
  }
}

// One item per query tile and key/value head (or several heads), all sections in it, but for sections that neighbours
// share.
void make_items(const AttentionArgs& args, int64_t tokens_per_item, int64_t heads_of_token, Plan& plan) {
  int64_t next = 0;
  for (int64_t s = 0; s < args.num_seqs; s = next) {
    const auto is_short = [&](int64_t i) { return query_len(args, i) > 0 && query_len(args, i) <= tokens_per_item; };
    next = s + 1;
    Sections shared = whole_sections(args, s);
    for (; args.block_tables != nullptr && is_short(s) && next < args.num_seqs && is_short(next); ++next) {
      const Sections with_next = shared_sections(args, s, next, shared);
      // Sections that are not read, thanks to sharing: would there be fewer of them?
      if (with_next.count() <= 0 || (next - s) * with_next.count() < (next - s - 1) * shared.count()) break;
      shared = with_next;
    }
    const int64_t heads = next - s == 1 && query_len(args, s) == 1 ? heads_of_token : 1;
    for (int64_t head = 0; head < args.num_kv_heads; head += heads) {
      if (next - s > 1) {
        add_sharing_items(args, s, next, shared, tokens_per_item, head, plan);
        continue;
      }
      for (int64_t t = args.query_start[s]; t < args.query_start[s + 1]; t += tokens_per_item) {
        const int64_t token_end = std::min<int64_t>(args.query_start[s + 1], t + tokens_per_item);
        add_item(whole_item(args, s, head, heads, t, token_end), plan);
      }
    }
  }
}

// Spread the sections of items that are a large part of the whole over several items.
void split_items(const AttentionArgs& args, int64_t limit, Plan& plan) {
  for (size_t i = 0, count = plan.items.size(); i < count; ++i) {
    AttentionItem item = plan.items[i];
    const int64_t sections = item.section_end - item.section_begin;
    const int64_t pieces = std::min(sections, (item.cost + limit - 1) / limit);
    if (pieces <= 1) continue;
    if (item.state < 0) {
      item.state = plan.partial_floats;
      plan.partial_floats += sections * state_floats(args, item.state_rows);
      plan.split.push_back(item);
    }
    const auto piece = [&](int64_t p) {
      return part_of(args, item, item.section_begin + sections * p / pieces,
                     item.section_begin + sections * (p + 1) / pieces);
    };
    plan.items[i] = piece(0);
    for (int64_t p = 1; p < pieces; ++p) plan.items.push_back(piece(p));
  }
}

void make_plan(DType dtype, const AttentionArgs& args, const PlanKey& key, Plan& plan) {
  check(args);
  plan.items.clear();
  plan.split.clear();
  plan.partial_floats = plan.work = plan.sections_read = 0;
  const int64_t group = args.num_heads / args.num_kv_heads, threads = key.threads;
  const bool is_of_many = args.num_tokens * args.num_heads >= kItemsPerThread * threads * kManyItemRows;
  const int64_t item_rows = !args.has_latents() && is_of_many ? kManyItemRows : kItemRows;
  const int64_t tokens_per_item = std::max<int64_t>(1, item_rows / group);
  plan.rows = std::max(tokens_per_item * group, item_rows);
  make_items(args, tokens_per_item, heads_per_item(dtype, args), plan);
  for (const AttentionItem& item : plan.items) {
    plan.sections_read += (item.section_end - item.section_begin) * item.num_kv_heads;
  }
  plan.task_cost = INT64_MAX;
  const int64_t products = 2 * plan.work * args.head_dim;
  if (threads == 1 || products < (key.are_awake ? kInlineWorkAwake : kInlineWork)) return;
  split_items(args, std::max<int64_t>(1, plan.work / (kItemsPerThread * threads)), plan);
  std::stable_sort(plan.items.begin(), plan.items.end(),
                   [](const AttentionItem& a, const AttentionItem& b) { return a.cost > b.cost; });
  const bool has_many_rows = args.num_tokens * args.num_heads >= kManyRows * int64_t(plan.items.size());
  const int64_t most = has_many_rows ? kTasksOfManyRows : kTasksPerThread;
  plan.task_cost = plan.work / threads / std::clamp<int64_t>(products / threads / kTaskWork, 1, most);
}

}  // namespace

int64_t attention_sections_read() { return sections_read; }

void paged_attention(DType dtype, const AttentionArgs& args) {
  static thread_local Plan plan;
  static thread_local PlanKey key;
  if (args.relative.term != nullptr) check_terms(args.relative);
  ask_for_memory();
  describe(dtype, args, key);
  if (!(key == plan.key)) {  // else it was made for another layer of the step
    plan.key.threads = 0;
    make_plan(dtype, args, key, plan);
    std::swap(key, plan.key);
  }
  sections_read = plan.sections_read;
  float* partials = plan.partials.reserve(plan.partial_floats);
  const AttentionTable& table = kernels().attention;
  const auto run = [&](const std::vector<AttentionItem>& items, AttentionTable::Kernel kernel) {
    plan.tasks.clear();
    for (int64_t i = 0, count = int64_t(items.size()), cost = plan.task_cost; i < count; ++i) {
      if (cost >= plan.task_cost) {
        plan.tasks.push_back(i);
        cost = 0;
      }
      cost += items[size_t(i)].cost;
    }
    plan.tasks.push_back(int64_t(items.size()));
    const int64_t *tasks = plan.tasks.data(), rows = plan.rows;  // on another thread, `plan` is another
    auto task = [&](int64_t i, int) {
      kernel(args, items.data() + tasks[i], tasks[i + 1] - tasks[i], thread_scratch(dtype, args, rows, partials));
    };
    parallel_for(int64_t(plan.tasks.size()) - 1, task);
  };
  run(plan.items, args.int8_cache ? table.int8_items[dtype] : table.items[dtype]);
  run(plan.split, table.finish[dtype]);
}

}  // namespace quire
