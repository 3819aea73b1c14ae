// Paged attention over one item of a plan (attention_plan.h): Kwon et al. 2023, with the online softmax of Milakov and
// Gimelshein 2018. Every (token, head) row is computed in an order that depends on its position and window alone: tiles
// of 64 keys and sections of 512 at absolute positions, one chain of fused multiply-adds per score and per output. What
// else is in the batch, how the prompt was cut, block size and placement, and the thread count do not change its bits.
// Values of keys that some row of a tile sees must be finite: rows that do not see them multiply them by zero.
#pragma once

#include <cstring>

#include "attention_plan.h"
#include "attention_tile.h"
#include "simd.h"

namespace quire::QUIRE_ISA {

QUIRE_INLINE int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
QUIRE_INLINE int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }

template <typename T>
class AttentionTask {
 public:
  AttentionTask(const AttentionArgs& args, const AttentionItem& item, const AttentionScratch& scratch)
      : a_(args), item_(item), s_(scratch) {
    group_ = a_.num_heads / a_.num_kv_heads;
    rows_ = (item_.token_end - item_.token_begin) * group_;
    const int64_t context = a_.seq_lens[item_.seq] - a_.query_start[item_.seq + 1];  // position of token t: context + t
    const auto* query = static_cast<const T*>(a_.query);
    for (int64_t r = 0; r < rows_; ++r) {
      const int64_t token = item_.token_begin + r / group_;
      s_.queries[r] = query + token * a_.query_stride + (item_.kv_head * group_ + r % group_) * a_.head_dim;
      s_.positions[r] = context + token;
    }
  }

  void run() {
    KeyTile<T> tiles[2];
    const int64_t first = max_of(first_key(0), item_.section_begin * kSectionKeys);
    const int64_t last = min_of(s_.positions[rows_ - 1] + 1, item_.section_end * kSectionKeys);
    const auto locate_tile = [&](int64_t start) {
      locate(start, max_of(first, start), min_of(last, start + kTileKeys), tiles[start / kTileKeys % 2]);
    };
    int64_t start = first / kTileKeys * kTileKeys;
    locate_tile(start);
    for (int64_t section = item_.section_begin; section < item_.section_end; ++section) {
      float* state = section_state(section);
      clear(state);
      const int64_t section_last = min_of(last, (section + 1) * kSectionKeys);
      for (; start < section_last; start += kTileKeys) {
        const bool more = start + kTileKeys < last;
        if (more) locate_tile(start + kTileKeys);
        const KeyTile<T>* tile = tiles + start / kTileKeys % 2;
        run_tile(*tile, more ? tiles + (start / kTileKeys + 1) % 2 : nullptr, state);
      }
      if (state == s_.part) merge(s_.part);
    }
    if (!item_.partials) write_output();
  }

  // Merge the sections' states, first section first, and write the output.
  void finish() {
    clear(s_.total);
    for (int64_t section = item_.section_begin; section < item_.section_end; ++section) {
      merge(item_.partials + (section - item_.section_begin) * rows_ * a_.row_stride);
    }
    write_output();
  }

 private:
  float* row_max(float* state, int64_t r) const { return state + (r + 1) * a_.row_stride - 16; }
  float* row_sum(float* state, int64_t r) const { return state + (r + 1) * a_.row_stride - 15; }

  // First key that row r sees.
  int64_t first_key(int64_t r) const {
    const int64_t position = s_.positions[r];
    return position < a_.sliding_window ? 0 : position - a_.sliding_window + 1;
  }

  void clear(float* state) const {
    std::memset(state, 0, static_cast<size_t>(rows_ * a_.row_stride) * sizeof(float));
    for (int64_t r = 0; r < rows_; ++r) *row_max(state, r) = -kInfinity;
  }

  // Where the state of a section is built up: the first one's, in the total.
  float* section_state(int64_t section) const {
    if (item_.partials) return item_.partials + (section - item_.section_begin) * rows_ * a_.row_stride;
    return section == item_.section_begin ? s_.total : s_.part;
  }

