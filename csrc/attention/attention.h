// Paged attention over one item of a plan (attention/plan.h): Kwon et al. 2023, with the online softmax of Milakov and
// Gimelshein 2018. Every (token, head) row is computed in an order that depends on its position and variant alone:
// tiles of 128 keys and sections of 512 at absolute positions, one chain of fused multiply-adds per score and per
// output. What else is in the batch, how the prompt was cut, block size and placement, and the thread count do not
// change its bits. Over an int8 cache the sums of a tile are exact integers: queries and probabilities become int16,
// each row by itself. Values of keys that some row of a tile sees must be finite: rows that do not see them multiply
// them by zero.
#pragma once

#include <cstring>

#include "attention/look_ahead.h"
#include "attention/plan.h"
#include "attention/queries.h"
#include "attention/row_blocks.h"
#include "attention/short_texts.h"
#include "attention/tiles/amx_latents.h"
#include "attention/tiles/softmax.h"
#include "attention/tiles/tile.h"
#include "isa/rows.h"
#include "isa/simd.h"

namespace quire::QUIRE_ISA {

// T: what queries and outputs are made of; C: the cache.
template <typename T, typename C>
class AttentionTask {
  using Lane = KeyLane<C>;
  using Values = ValueLane<C>;
  static constexpr bool kInt8 = sizeof(C) == 1;
  static constexpr bool kHasTiles = kAmx && sizeof(C) == sizeof(bf16);
  static constexpr int64_t kStepKeys = 32;  // that products read together, at most
  // Whether the softmax of many rows runs beside products (run_overlapping).
#if defined(QUIRE_SIMD_AVX512)
  static constexpr bool kOverlaps = !kInt8 && !kHasTiles;
#else
  static constexpr bool kOverlaps = false;
#endif
  // Blocks of rows whose scores of a tile stay in the first-level cache. Where the softmax of one overlaps with the
  // products of another, more have less that overlaps with nothing.
  static constexpr int64_t kPassBlocks = 4, kOverlappingBlocks = 8;
  static_assert(kOverlappingBlocks * kMostAttentionRows<C> <= kPassRows);
  static_assert(kStepKeys % W == 0 && kTileKeys % kStepKeys == 0);

 public:
  AttentionTask(const AttentionArgs& args, const AttentionItem& item, const AttentionScratch& scratch, Tiles& tiles)
      : a_(args), item_(item), s_(scratch), tiles_(tiles) {
    group_ = a_.num_heads / a_.num_kv_heads;
    token_rows_ = group_ * item_.num_kv_heads;
    rows_ = (item_.token_end - item_.token_begin) * token_rows_;
    head_rows_ = rows_ / item_.num_kv_heads;
  }

  void run(LookAhead<C>& ahead) {
    stage_queries();
    if constexpr (!kInt8) {
      if (a_.has_latents()) arrange_queries(a_, s_, rows_, reinterpret_cast<const C*>(s_.queries));
    }
    KeyTile<C> tile;
    const KeyRange keys = key_range(a_, item_);
    int64_t start = keys.first / kTileKeys * kTileKeys;
    for (int64_t section = item_.section_begin; section < item_.section_end; ++section) {
      // The first section's state is built up in the total.
      const bool is_first = section == item_.section_begin;
      const State state = item_.state >= 0 ? partial(section) : is_first ? total() : scratch_state(s_.part);
      clear(state);
      for (; start < min_of(keys.last, (section + 1) * kSectionKeys); start += kTileKeys) {
        const int64_t first = max_of(keys.first - start, 0), last = min_of(keys.last - start, kTileKeys);
        ahead.begin_tile();
        for (int64_t head = 0; head < item_.num_kv_heads; ++head) {
          locate(start, first, last, item_.kv_head + head, tile);
          const int64_t around = uses_tiles() ? kStepKeys : 1;
          if (stages()) {
            stage_values(tile, ahead.pairs() && head_rows_ <= 2 * kMostAttentionRows<C> ? &ahead : nullptr,
                         first / around * around, (last + around - 1) / around * around, 0, a_.value_dim, a_.row_stride,
                         s_.values);
          }
          run_tile(tile, head * head_rows_, state, ahead);
        }
      }
      if (item_.state < 0 && !is_first) merge(state);
    }
    if (item_.state < 0) write_output();
  }

