// Paged attention: the plain values shared by the planner (one per process) and the kernels (one per instruction set).
#pragma once

#include <cstdint>

#include "common.h"

namespace quire {

// Keys are visited in tiles that start at absolute positions 0, 64, 128, ...: one online-softmax update per tile.
constexpr int64_t kTileKeys = 64;
// Every 512 positions a fresh softmax state begins, and the sections' states are merged in order. This is done always,
// so that one long context can be spread over threads without changing a bit.
constexpr int64_t kSectionKeys = 512;
// Query rows (tokens times heads of one group) that share one pass over the keys.
constexpr int64_t kItemRows = 48;
// Most rows a micro kernel of any instruction set takes at once.
constexpr int64_t kMaxBlockRows = 16;

struct AttentionArgs {
  const void* query;  // [num_tokens, num_heads, head_dim]
  int64_t query_stride;
  bool int8_cache;      // else the cache holds what the query does
  const void* k_cache;  // [num_blocks, num_kv_heads, head_dim / pack, block_size, pack]; int8: two lanes more, floats
  const void* v_cache;  // [num_blocks, num_kv_heads, block_size, head_dim]
  int64_t k_block_stride;
  int64_t v_block_stride;
  const int32_t* query_start;   // [num_seqs + 1]
  const int32_t* seq_lens;      // [num_seqs]
  const int32_t* block_tables;  // [num_seqs, table_stride]
  int64_t table_stride;
  int64_t table_width;
  int64_t num_tokens;
  int64_t num_seqs;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t num_blocks;
  int64_t block_size;
  int64_t sliding_window;  // positions a token sees, itself included; INT64_MAX sees all
  float scale;
  void* out;  // [num_tokens, num_heads, head_dim], contiguous
  // Floats of one row of a softmax state: the output, padded to whole vectors of any instruction set, and 16 more,
  // which begin with the maximum and the sum.
  int64_t row_stride;
};

// Work of one thread: query tokens [token_begin, token_end) of one sequence, the query heads of one key/value head, the
// keys of sections [section_begin, section_end).
struct AttentionItem {
  int64_t seq;
  int64_t kv_head;
  int64_t token_begin;
  int64_t token_end;
  int64_t section_begin;
  int64_t section_end;
  float* partials;  // null: the item sees all its sections and writes the output; else one state per section goes here
  int64_t cost;     // estimate, for scheduling only
};

// What one thread needs beside its item.
struct AttentionScratch {
  float* total;            // [rows, row_stride]
  float* part;             // [rows, row_stride]
  float* scores;           // [kMaxBlockRows, kTileKeys]
  float* packed_keys;      // [2, lanes of a key, kTileKeys] four-byte lanes
  float* query_scales;     // [rows]
  int16_t* int16_queries;  // [rows, head_dim]
  const void** queries;    // [rows]
  int64_t* positions;      // [rows]
};

struct AttentionTable {
  // Computes an item: its output, or its sections' states where it has `partials`.
  void (*item[kNumDTypes])(const AttentionArgs& args, const AttentionItem& item, const AttentionScratch& scratch);
  void (*int8_item[kNumDTypes])(const AttentionArgs& args, const AttentionItem& item, const AttentionScratch& scratch);
  // Merges the states of the item's sections in order and writes its output.
  void (*finish[kNumDTypes])(const AttentionArgs& args, const AttentionItem& item, const AttentionScratch& scratch);
};

// Checks what is cheap to check and computes attention on the thread pool. Throws std::invalid_argument.
void paged_attention(DType dtype, const AttentionArgs& args);

}  // namespace quire