  // Find keys [first, last) of the tile at `start`, packing the keys into the scratch if vectors would straddle blocks.
  void locate(int64_t start, int64_t first, int64_t last, KeyTile<T>& tile) {
    constexpr int64_t kPack = KeyLane<T>::kPack;
    const bool in_place = a_.block_size % W == 0;
    const int32_t* table = a_.block_tables + item_.seq * a_.table_stride;
    const int64_t head_size = a_.block_size * a_.head_dim;
    T* packed = reinterpret_cast<T*>(s_.packed_keys) + start / kTileKeys % 2 * kTileKeys * a_.head_dim;
    tile.start = start;
    tile.lane_stride = kPack * (in_place ? a_.block_size : kTileKeys);
    for (int64_t key = first; key < last;) {
      const int64_t offset = key % a_.block_size;
      const int64_t run = min_of(last - key, a_.block_size - offset);
      const int64_t block = table[key / a_.block_size];
      const T* k = static_cast<const T*>(a_.k_cache) + block * a_.k_block_stride + item_.kv_head * head_size;
      const T* v = static_cast<const T*>(a_.v_cache) + block * a_.v_block_stride + item_.kv_head * head_size;
      for (int64_t i = 0; i < run; ++i) tile.values[key - start + i] = v + (offset + i) * a_.head_dim;
      if (in_place) {
        for (int64_t i = offset / W * W; i < offset + run; i += W) {
          tile.vectors[(key - start - offset + i) / W] = k + i * kPack;
        }
      } else {
        pack_keys(k + offset * kPack, run, packed + (key - start) * kPack);
      }
      key += run;
    }
    for (int64_t i = 0; i < kTileKeys; ++i) {
      if (i < first - start || i >= last - start) tile.values[i] = tile.values[first - start];
    }
    for (int64_t v = 0; v < KeyTile<T>::kVectors; ++v) {
      if (!in_place) {
        tile.vectors[v] = packed + v * W * kPack;
      } else if (v < (first - start) / W || v > (last - start - 1) / W) {
        tile.vectors[v] = tile.vectors[(first - start) / W];
      }
    }
  }

  void pack_keys(const T* from, int64_t run, T* to) const {
    constexpr int64_t kPack = KeyLane<T>::kPack;
    for (int64_t lane = 0; lane < a_.head_dim / kPack; ++lane) {
      std::memcpy(to + lane * kTileKeys * kPack, from + lane * a_.block_size * kPack, static_cast<size_t>(run) * 4);
    }
  }

