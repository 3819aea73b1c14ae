// Where the keys and values of an item of a plan (attention/plan.h) lie in the paged cache, and fetching them into the
// processor's cache before they are used.
#pragma once

#include "attention/plan.h"
#include "attention/tiles/tile.h"
#include "isa/simd.h"
#include "runtime/memory.h"

namespace quire::QUIRE_ISA {

QUIRE_INLINE int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
QUIRE_INLINE int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }

// The keys [first, last) that an item visits.
struct KeyRange {
  int64_t first, last;
};

// Token t of a sequence is at this position and t.
QUIRE_INLINE int64_t context_of(const AttentionArgs& args, int64_t seq) {
  return args.seq_lens[seq] - args.query_start[seq + 1];
}

static inline KeyRange key_range(const AttentionArgs& args, const AttentionItem& item) {
  const int64_t context = context_of(args, item.seq);
  return {max_of(args.first_key(context + item.token_begin), item.section_begin * kSectionKeys),
          min_of(args.end_key(item.seq, context + item.token_end - 1), item.section_end * kSectionKeys)};
}

// The keys of a tile that some of rows [begin, end) see.
template <typename C>
QUIRE_INLINE KeyRange seen_by(const AttentionScratch& scratch, const KeyTile<C>& tile, int64_t begin, int64_t end) {
  return {max_of(scratch.first_keys[begin] - tile.start, 0), min_of(scratch.end_keys[end - 1] - tile.start, kTileKeys)};
}

template <typename C>
QUIRE_INLINE int64_t key_lanes(const AttentionArgs& args) {
  return args.head_dim / KeyLane<C>::kPack + KeyLane<C>::kScaleLanes;
}

// Zero packed keys that are multiplied but not seen: denormals, which the scratch may hold, take far longer.
template <typename C>
QUIRE_INLINE void clear_keys(const AttentionArgs& args, int64_t begin, int64_t end, C* packed) {
  constexpr int64_t kPack = KeyLane<C>::kPack;
  for (int64_t lane = 0; begin < end && lane < key_lanes<C>(args); ++lane) {
    std::memset(packed + (lane * kTileKeys + begin) * kPack, 0, size_t(end - begin) * 4);
  }
}

// Keys and values from a slot of a sequence's block `index` on, of one head; of latents, which are both, only values.
template <typename C>
struct BlockSlot {
  const C *keys, *values;
};

template <typename C>
static inline BlockSlot<C> find_slot(const AttentionArgs& args, int64_t seq, int64_t kv_head, int64_t index,
                                     int64_t offset) {
  const int64_t block =
      args.block_tables == nullptr ? args.query_start[seq] + index : args.block_tables[seq * args.table_stride + index];
  const C* values = static_cast<const C*>(args.v_cache) + block * args.v_block_stride +
                    (kv_head * args.block_size + offset) * args.head_dim;
  if (args.has_latents()) return {nullptr, values};
  return {static_cast<const C*>(args.k_cache) + block * args.k_block_stride +
              (kv_head * args.block_size * key_lanes<C>(args) + offset) * KeyLane<C>::kPack,
          values};
}

// Whether values are converted and written to the scratch once for this many rows of a head. Otherwise each block of
// rows converts them for itself.
template <typename C>
constexpr bool is_staged_for(int64_t rows) {
  return rows > kMostAttentionRows<C> && (kHas32Registers || ValueLane<C>::kVectors > 1);
}

// How far ahead of the work lines are fetched where the nearest cache is large. Less would come too late: values of 64
// dimensions are read in two passes of half of each row, so the first pass moves on twice as fast as lines are fetched.
constexpr int64_t kBytesNear = 16 * 1024;