  // Merge the sections' states, first section first, and write the output.
  void finish() {
    clear(total());
    for (int64_t section = item_.section_begin; section < item_.section_end; ++section) merge(partial(section));
    write_output();
  }

 private:
  // A softmax state of the item's rows: in each row the output and, in one vector, the parts of the sum.
  struct State {
    float* rows;
    float* maxima;
  };
  State scratch_state(float* floats) const { return {floats, floats + rows_ * a_.row_stride}; }
  State total() const { return scratch_state(s_.total); }
  State partial(int64_t section) const {
    const int64_t size = item_.state_rows * (a_.row_stride + 1);
    float* floats = s_.partials + item_.state + (section - item_.section_begin) * size;
    return {floats + item_.state_row * a_.row_stride, floats + item_.state_rows * a_.row_stride + item_.state_row};
  }
  float* row_sums(const State& state, int64_t r) const { return state.rows + (r + 1) * a_.row_stride - 16; }

  // Whether values are made into lanes once for all rows, or written down with zeros for dimensions that fill no
  // vector. Latents are so wide that some of their dimensions at a time are.
  bool stages() const {
    const int64_t whole = kHas32Registers || Values::kVectors > 1 ? 4 * W : W;
    return !a_.has_latents() && (is_staged_for<C>(head_rows_) || a_.value_dim % whole != 0 || uses_tiles());
  }

  // Whether products are computed on tiles, which depends on the layer alone.
  bool uses_tiles() const { return kHasTiles && a_.head_dim % 32 == 0 && a_.value_dim % 32 == 0; }

  // Whether scores of tiles get their scale with the softmax: where nothing else is done to them before.
  bool scales_late() const { return uses_tiles() && !a_.has_latents() && !a_.changes_scores() && a_.scale > 0; }
  float late_scale() const { return scales_late() ? a_.scale * kLog2E : 1.0f; }

  typename Lane::Query* query(int64_t r) const {
    return reinterpret_cast<typename Lane::Query*>(s_.queries) + r * a_.head_dim;
  }

  // The query head of row r.
  int64_t head_of(int64_t r) const { return item_.kv_head * group_ + r % token_rows_; }

  void stage_queries() const {
    int64_t seq = item_.seq, r = 0;
    for (int64_t token = item_.token_begin; token < item_.token_end; ++token) {
      while (a_.query_start[seq + 1] <= token) ++seq;
      const int64_t position = context_of(a_, seq) + token, first_key = a_.first_key(position),
                    end_key = a_.end_key(seq, position);
      const T* from = static_cast<const T*>(a_.query) + token * a_.query_stride + item_.kv_head * group_ * a_.head_dim;
      for (const int64_t end = r + token_rows_; r < end; ++r, from += a_.head_dim) {
        s_.query_scales[r] = a_.scale * kLog2E;
        s_.steps[r] = 1.0f;
        s_.positions[r] = position;
        s_.first_keys[r] = first_key;
        s_.end_keys[r] = end_key;
        if constexpr (kInt8) {
          s_.query_scales[r] *= quantize_query(from, a_.head_dim, query(r));
        } else if (sizeof(*query(r)) == sizeof(T) || a_.has_latents()) {
          std::memcpy(reinterpret_cast<T*>(s_.queries) + r * a_.head_dim, from, size_t(a_.head_dim) * sizeof(T));
        } else {
          for_parts(a_.head_dim, [&](int64_t i, int64_t n) { store_some(query(r) + i, load_some(from + i, n), n); });
        }
      }
    }
  }

  void clear(const State& state) const {
    std::memset(state.rows, 0, size_t(rows_ * a_.row_stride) * sizeof(float));
    for (int64_t r = 0; r < rows_; ++r) state.maxima[r] = -kInfinity;
  }

