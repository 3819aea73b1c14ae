// Paged attention over one item of a plan (attention_plan.h): Kwon et al. 2023, with the online softmax of Milakov and
// Gimelshein 2018. Every (token, head) row is computed in an order that depends on its position and window alone: tiles
// of 64 keys and sections of 512 at absolute positions, one chain of fused multiply-adds per score and per output. What
// else is in the batch, how the prompt was cut, block size and placement, and the thread count do not change its bits.
// Values of keys that some row of a tile sees must be finite: rows that do not see them multiply them by zero.
#pragma once

#include <cstring>

#include "attention_plan.h"
#include "simd.h"

namespace quire::QUIRE_ISA {

constexpr float kInfinity = __builtin_inff();
constexpr int64_t kKeyVectors = kTileKeys / W;
// Micro kernel sizes that keep all accumulators in registers: 32 of them with 16 lanes, 16 with fewer.
constexpr int kBlockRows = W == 16 ? 6 : 4;     // rows at once
constexpr int kScoreVectors = W == 16 ? 4 : 2;  // vectors of keys at once
constexpr int kValueVectors = W == 16 ? 4 : 2;  // vectors of head dimensions at once

// The four-byte lane of the key layout: one float, or a pair of bf16.
template <class T>
struct KeyLane;

template <>
struct KeyLane<float> {
  using vector = f32;
  static constexpr int64_t kPack = 1;
  QUIRE_INLINE vector load(const float* p) { return quire::QUIRE_ISA::load(p); }
  QUIRE_INLINE vector broadcast(const float* p) { return set1(*p); }
  QUIRE_INLINE f32 dot(f32 acc, vector a, vector b) { return fma(a, b, acc); }
};

template <>
struct KeyLane<bf16> {
  using vector = pairs;
  static constexpr int64_t kPack = 2;
  QUIRE_INLINE vector load(const bf16* p) { return load_pairs(p); }
  QUIRE_INLINE vector broadcast(const bf16* p) { return set1_pair(p); }
  QUIRE_INLINE f32 dot(f32 acc, vector a, vector b) { return dot2(acc, a, b); }
};

// scores[r][key] = scale * (queries[r] . key) for R rows and kScoreVectors vectors of keys.
template <class T, int R>
static inline void score_keys(const AttentionArgs& a, const void* const* queries, const T* const* keys,
                              int64_t key_step, float* scores) {
  using Lane = KeyLane<T>;
  f32 acc[R][kScoreVectors];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kScoreVectors; ++v) acc[r][v] = set1(0.0f);
  }
  const int64_t lanes = a.head_dim / Lane::kPack;
  for (int64_t i = 0; i < lanes; ++i) {
    typename Lane::vector key[kScoreVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kScoreVectors; ++v) key[v] = Lane::load(keys[v] + i * key_step);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const auto query = Lane::broadcast(static_cast<const T*>(queries[r]) + i * Lane::kPack);
#pragma GCC unroll 16
      for (int v = 0; v < kScoreVectors; ++v) acc[r][v] = Lane::dot(acc[r][v], key[v], query);
    }
  }
  const f32 scale = set1(a.scale);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kScoreVectors; ++v) store(scores + r * kTileKeys + v * W, acc[r][v] * scale);
  }
}

// out[r][0:N * W] = out[r] * decay[r] + sum of probs[r][key] * values[key] for keys [first, last), in that order.
template <class T, int R, int N>
static inline void add_values(const float* probs, const float* decay, const T* const* values, int64_t dim,
                              int64_t first, int64_t last, float* out, int64_t row_stride) {
  f32 acc[R][N];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < N; ++v) acc[r][v] = load(out + r * row_stride + v * W) * set1(decay[r]);
  }
  for (int64_t key = first; key < last; ++key) {
    f32 value[N];
#pragma GCC unroll 16
    for (int v = 0; v < N; ++v) value[v] = load(values[key] + dim + v * W);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const f32 prob = set1(probs[r * kTileKeys + key]);
#pragma GCC unroll 16
      for (int v = 0; v < N; ++v) acc[r][v] = fma(prob, value[v], acc[r][v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < N; ++v) store(out + r * row_stride + v * W, acc[r][v]);
  }
}