namespace {  // then the compiler knows which registers next_piece changes

// Walks over the tiles of a run of items, up to two ahead of the work, and fetches what lies there into the
// second-level cache: in the order of memory, block by block, since that is what the processor's own prefetchers
// recognize and help with. Where the nearest cache is large: in the order of use, kBytesNear ahead, and into that, so
// that loads do not wait behind requests that wait for memory.
template <typename C>
class LookAhead {
 public:
  LookAhead(const AttentionArgs& args, const AttentionItem* items, int64_t count)
      : a_(args), item_(items), end_(items + count) {
    enter_item();
    lead_ = 1;
    pairs_ = kMayPair && !a_.has_latents() && a_.head_dim % 32 == 0 && !is_in_lanes() &&
             a_.num_heads <= kMostPairedHeads * a_.num_kv_heads;
    near_ = kMayBeNear && has_large_nearest_cache() && !a_.has_latents() && !is_in_lanes() &&
            !is_staged_for<C>(a_.num_heads / a_.num_kv_heads);  // else values are read before all keys
    nearest_ = near_ && (sizeof(C) > 1 || a_.num_heads <= kMostNearestHeads * a_.num_kv_heads);
  }

  // The work begins the next tile: those up to it need not be fetched any more.
  void begin_tile() {
    if (--lead_ == 0 && !near_) next_tile();
    if (lead_ < 0) next_tile();
  }

  // The next kBytes; a line is fetched when calls have asked for all of it.
  template <int kBytes>
  void fetch() {
    constexpr int kLines = kBytes / 64;
    if constexpr (kBytes % 64 != 0) {
      owed_ += kBytes % 64;
      if (owed_ >= 64) {
        owed_ -= 64;
        fetch<64>();
      }
      if constexpr (kLines == 0) return;
    }
    if (next_ >= piece_end_ && !next_piece()) return;
    const char* line = next_;
    if constexpr (kMayPair && kLines % 2 == 0) {
      if (pairs_) {
        next_ += kLines * 32;
        QUIRE_UNROLL
        for (int l = 0; l < kLines / 2; ++l) {
          prefetch(line + l * 64);
          prefetch(line + to_values_ + l * 64);
        }
        return;
      }
    }
    next_ += kLines * 64;
    QUIRE_UNROLL
    for (int l = 0; l < kLines; ++l) ask(line + l * 64);
  }

  void end_turn(int64_t) {}

  // The address of the next `bytes`, of one piece, for the caller to fetch; null: there are none.
  const char* take(int64_t bytes) {
    if (next_ >= piece_end_ && !next_piece()) return nullptr;
    return std::exchange(next_, next_ + bytes);
  }

  // Whether keys and values are fetched in turns, and also beside staging and the softmax.
  bool pairs() const { return kMayPair && pairs_; }

 private:
  // The most heads of queries of a head of keys for that: with seven, too much was asked for at once.
  static constexpr int64_t kMostPairedHeads = 4;
  // On tiles, a block's keys and values are fetched in turns: reading two pages at a time measured faster there. Both
  // take equally many bytes, a multiple of what a call asks for.
  static constexpr bool kMayPair = kAmx && sizeof(C) == sizeof(bf16);
#if defined(__AVX2__)
  static constexpr bool kMayBeNear = !kAmx;
#else
  static constexpr bool kMayBeNear = false;
#endif

  // The most heads of queries of a head of int8 keys for which these are fetched into the nearest cache: more are
  // multiplied for longer than they are read.
  static constexpr int64_t kMostNearestHeads = 4;

  QUIRE_MEMBER void ask(const char* line) const {
    if (kMayBeNear && nearest_) return prefetch_nearest(line);
    prefetch(line);
  }

  void enter_item() {
    const KeyRange keys = key_range(a_, *item_);
    start_ = keys.first / kTileKeys * kTileKeys;
    last_ = keys.last;
    enter_tile();
  }

  void enter_tile() {
    next_ = piece_end_ = nullptr;
    block_ = first_block_ = start_ / piece_keys();
    key_ = first_block_ * piece_keys();
    row_ = 0;
  }

  void next_tile() {
    ++lead_;
    start_ += kTileKeys;
    if (start_ >= last_ && item_ < end_ && ++item_ < end_) return enter_item();
    enter_tile();
  }

  // A block's keys lie in one piece, and so do its values. Of larger blocks each lane of the keys has a piece.
  bool is_in_lanes() const { return a_.block_size > kTileKeys; }
  int64_t piece_keys() const { return min_of(a_.block_size, kTileKeys); }

