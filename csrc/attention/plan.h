// Paged attention: the plain values shared by the planner (one per process) and the kernels (one per instruction set).
#pragma once

#include <cstdint>

#include "base/common.h"

namespace quire {

// Keys are visited in tiles that start at absolute positions 0, 128, 256, ...: one online-softmax update per tile.
constexpr int64_t kTileKeys = 128;
// Every 512 positions a fresh softmax state begins, and the sections' states are merged in order. This is done always,
// so that one long context can be spread over threads without changing a bit.
constexpr int64_t kSectionKeys = 512;
// Query rows (tokens times heads of one group) that share one pass over the keys.
constexpr int64_t kItemRows = 96;
// Most of them that any instruction set takes through a tile together.
constexpr int64_t kPassRows = 64;

// Floats of one row of a softmax state, beside its maximum: the output, padded to whole vectors of any instruction set,
// and one more vector of sums.
QUIRE_INLINE int64_t state_row_stride(int64_t value_dim) { return (value_dim + 15) / 16 * 16 + 16; }

// What is added to the scores of one layer by the distance of key and query.
struct RelativeTerms {
  int64_t reach;      // distances are from -reach to reach
  const float* bias;  // [num_heads, 2 * reach + 16], or null: entry reach + key - query; what follows is never seen
  // Disentangled attention: [num_tokens, num_heads, num_terms] each, or null; multiplied with the scale.
  const float* of_query;
  const float* of_key;
  const int32_t* term;  // [2 * reach + 1]: of the distance at reach + key - query
  int64_t num_terms;

  bool operator==(const RelativeTerms&) const = default;
};

struct AttentionArgs {
  const void* query;  // [num_tokens, num_heads, head_dim]
  int64_t query_stride;
  bool int8_cache;      // else the cache holds what the query does
  const void* k_cache;  // [num_blocks, num_kv_heads, head_dim / pack, block_size, pack]; int8: two lanes more, floats;
                        // null: latents, which are keys, and whose first value_dim elements are the values
  const void* v_cache;  // [num_blocks, num_kv_heads, block_size, head_dim]; latents: [num_blocks, block_size, head_dim]
  int64_t k_block_stride;
  int64_t v_block_stride;
  const int32_t* query_start;  // [num_seqs + 1]
  const int32_t* seq_lens;     // [num_seqs]
  // [num_seqs, table_stride]. Null: no cache, but keys and values of the query tokens themselves, which are whole
  // sequences: block_size is 1, and a sequence's block i is its row i.
  const int32_t* block_tables;
  int64_t table_stride;
  int64_t table_width;
  int64_t num_tokens;
  int64_t num_seqs;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;   // of a query and of a key
  int64_t value_dim;  // of a value and of an output: head_dim, but for latents
  int64_t num_blocks;
  int64_t block_size;
  int64_t sliding_window;  // positions up to its own that a token sees; INT64_MAX sees all
  int64_t look_ahead;      // positions after its own that it sees; 0: causal; INT64_MAX sees all
  int64_t chunk_size;      // a token sees keys from the last multiple of it on; INT64_MAX sees all
  float scale;
  float softcap;        // 0: none
  const float* sinks;   // [num_heads] or null
  const float* slopes;  // [num_heads] or null
  RelativeTerms relative;
  void* out;  // [num_tokens, num_heads, value_dim], contiguous
  int64_t row_stride = state_row_stride(value_dim);

  bool operator==(const AttentionArgs&) const = default;

  // Keys and values are the same rows.
  QUIRE_MEMBER bool has_latents() const { return k_cache == nullptr; }

  // The lanes of a key follow each other, as those of a value do.
  QUIRE_MEMBER bool has_key_rows() const { return has_latents() || block_tables == nullptr; }

  // First key that a token at `position` sees.
  QUIRE_MEMBER int64_t first_key(int64_t position) const {
    const int64_t window = position < sliding_window ? 0 : position - sliding_window + 1;
    const int64_t chunk = position < chunk_size ? 0 : position - position % chunk_size;
    return window > chunk ? window : chunk;
  }

  // The key after the last one that a token at `position` of sequence `seq` sees.
  QUIRE_MEMBER int64_t end_key(int64_t seq, int64_t position) const {
    const int64_t end = seq_lens[seq];
    return look_ahead < end - position ? position + look_ahead + 1 : end;
  }

  QUIRE_MEMBER bool changes_scores() const {
    return softcap > 0 || slopes != nullptr || relative.bias != nullptr || relative.term != nullptr;
  }
};

// Work of one thread: query tokens [token_begin, token_end), the query heads of some key/value heads, the keys of
// sections [section_begin, section_end). Tokens may go on into following sequences that have the same blocks there; all
// of these tokens see all of these keys. Several key/value heads are for a single token: memory is read fastest in long
// pieces, and a block's heads lie side by side.
struct AttentionItem {
  int64_t seq;  // of token_begin
  int64_t kv_head;
  int64_t num_kv_heads;
  int64_t token_begin;
  int64_t token_end;
  int64_t section_begin;
  int64_t section_end;
  // Where the state of the first section goes, in floats from `partials`: the item's rows are those from state_row on
  // of state_rows, and the next section's state follows. -1: the item sees all its sections and writes the output.
  int64_t state;
  int64_t state_rows;
  int64_t state_row;
  int64_t cost;  // estimate, for scheduling only
};

// What one thread needs beside its item.
struct AttentionScratch {
  float* partials;      // softmax states, of all threads
  float* total;         // [rows * (row_stride + 1)]
  float* part;          // [rows * (row_stride + 1)]
  float* scores;        // [kPassRows, kTileKeys]
  float* values;        // [kTileKeys, row_stride] four-byte lanes
  float* packed_keys;   // [lanes of a key, kTileKeys] four-byte lanes; of latents, the queries' lanes
  float* queries;       // [rows, head_dim] of float, bf16 or int16
  float* query_scales;  // [rows], as what follows
  float* references;
  float* decay;
  float* steps;
  int64_t* positions;  // of a row, of the first key that it sees, and of the one after the last
  int64_t* first_keys;
  int64_t* end_keys;
};

struct AttentionTable {
  // Of some items, which one thread takes in order.
  using Kernel = void (*)(const AttentionArgs& args, const AttentionItem* items, int64_t count,
                          const AttentionScratch& scratch);
  // Compute the output, or the sections' states where an item has a `state`.
  Kernel items[kNumDTypes];
  Kernel int8_items[kNumDTypes];
  // Merge the states of each item's sections in order and write its output.
  Kernel finish[kNumDTypes];
};

// Checks what is cheap to check and computes attention on the thread pool. Throws std::invalid_argument.
void paged_attention(DType dtype, const AttentionArgs& args);

// Sections of keys, one head each, that this thread's last call read: of what sequences share, fewer, which no output
// shows.
int64_t attention_sections_read();

}  // namespace quire