// The same for the last head_dim % W dimensions; the rest of the vector is zero.
template <class T, int R>
static inline void add_values_tail(const float* probs, const float* decay, const T* const* values, int64_t dim,
                                   int64_t count, int64_t first, int64_t last, float* out, int64_t row_stride) {
  f32 acc[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) acc[r] = load(out + r * row_stride) * set1(decay[r]);
  for (int64_t key = first; key < last; ++key) {
    const f32 value = load_n(values[key] + dim, count);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) acc[r] = fma(set1(probs[r * kTileKeys + key]), value, acc[r]);
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) store(out + r * row_stride, acc[r]);
}

// Where the keys and values of one tile lie. Entries outside the visible keys repeat a visible one or stay unset.
template <class T>
struct Tile {
  int64_t start;
  const T* keys[kKeyVectors];
  int64_t key_step;  // elements from one lane of a key to its next
  const T* values[kTileKeys];
};

template <class T>
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
    for (int64_t section = item_.section_begin; section < item_.section_end; ++section) {
      if (item_.partials) {
        run_section(section, item_.partials + (section - item_.section_begin) * rows_ * a_.row_stride);
      } else if (section == item_.section_begin) {
        run_section(section, s_.total);
      } else {
        run_section(section, s_.part);
        merge(s_.part);
      }
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

  void run_section(int64_t section, float* state) {
    clear(state);
    const int64_t last_key = s_.positions[rows_ - 1] + 1;
    int64_t first = section * kSectionKeys;
    int64_t last = first + kSectionKeys;
    if (first_key(0) > first) first = first_key(0);
    if (last_key < last) last = last_key;
    Tile<T> tile;
    for (int64_t start = first / kTileKeys * kTileKeys; start < last; start += kTileKeys) {
      locate(start, first > start ? first : start, last < start + kTileKeys ? last : start + kTileKeys, tile);
      run_tile(tile, state);
    }
  }

  // Find keys [first, last) of the tile at `start`, packing the keys into the scratch if vectors would straddle blocks.
  void locate(int64_t start, int64_t first, int64_t last, Tile<T>& tile) {
    constexpr int64_t kPack = KeyLane<T>::kPack;
    const bool in_place = a_.block_size % W == 0;
    const int32_t* table = a_.block_tables + item_.seq * a_.table_stride;
    const int64_t head_size = a_.block_size * a_.head_dim;
    tile.start = start;
    tile.key_step = kPack * (in_place ? a_.block_size : kTileKeys);
    for (int64_t key = first; key < last;) {
      const int64_t offset = key % a_.block_size;
      const int64_t run = last - key < a_.block_size - offset ? last - key : a_.block_size - offset;
      const int64_t block = table[key / a_.block_size];
      const T* k = static_cast<const T*>(a_.k_cache) + block * a_.k_block_stride + item_.kv_head * head_size;
      const T* v = static_cast<const T*>(a_.v_cache) + block * a_.v_block_stride + item_.kv_head * head_size;
      for (int64_t i = 0; i < run; ++i) tile.values[key - start + i] = v + (offset + i) * a_.head_dim;
      if (in_place) {
        const int64_t aligned = offset / W * W;  // the vector that holds `offset` starts here
        for (int64_t i = aligned; i < offset + run; i += W) {
          tile.keys[(key - start - offset + i) / W] = k + i * kPack;
        }
      } else {
        pack_keys(k + offset * kPack, run, key - start);
      }
      key += run;
    }
    const int64_t first_vector = (first - start) / W, last_vector = (last - start - 1) / W;
    for (int64_t v = 0; v < kKeyVectors; ++v) {
      if (!in_place) {
        tile.keys[v] = reinterpret_cast<const T*>(s_.packed_keys) + v * W * kPack;
      } else if (v < first_vector || v > last_vector) {
        tile.keys[v] = tile.keys[first_vector];
      }
    }
  }

  void pack_keys(const T* k, int64_t run, int64_t to) {
    constexpr int64_t kPack = KeyLane<T>::kPack;
    auto* packed = reinterpret_cast<T*>(s_.packed_keys);
    for (int64_t lane = 0; lane < a_.head_dim / kPack; ++lane) {
      std::memcpy(packed + (lane * kTileKeys + to) * kPack, k + lane * a_.block_size * kPack,
                  static_cast<size_t>(run) * 4);
    }
  }

  void run_tile(const Tile<T>& tile, float* state) {
    const int64_t blocks = (rows_ + kBlockRows - 1) / kBlockRows;
    int64_t row = 0;
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t count = (rows_ - row + blocks - b - 1) / (blocks - b);
      run_block<kBlockRows>(count, tile, row, state);
      row += count;
    }
  }

  template <int R>
  void run_block(int count, const Tile<T>& tile, int64_t row, float* state) {
    if (count == R) {
      run_rows<R>(tile, row, state);
    } else if constexpr (R > 1) {
      run_block<R - 1>(count, tile, row, state);
    }
  }

  // Let rows [row, row + R) see one tile. Rows are in order of position.
  template <int R>
  void run_rows(const Tile<T>& tile, int64_t row, float* state) {
    int64_t first = first_key(row) - tile.start;
    int64_t last = s_.positions[row + R - 1] + 1 - tile.start;
    if (first < 0) first = 0;
    if (last > kTileKeys) last = kTileKeys;
    if (first >= last) return;
    for (int64_t v = first / W / kScoreVectors * kScoreVectors; v * W < last; v += kScoreVectors) {
      score_keys<T, R>(a_, s_.queries + row, tile.keys + v, tile.key_step, s_.scores + v * W);
    }
    float decay[kMaxBlockRows];
    for (int r = 0; r < R; ++r) {
      float* scores = s_.scores + r * kTileKeys;
      const int64_t begin = first_key(row + r) - tile.start, end = s_.positions[row + r] + 1 - tile.start;
      for (int64_t key = 0; key < begin && key < kTileKeys; ++key) scores[key] = -kInfinity;
      for (int64_t key = end < 0 ? 0 : end; key < kTileKeys; ++key) scores[key] = -kInfinity;
      decay[r] = softmax_row(scores, row_max(state, row + r), row_sum(state, row + r));
    }
    float* out = state + row * a_.row_stride;
    int64_t dim = 0;
    for (; dim + kValueVectors * W <= a_.head_dim; dim += kValueVectors * W) {
      add_values<T, R, kValueVectors>(s_.scores, decay, tile.values, dim, first, last, out + dim, a_.row_stride);
    }
    for (; dim + W <= a_.head_dim; dim += W) {
      add_values<T, R, 1>(s_.scores, decay, tile.values, dim, first, last, out + dim, a_.row_stride);
    }
    if (dim < a_.head_dim) {
      add_values_tail<T, R>(s_.scores, decay, tile.values, dim, a_.head_dim - dim, first, last, out + dim,
                            a_.row_stride);
    }
  }

  // Turn a row's scores into probabilities relative to its new maximum; returns what its output so far shrinks by.
  static float softmax_row(float* scores, float* max_so_far, float* sum) {
    f32 largest = load(scores);
    for (int64_t v = 1; v < kKeyVectors; ++v) largest = max(largest, load(scores + v * W));
    const float tile_max = reduce_max(largest);
    if (tile_max == -kInfinity) {  // nothing visible: the row keeps its bits
      for (int64_t v = 0; v < kKeyVectors; ++v) store(scores + v * W, set1(0.0f));
      return 1.0f;
    }
    const float new_max = tile_max > *max_so_far ? tile_max : *max_so_far;
    f32 tile_sum = set1(0.0f);
    for (int64_t v = 0; v < kKeyVectors; ++v) {
      const f32 prob = exp(load(scores + v * W) - set1(new_max));
      store(scores + v * W, prob);
      tile_sum = tile_sum + prob;
    }
    const float decay = exp(set1(*max_so_far - new_max))[0];
    *sum = *sum * decay + reduce_add(tile_sum);
    *max_so_far = new_max;
    return decay;
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
      const f32 keep = exp(set1(total_max - new_max)), add = exp(set1(part_max - new_max));
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

template <class T>
static void attention_item(const AttentionArgs& args, const AttentionItem& item, const AttentionScratch& scratch) {
  AttentionTask<T>(args, item, scratch).run();
}

template <class T>
static void attention_finish(const AttentionArgs& args, const AttentionItem& item, const AttentionScratch& scratch) {
  AttentionTask<T>(args, item, scratch).finish();
}

constexpr AttentionTable kAttention = {
    .item = {attention_item<float>, attention_item<bf16>},
    .finish = {attention_finish<float>, attention_finish<bf16>},
};

}  // namespace quire::QUIRE_ISA