  // Let all rows see one tile, while the next one (may be null) is fetched. Many rows leave the processor's own
  // prefetchers time enough.
  void run_tile(const KeyTile<T>& tile, const KeyTile<T>* next, float* state) const {
    const int64_t blocks = rows_ <= kMostAttentionRows ? 1 : (rows_ + kAttentionRows - 1) / kAttentionRows;
    if (blocks > 2) next = nullptr;
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t row = rows_ * b / blocks, end = rows_ * (b + 1) / blocks;
      run_block<kMostAttentionRows>(end - row, tile, b == 0 ? next : nullptr, row, state);
    }
  }

  template <int R>
  void run_block(int64_t count, const KeyTile<T>& tile, const KeyTile<T>* next, int64_t row, float* state) const {
    if (count == R) {
      run_rows<R>(tile, next, row, state);
    } else if constexpr (R > 1) {
      run_block<R - 1>(count, tile, next, row, state);
    }
  }

  // Let rows [row, row + R) see one tile. Rows are in order of position.
  template <int R>
  void run_rows(const KeyTile<T>& tile, const KeyTile<T>* next, int64_t row, float* state) const {
    constexpr int kVectors = kAttentionVectors<R>;
    const int64_t first = max_of(first_key(row) - tile.start, 0);
    const int64_t last = min_of(s_.positions[row + R - 1] + 1 - tile.start, kTileKeys);
    if (first >= last) return;
    for (int64_t v = first / W / kVectors * kVectors; v * W < last; v += kVectors) {
      score_keys<kVectors, T, R>(tile, next, v, a_.head_dim, s_.queries + row, a_.scale, s_.scores);
    }
    float *maxima[R], *sums[R], decay[R];
    for (int r = 0; r < R; ++r) {
      float* scores = s_.scores + r * kTileKeys;
      const int64_t begin = first_key(row + r) - tile.start, end = s_.positions[row + r] + 1 - tile.start;
      for (int64_t key = 0; key < min_of(begin, kTileKeys); ++key) scores[key] = -kInfinity;
      for (int64_t key = max_of(end, 0); key < kTileKeys; ++key) scores[key] = -kInfinity;
      maxima[r] = row_max(state, row + r);
      sums[r] = row_sum(state, row + r);
    }
    softmax_rows<R>(s_.scores, maxima, sums, decay);
    float* out = state + row * a_.row_stride;
    int64_t dim = 0;
    for (; dim + kVectors * W <= a_.head_dim; dim += kVectors * W) {
      add_values<kVectors, T, R>(tile, next, dim, first, last, s_.scores, decay, out + dim, a_.row_stride);
    }
    for (; dim + W <= a_.head_dim; dim += W) {
      add_values<1, T, R>(tile, next, dim, first, last, s_.scores, decay, out + dim, a_.row_stride);
    }
    if (dim < a_.head_dim) {
      add_values_tail<T, R>(tile, dim, a_.head_dim - dim, first, last, s_.scores, decay, out + dim, a_.row_stride);
    }
  }

  // Merge the state of the next section into the total.
  void merge(const float* part) {
    for (int64_t r = 0; r < rows_; ++r) {
      const float* from = part + r * a_.row_stride;
      float* to = s_.total + r * a_.row_stride;
      const float part_max = from[a_.row_stride - 16], part_sum = from[a_.row_stride - 15];
      if (part_max == -kInfinity) continue;  // the row sees nothing of this section
      float& total_max = *row_max(s_.total, r);
      const float new_max = total_max > part_max ? total_max : part_max;
      const f32 keep = exp_negative(set1(total_max - new_max)), add = exp_negative(set1(part_max - new_max));
      for (int64_t d = 0; d < a_.head_dim; d += W) {
        store(to + d, fma(load(from + d), add, load(to + d) * keep));
      }
      float& total_sum = *row_sum(s_.total, r);
      total_sum = total_sum * keep[0] + part_sum * add[0];
      total_max = new_max;
    }
  }

  void write_output() {
    for (int64_t r = 0; r < rows_; ++r) {
      const int64_t token = item_.token_begin + r / group_, head = item_.kv_head * group_ + r % group_;
      T* out = static_cast<T*>(a_.out) + (token * a_.num_heads + head) * a_.head_dim;
      const float* from = s_.total + r * a_.row_stride;
      const f32 inverse = set1(1.0f / *row_sum(s_.total, r));
      int64_t d = 0;
      // Adding zero turns -0 into +0: a masked key adds zero to an output, which is the one thing that can change one.
      for (; d + W <= a_.head_dim; d += W) store(out + d, load(from + d) * inverse + set1(0.0f));
      if (d < a_.head_dim) store_n(out + d, load(from + d) * inverse + set1(0.0f), a_.head_dim - d);
    }
  }

  const AttentionArgs& a_;
  const AttentionItem& item_;
  const AttentionScratch& s_;
  int64_t group_;
  int64_t rows_;
};

template <typename T>
static void attention_item(const AttentionArgs& args, const AttentionItem& item, const AttentionScratch& scratch) {
  AttentionTask<T>(args, item, scratch).run();
}

template <typename T>
static void attention_finish(const AttentionArgs& args, const AttentionItem& item, const AttentionScratch& scratch) {
  AttentionTask<T>(args, item, scratch).finish();
}

constexpr AttentionTable kAttention = {
    .item = {attention_item<float>, attention_item<bf16>},
    .finish = {attention_finish<float>, attention_finish<bf16>},
};

}  // namespace quire::QUIRE_ISA