  // Find keys [first, last) of the tile at `start`, packing them into the scratch if they straddle blocks or are rows.
  void locate(int64_t start, int64_t first, int64_t last, int64_t kv_head, KeyTile<C>& tile) const {
    constexpr int64_t kPack = Lane::kPack;
    const bool in_place = a_.block_size % W == 0 && !a_.has_key_rows();
    C* packed = reinterpret_cast<C*>(s_.packed_keys);
    tile.start = start;
    tile.lane_stride = kPack * (in_place ? a_.block_size : kTileKeys);
    const C* rows[kTileKeys];
    int64_t index = (start + first) / a_.block_size, offset = (start + first) % a_.block_size;
    for (int64_t key = first; key < last; ++index, offset = 0) {
      const int64_t run = min_of(last - key, a_.block_size - offset);
      const BlockSlot<C> slot = find_slot<C>(a_, item_.seq, kv_head, index, offset);
      for (int64_t i = 0; i < run; ++i) tile.values[key + i] = slot.values + i * a_.head_dim;
      if (in_place) {
        for (int64_t v = key / W; v * W < key + run; ++v) tile.vectors[v] = slot.keys + (v * W - key) * kPack;
      } else if (!a_.has_key_rows()) {
        pack_keys(slot.keys, run, packed + key * kPack);
      } else {
        for (int64_t i = 0; i < run; ++i) rows[key + i] = slot.keys + i * a_.head_dim;
      }
      key += run;
    }
    // Steps read keys by the vector, or by tiles' 32.
    const int64_t begin = first / kStepKeys * kStepKeys, end = (last + kStepKeys - 1) / kStepKeys * kStepKeys;
    for (int64_t i = begin; i < first; ++i) tile.values[i] = tile.values[first];
    for (int64_t i = last; i < end; ++i) tile.values[i] = tile.values[first];
    if (a_.has_latents()) return;
    if (a_.has_key_rows()) {
      for (int64_t i = begin; i < first; ++i) rows[i] = rows[first];
      for (int64_t i = last; i < end; ++i) rows[i] = rows[first];
    }
    const C* seen = in_place ? tile.vectors[first / W] : packed + first / W * W * kPack;
    for (int64_t v = 0; v < KeyTile<C>::kVectors; ++v) {
      if (v < first / W || v > (last - 1) / W) {
        tile.vectors[v] = seen;
      } else if (!in_place) {
        tile.vectors[v] = packed + v * W * kPack;
        if (a_.has_key_rows()) lanes_of_rows(rows + v * W, key_lanes<C>(a_), kTileKeys, packed + v * W * kPack);
      }
    }
    if (!in_place && !a_.has_key_rows()) {
      clear_keys(a_, first / W * W, first, packed);
      clear_keys(a_, last, (last + W - 1) / W * W, packed);
    }
  }

  void pack_keys(const C* from, int64_t run, C* to) const {
    constexpr int64_t kPack = Lane::kPack;
    for (int64_t lane = 0; lane < key_lanes<C>(a_); ++lane) {
      std::memcpy(to + lane * kTileKeys * kPack, from + lane * a_.block_size * kPack, static_cast<size_t>(run) * 4);
    }
  }

  // Let the head's rows, from `row` on, see one tile. Beside the work on few rows, what comes later is fetched; many
  // rows leave the processor's own prefetchers time enough.
  void run_tile(const KeyTile<C>& tile, int64_t row, const State& state, LookAhead<C>& ahead) const {
    const int64_t most = a_.has_latents() || uses_tiles() ? kMostAttentionRows<C> : kAttentionRows<C>;
    const int64_t blocks = head_rows_ <= kMostAttentionRows<C> ? 1 : (head_rows_ + most - 1) / most;
    const auto row_of = [&](int64_t b) {
      return row + (a_.has_latents() || uses_tiles() || kHoldsTwelve<C> ? min_of(b * most, head_rows_)
                                                                        : head_rows_ * b / blocks);
    };
    for (int64_t r = row; r < row + head_rows_; ++r) s_.references[r] = -kInfinity;
    const bool overlaps = kOverlaps && blocks > 2 && !a_.has_latents();
    const int64_t most_blocks = overlaps ? kOverlappingBlocks : kPassBlocks;
    int64_t bounds[kOverlappingBlocks + 1];
    for (int64_t block = 0; block < blocks; block += most_blocks) {
      const int64_t count = min_of(most_blocks, blocks - block);
      for (int64_t b = 0; b <= count; ++b) bounds[b] = row_of(block + b);
      if constexpr (kOverlaps) {
        if (overlaps) {
          run_overlapping(tile, bounds, count, state);
          continue;
        }
      }
      run_blocks(tile, bounds, count, state, blocks <= 2 && a_.block_tables != nullptr ? &ahead : nullptr);
    }
  }

