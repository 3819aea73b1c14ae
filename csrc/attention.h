// Paged attention over one item of a plan (attention_plan.h): Kwon et al. 2023, with the online softmax of Milakov and
// Gimelshein 2018. Every (token, head) row is computed in an order that depends on its position and window alone: tiles
// of 64 keys and sections of 512 at absolute positions, one chain of fused multiply-adds per score and per output. What
// else is in the batch, how the prompt was cut, block size and placement, and the thread count do not change its bits.
// Over an int8 cache the sums of a tile are exact integers: queries and probabilities become int16, each row by itself.
// Values of keys that some row of a tile sees must be finite: rows that do not see them multiply them by zero.
#pragma once

#include <cstring>

#include "attention_plan.h"
#include "attention_tile.h"
#include "rows.h"
#include "simd.h"

namespace quire::QUIRE_ISA {

QUIRE_INLINE int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
QUIRE_INLINE int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }

// T: what queries and outputs are made of; C: the cache.
template <typename T, typename C>
class AttentionTask {
  using Lane = KeyLane<C>;
  static constexpr bool kInt8 = sizeof(C) == 1;

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
      s_.query_scales[r] = a_.scale;
    }
  }

  void run() {
    if constexpr (kInt8) {
      for (int64_t r = 0; r < rows_; ++r) quantize_query(r);
    }
    KeyTile<C> tiles[2];
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
        const KeyTile<C>* tile = tiles + start / kTileKeys % 2;
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

  int64_t key_lanes() const { return a_.head_dim / Lane::kPack + Lane::kScaleLanes; }

  // Replace row r's query by int16 multiples of a step that goes into its scale. They are so many that no sum
  // overflows.
  void quantize_query(int64_t r) const {
    const auto* query = static_cast<const T*>(s_.queries[r]);
    const float levels = float(min_of(32767, (int64_t{1} << 24) / a_.head_dim));
    f32 largest = set1(0.0f);
    for_parts(a_.head_dim, [&](int64_t i, int64_t n) { largest = max(largest, abs(load_some(query + i, n))); });
    const float most = reduce_max(largest);
    const f32 inverse = set1(most > kTiny ? levels / most : 0.0f), shifter = set1(12582912.0f);
    int16_t* to = s_.int16_queries + r * a_.head_dim;
    for_parts(a_.head_dim, [&](int64_t i, int64_t n) {
      const i32 v = __builtin_convertvector(load_some(query + i, n) * inverse + shifter - shifter, i32);
      for (int64_t j = 0; j < n; ++j) to[i + j / 4 * 4 + j % 4 / 2 + j % 2 * 2] = int16_t(v[j]);
    });
    s_.queries[r] = to;
    s_.query_scales[r] *= most / levels;
  }

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
  void locate(int64_t start, int64_t first, int64_t last, KeyTile<C>& tile) {
    constexpr int64_t kPack = Lane::kPack;
    const bool in_place = a_.block_size % W == 0;
    const int32_t* table = a_.block_tables + item_.seq * a_.table_stride;
    const int64_t head_size = a_.block_size * a_.head_dim, key_size = a_.block_size * kPack * key_lanes();
    C* packed = reinterpret_cast<C*>(s_.packed_keys) + start / kTileKeys % 2 * kTileKeys * kPack * key_lanes();
    tile.start = start;
    tile.lane_stride = kPack * (in_place ? a_.block_size : kTileKeys);
    for (int64_t key = first; key < last;) {
      const int64_t offset = key % a_.block_size;
      const int64_t run = min_of(last - key, a_.block_size - offset);
      const int64_t block = table[key / a_.block_size];
      const C* k = static_cast<const C*>(a_.k_cache) + block * a_.k_block_stride + item_.kv_head * key_size;
      const C* v = static_cast<const C*>(a_.v_cache) + block * a_.v_block_stride + item_.kv_head * head_size;
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
    for (int64_t i = 0; i < first - start; ++i) tile.values[i] = tile.values[first - start];
    for (int64_t i = last - start; i < kTileKeys; ++i) tile.values[i] = tile.values[first - start];
    for (int64_t v = 0; v < KeyTile<C>::kVectors; ++v) {
      if (!in_place) {
        tile.vectors[v] = packed + v * W * kPack;
      } else if (v < (first - start) / W || v > (last - start - 1) / W) {
        tile.vectors[v] = tile.vectors[(first - start) / W];
      }
    }
  }

  void pack_keys(const C* from, int64_t run, C* to) const {
    constexpr int64_t kPack = Lane::kPack;
    for (int64_t lane = 0; lane < key_lanes(); ++lane) {
      std::memcpy(to + lane * kTileKeys * kPack, from + lane * a_.block_size * kPack, static_cast<size_t>(run) * 4);
    }
  }

  // Let all rows see one tile, while the next one (may be null) is fetched. Many rows leave the processor's own
  // prefetchers time enough.
  void run_tile(const KeyTile<C>& tile, const KeyTile<C>* next, float* state) const {
    const int64_t blocks = rows_ <= kMostAttentionRows ? 1 : (rows_ + kAttentionRows - 1) / kAttentionRows;
    if (blocks > 2) next = nullptr;
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t row = rows_ * b / blocks, end = rows_ * (b + 1) / blocks;
      run_block<kMostAttentionRows>(end - row, tile, b == 0 ? next : nullptr, row, state);
    }
  }

  template <int R>
  void run_block(int64_t count, const KeyTile<C>& tile, const KeyTile<C>* next, int64_t row, float* state) const {
    if (count == R) {
      run_rows<R>(tile, next, row, state);
    } else if constexpr (R > 1) {
      run_block<R - 1>(count, tile, next, row, state);
    }
  }

  // Let rows [row, row + R) see one tile. Rows are in order of position.
  template <int R>
  void run_rows(const KeyTile<C>& tile, const KeyTile<C>* next, int64_t row, float* state) const {
    constexpr int kVectors = kAttentionVectors<R>;
    const int64_t first = max_of(first_key(row) - tile.start, 0);
    const int64_t last = min_of(s_.positions[row + R - 1] + 1 - tile.start, kTileKeys);
    if (first >= last) return;
    for (int64_t v = first / W / kVectors * kVectors; v * W < last; v += kVectors) {
      score_keys<kVectors, C, R>(tile, next, v, a_.head_dim, s_.queries + row, s_.query_scales + row, s_.scores);
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
    add_rows<R>(tile, next, first, last, decay, state + row * a_.row_stride);
  }

  // out[r] = out[r] * decay[r] + the values of keys [first, last) times their probabilities.
  template <int R>
  void add_rows(const KeyTile<C>& tile, const KeyTile<C>* next, int64_t first, int64_t last, const float* decay,
                float* out) const {
    constexpr int kVectors = kAttentionVectors<R>;
    int64_t dim = 0;
    if constexpr (kInt8) {
      float steps[R];
      quantize_probs<R>(tile, a_.head_dim, s_.scores, steps);
      for (; dim < a_.head_dim; dim += 2 * W) {
        const KeyTile<C>* fetched = dim % 64 == 0 ? next : nullptr;  // a cache line holds 64 dimensions
        add_int8_values<R>(tile, fetched, dim, min_of(a_.head_dim - dim, 2 * W), first, last, s_.scores, steps, decay,
                           out + dim, a_.row_stride);
      }
    } else {
      for (; dim + kVectors * W <= a_.head_dim; dim += kVectors * W) {
        add_values<kVectors, C, R>(tile, next, dim, first, last, s_.scores, decay, out + dim, a_.row_stride);
      }
      for (; dim + W <= a_.head_dim; dim += W) {
        add_values<1, C, R>(tile, next, dim, first, last, s_.scores, decay, out + dim, a_.row_stride);
      }
      if (dim < a_.head_dim) {
        add_values_tail<C, R>(tile, dim, a_.head_dim - dim, first, last, s_.scores, decay, out + dim, a_.row_stride);
      }
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

template <typename T, typename C = T>
static void attention_item(const AttentionArgs& args, const AttentionItem& item, const AttentionScratch& scratch) {
  AttentionTask<T, C>(args, item, scratch).run();
}

template <typename T>
static void attention_finish(const AttentionArgs& args, const AttentionItem& item, const AttentionScratch& scratch) {
  AttentionTask<T, T>(args, item, scratch).finish();  // the same for any cache
}

constexpr AttentionTable kAttention = {
    .item = {attention_item<float>, attention_item<bf16>},
    .int8_item = {attention_item<float, int8_t>, attention_item<bf16, int8_t>},
    .finish = {attention_finish<float>, attention_finish<bf16>},
};

}  // namespace quire::QUIRE_ISA