  // Not inlined: loops that fetch keep their registers.
  __attribute__((noinline)) bool next_piece() {
    if (kMayBeNear && near_) {
      const bool is_first = next_ == nullptr && lead_ == 0;  // the work has come here: at once what else is ahead of it
      if (!next_near_piece()) return false;
      for (int64_t bytes = 0; is_first && bytes < kBytesNear; bytes += 64) fetch<64>();
      return next_ < piece_end_ || next_near_piece();
    }
    if (key_ >= min_of(start_ + kTileKeys, last_) && lead_ < 2) next_tile();
    if (key_ >= min_of(start_ + kTileKeys, last_) || item_ == end_ || a_.block_size % W != 0) return false;
    const int64_t heads = item_->num_kv_heads, lanes = heads * key_lanes<C>(a_);
    const int64_t key_rows = a_.has_latents() ? 0 : is_in_lanes() ? lanes : 1, value_rows = is_in_lanes() ? heads : 1;
    if (row_ == 0) {
      slot_ = find_slot<C>(a_, item_->seq, item_->kv_head, key_ / a_.block_size, key_ % a_.block_size);
    }
    if (pairs_) {
      to_values_ = reinterpret_cast<const char*>(slot_.values) - reinterpret_cast<const char*>(slot_.keys);
      row_ = 1;  // the values come with the keys
      next_ = reinterpret_cast<const char*>(slot_.keys);
      piece_end_ = next_ + piece_keys() * 4 * lanes;
    } else if (row_ < key_rows) {
      next_ = reinterpret_cast<const char*>(slot_.keys) + row_ * a_.block_size * 4;
      piece_end_ = next_ + piece_keys() * 4 * lanes / key_rows;
    } else {
      next_ = reinterpret_cast<const char*>(slot_.values + (row_ - key_rows) * a_.block_size * a_.head_dim);
      piece_end_ = next_ + piece_keys() * a_.head_dim * int64_t(sizeof(C)) * heads / value_rows;
    }
    if (++row_ == key_rows + value_rows) {
      row_ = 0;
      key_ += piece_keys();
    }
    return true;
  }

  // As next_piece, in the order of use: of each head the tile's keys, then its values.
  bool next_near_piece() {
    if (item_ == end_ || a_.block_size % W != 0) return false;
    if (key_ >= min_of(start_ + kTileKeys, last_)) {
      const bool is_last = row_ + 1 == 2 * item_->num_kv_heads;
      if (is_last && lead_ == 2) return false;
      ++row_;
      key_ = first_block_ * a_.block_size;
      block_ = first_block_;
      if (is_last) next_tile();
      if (item_ == end_) return false;
    }
    const BlockSlot<C> slot = find_slot<C>(a_, item_->seq, item_->kv_head + row_ / 2, block_++, 0);
    next_ = reinterpret_cast<const char*>(row_ % 2 == 0 ? slot.keys : slot.values);
    const int64_t rows = min_of(a_.block_size, last_ - key_);  // of values, those that are used
    piece_end_ =
        next_ + (row_ % 2 == 0 ? a_.block_size * 4 * key_lanes<C>(a_) : rows * a_.head_dim * int64_t(sizeof(C)));
    key_ += a_.block_size;
    return true;
  }

  const AttentionArgs& a_;
  const AttentionItem* item_;
  const AttentionItem* end_;
  int64_t start_, last_;         // of the tile that is fetched, and of its item
  int64_t lead_;                 // tiles between that tile and the one being computed
  int64_t key_, row_;            // of the piece that is fetched next
  int64_t block_, first_block_;  // its block in the table, and the tile's first
  BlockSlot<C> slot_;            // of key_, where row_ is not 0
  bool pairs_, near_, nearest_;
  int64_t owed_ = 0;       // bytes, less than a line
  int64_t to_values_ = 0;  // from a block's keys, in bytes
  const char *next_ = nullptr, *piece_end_ = nullptr;
};

}  // namespace

// Calls call(*ahead), or call with what fetches nothing if it is null: loops of many rows hold nothing of it.
template <typename C, typename Call>
QUIRE_INLINE void with_ahead(LookAhead<C>* ahead, const Call& call) {
  NoAhead none;
  ahead != nullptr ? call(*ahead) : call(none);
}

}  // namespace quire::QUIRE_ISA