  // As run_blocks, of many rows: beside the scores of a block the largest ones of the block before are found, beside
  // its values the softmax of the next one is computed.
  void run_overlapping(const KeyTile<C>& tile, const int64_t* bounds, int64_t count, const State& state) const {
    RowBlock blocks[kOverlappingBlocks];
    int64_t num_blocks = 0;
    MaximaBeside maxima = {};
    for_blocks(s_, tile, bounds, count, [&](const RowBlock& block) {
      score_block(a_, s_, tile, block, maxima);
      maxima.finish();
      hide_unseen(a_, item_, s_, tile, block);
      maxima = {block.scores, s_.references + block.row, block.vector(), block.vectors_end(), block.rows};
      blocks[num_blocks++] = block;
    });
    maxima.finish();
    update_maxima(bounds[count] - bounds[0], state.maxima + bounds[0], s_.references + bounds[0], s_.decay + bounds[0]);
    SoftmaxBeside<typename Values::Prob> softmax = {};
    const auto begin = [&](int64_t b) {
      if (b == num_blocks) return;
      const RowBlock& block = blocks[b];
      for (int64_t r = block.row; r < block.row + block.rows; ++r) {
        store(row_sums(state, r), load(row_sums(state, r)) * set1(s_.decay[r]));
      }
      softmax = {block.scores,
                 s_.references + block.row,
                 row_sums(state, block.row),
                 a_.row_stride,
                 block.vector(),
                 block.vectors_end(),
                 block.rows,
                 block.vector()};
    };
    begin(0);
    softmax.finish();
    for (int64_t b = 0; b < num_blocks; ++b) {
      begin(b + 1);
      add_block(a_, s_, tile, blocks[b], stages(), state.rows, softmax);
      softmax.finish();
    }
  }

  // One step for the rows of all blocks, which `bounds` are between, before the next: then the rows' chains of
  // operations overlap.
  void run_blocks(const KeyTile<C>& tile, const int64_t* bounds, int64_t count, const State& state,
                  LookAhead<C>* ahead) const {
    const int64_t begin_row = bounds[0], end_row = bounds[count];
    const auto fetch = [&](const RowBlock& block) { return block.row == begin_row ? ahead : nullptr; };
    if constexpr (!kInt8) {
      if (a_.has_latents()) score_latents(a_, s_, tiles_, tile, begin_row, end_row, uses_tiles(), ahead);
    }
    if constexpr (kHasTiles) {
      if (uses_tiles() && !a_.has_latents())
        score_on_tiles(a_, s_, tiles_, tile, begin_row, end_row, query(begin_row), !scales_late(), ahead);
    }
    for_blocks(s_, tile, bounds, count, [&](const RowBlock& block) {
      if (!a_.has_latents() && !uses_tiles()) {
        with_ahead(fetch(block), [&](auto& asks) { score_block(a_, s_, tile, block, asks); });
      }
      hide_unseen(a_, item_, s_, tile, block);
      for (int64_t r = 0; r < block.rows; ++r) {
        const float largest = largest_score(block.scores + r * kTileKeys, block.vector(), block.vectors_end());
        s_.references[block.row + r] = largest * late_scale();
      }
    });
    update_maxima(end_row - begin_row, state.maxima + begin_row, s_.references + begin_row, s_.decay + begin_row);
    for_blocks(s_, tile, bounds, count, [&](const RowBlock& block) {
      const int64_t vector = block.vector(), end = block.vectors_end();
      for (int64_t r = 0; r < block.rows; ++r) {
        softmax_row<typename Values::Prob>(ahead, block.scores + r * kTileKeys, vector, end, late_scale(),
                                           s_.references[block.row + r], s_.decay[block.row + r],
                                           row_sums(state, block.row + r));
      }
      if constexpr (kInt8) {
        quantize_probs(tile, a_.head_dim, block.rows, block.scores, vector, end, s_.steps + block.row);
      }
    });
    if constexpr (kHasTiles) {
      const auto clear = [&](int64_t b) { clear_unseen(s_, tile, begin_row, end_row, bounds[b], bounds[b + 1]); };
      for (int64_t b = 0; uses_tiles() && b < count; ++b) clear(b);
      if (uses_tiles() && !a_.has_latents()) {
        return add_on_tiles(a_, s_, tiles_, tile, begin_row, end_row, 0, a_.value_dim, state.rows);
      }
    }
    if constexpr (!kInt8) {
      if (a_.has_latents()) return add_latents(a_, s_, tiles_, tile, begin_row, end_row, uses_tiles(), state.rows);
    }
    for_blocks(s_, tile, bounds, count, [&](const RowBlock& block) {
      with_ahead(fetch(block), [&](auto& asks) { add_block(a_, s_, tile, block, stages(), state.rows, asks); });
    });
  }

  // Merge the state of the next section into the total.
  void merge(const State& part) {
    for (int64_t r = 0; r < rows_; ++r) {
      float& total_max = total().maxima[r];
      const float part_max = part.maxima[r], new_max = total_max > part_max ? total_max : part_max;
      if (part_max == -kInfinity) continue;  // the row sees nothing of this section
      const f32 keep = exp2_negative(set1(total_max - new_max)), add = exp2_negative(set1(part_max - new_max));
      float* to = total().rows + r * a_.row_stride;
      for (int64_t i = 0; i < a_.row_stride; i += W) {
        store(to + i, fma(without_denormals(load(part.rows + r * a_.row_stride + i)), add,
                          without_denormals(load(to + i)) * keep));
      }
      total_max = new_max;
    }
  }

  // What row r's outputs are multiplied with when its sink joins the softmax, whose sum is `sum`: after all keys, so
  // that it counts once however these were split.
  f32 inverse_with_sink(int64_t r, float sum) {
    const float sink = a_.sinks[head_of(r)] * kLog2E, most = total().maxima[r], new_max = most > sink ? most : sink;
    const f32 keep = exp2_negative(set1(most - new_max));
    return keep / fma(set1(sum), keep, exp2_negative(set1(sink - new_max)));
  }

  void write_output() {
    for (int64_t r = 0; r < rows_; ++r) {
      const int64_t token = item_.token_begin + r / token_rows_;
      T* out = static_cast<T*>(a_.out) + (token * a_.num_heads + head_of(r)) * a_.value_dim;
      const float* from = total().rows + r * a_.row_stride;
      const float sum = reduce_add(load(row_sums(total(), r)));
      const f32 inverse = a_.sinks == nullptr ? set1(1.0f / sum) : inverse_with_sink(r, sum);
      // Adding zero turns -0 into +0: a masked key adds zero to an output, which is the one thing that can change one.
      for_parts(a_.value_dim, [&](int64_t d, int64_t n) {
        store_some(out + d, without_denormals(load(from + d)) * inverse + set1(0.0f), n);
      });
    }
  }

  const AttentionArgs& a_;
  const AttentionItem& item_;
  const AttentionScratch& s_;
  int64_t group_;       // query heads of a key/value head
  int64_t token_rows_;  // of one token
  int64_t rows_;        // of all; several key/value heads are of one token, so that a head's lie side by side
  int64_t head_rows_;
  Tiles& tiles_;
};

template <typename T, typename C = T>
static void attention_items(const AttentionArgs& args, const AttentionItem* items, int64_t count,
                            const AttentionScratch& scratch) {
  LookAhead<C> ahead(args, items, count);
  Tiles tiles;
  for (int64_t i = 0; i < count; ++i) {
    if (!attends_short_text<C>(args, items[i])) AttentionTask<T, C>(args, items[i], scratch, tiles).run(ahead);
  }
  tiles.release();
}

template <typename T>
static void attention_finish(const AttentionArgs& args, const AttentionItem* items, int64_t count,
                             const AttentionScratch& scratch) {
  Tiles none;
  for (int64_t i = 0; i < count; ++i) AttentionTask<T, T>(args, items[i], scratch, none).finish();  // for any cache
}

constexpr AttentionTable kAttention = {
    .items = {attention_items<float>, attention_items<bf16>},
    .int8_items = {attention_items<float, int8_t>, attention_items<bf16, int8_t>},
    .finish = {attention_finish<float>, attention_finish<bf16>},
};

}  // namespace quire::QUIRE_ISA
