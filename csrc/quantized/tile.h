// Tiles of a product on quantized weights: rows of quantized x times a piece of a panel (quantized/matmul.h).
#pragma once

#include "matmul/tiles.h"
#include "quantized/quads.h"
#include "quantized/unpack.h"

namespace quire::QUIRE_ISA {

// Tiles of a single panel: of bytes in one group, and of small groups.
constexpr int kPanelVectors = kTileShape.most < kVectorsPerPanel ? kTileShape.most : int(kVectorsPerPanel);
constexpr int kVectorsPerLine = 64 / (W * int(kUnitBytes)) > 1 ? 64 / (W * int(kUnitBytes)) : 1;
#if defined(__AVXVNNI__)
constexpr TileShape kByteShape = {6, 2, kPanelVectors}, kGroupedShape = {6, 2, kPanelVectors};
#elif defined(QUIRE_SIMD_AVX2)
constexpr TileShape kByteShape = {4, 2, kPanelVectors}, kGroupedShape = {4, 2, kPanelVectors};
#else
constexpr TileShape kByteShape = {kTileRows, kTileShape.vectors, kPanelVectors};
constexpr TileShape kGroupedShape = {kTileRows < 8 ? kTileRows : 8, kTileShape.vectors, kPanelVectors};
#endif
constexpr int kRowsAtOnce = 4;

// Whether small groups are unpacked in registers, and whether they are scaled while the next rows are multiplied.
#if defined(__AVX512VNNI__)
constexpr bool kUnpacksInRegisters = true, kOverlaps = true;
#elif defined(QUIRE_SIMD_AVX2)
constexpr bool kUnpacksInRegisters = true, kOverlaps = false;
#else
constexpr bool kUnpacksInRegisters = false, kOverlaps = false;
#endif

// Whether each of several passes through a panel in one group asks for its share of the next panel, which then comes
// while all rows are multiplied. The most bytes of such a panel: two of them stay in the second-level cache.
constexpr bool kSharesReading = W == 8;
constexpr int64_t kMostShared = 256 * 1024;

// As kUnfetchedRows, of bytes as they lie in a panel. Halves of bytes are read half as fast, and need the requests.
#if defined(__AVX512VNNI__)
constexpr int kUnfetchedBytesRows = 4;
#else
constexpr int kUnfetchedBytesRows = 0;
#endif

// Whether products of these integers are those of ByteSums.
QUIRE_INLINE bool has_bytes(const QuantizedFormat& format) { return format.bits == 8 || format.table != nullptr; }

// A row of x as the tiles read it: its values, then of each group its scale, then what the sum of its products lacks
// because stored integers have too much (lack_of), then the sum of its values times the scale.
struct QuantizedRow {
  int64_t k, group, groups, zero, bits;
  bool has_mins, has_bytes;
  int64_t scales_at, lacks_at, sums_at, bytes;

  QUIRE_MEMBER explicit QuantizedRow(const QuantizedShape& shape)
      : k(shape.k),
        group(shape.format.group),
        groups(shape.groups()),
        zero(shape.format.zero),
        bits(shape.format.bits),
        has_mins(shape.format.min != Number::kNone),
        has_bytes(quire::QUIRE_ISA::has_bytes(shape.format)),
        scales_at(groups * group * int64_t(sizeof(XValue))),
        lacks_at(scales_at + groups * int64_t(sizeof(float))),
        sums_at(lacks_at + groups * int64_t(sizeof(int32_t))),
        // Odd numbers of cache lines keep rows out of each other's sets.
        bytes((ceil_div(sums_at + (has_mins ? groups : 0) * int64_t(sizeof(float)), 64) | 1) * 64) {}
};

// A piece of a panel: of `groups` groups the units [group / 4][32], scales and mins [groups][32].
struct WeightPiece {
  const char* units;
  const bf16* stored_scales;  // where the panel has a scale for each group: its own, and `scales` are not used
  const float *scales, *mins;
  const uint8_t* table;
  char* room;             // of kPieceK * kPanelColumns bytes, for what a tile unpacks
  int64_t first, groups;  // the first group's index in a row
  int64_t ahead;          // how far behind its units that lies which a tile asks for while it multiplies
  int64_t step;           // how much further that lies for each row of units
  bool is_unpacked;       // its units are no longer in the panel

  QUIRE_MEMBER f32 scale(int64_t index, int64_t column) const {
    const int64_t at = index * kPanelColumns + column;
    return stored_scales != nullptr ? load(stored_scales + at) : load(scales + at);
  }
};

// kHalves: the units of plain halves of bytes, as they lie in a panel (PanelReader::has_plain_halves).
template <bool kHalves>
struct QuantizedTile {
  static constexpr TileShape kShape = kByteShape;

  template <int R, int G>
  QUIRE_INLINE void multiply(i32 (&acc)[R][G], const char* units, const XValue* x, int64_t x_stride, int shift) {
    ByteSums::Weights w[G];
    QUIRE_UNROLL
    for (int g = 0; g < G; ++g) {
      const i32 bytes = load_lanes(units + g * W * kUnitBytes);
      w[g] = ByteSums::weights(kHalves ? (bytes >> shift) & 0x0f0f0f0f : bytes);
    }
    QUIRE_UNROLL
    for (int r = 0; r < R; ++r) {
      const XQuad value = set1_quad(x + r * x_stride);
      QUIRE_UNROLL
      for (int g = 0; g < G; ++g) acc[r][g] = ByteSums::add(acc[r][g], w[g], value);
    }
  }

  // sums += the products of R quantized rows and G vectors of columns, from `column` on; sums' rows are 32 apart. Those
  // of the first piece are what they begin with.
  template <int R, int G>
  static void run(const char* rows, const QuantizedRow& layout, const WeightPiece& piece, int64_t column, float* sums) {
    const int64_t row_bytes = layout.bytes, scales_at = layout.scales_at, lacks_at = layout.lacks_at;
    const int64_t unit_rows = layout.group / kUnitBytes / (kHalves ? 2 : 1);
    const int64_t x_stride = row_bytes / int64_t(sizeof(XValue));
    const bool asks = kHalves || R > kUnfetchedBytesRows || piece.is_unpacked;
    const int64_t step = kSharesReading ? piece.step : kUnitRowBytes;
    const char* units = piece.units + column * kUnitBytes;
    const char* next = units + piece.ahead;
    f32 sum[R][G];
    QUIRE_UNROLL
    for (int r = 0; r < R; ++r) {
      QUIRE_UNROLL
      for (int g = 0; g < G; ++g) {
        sum[r][g] = piece.first == 0 ? set1(0) : load(sums + r * kPanelColumns + column + g * W);
      }
    }
    for (int64_t index = 0; index < piece.groups; ++index) {
      const int64_t group = piece.first + index;
      const XValue* x = reinterpret_cast<const XValue*>(rows) + group * layout.group;
      i32 acc[R][G];
      QUIRE_UNROLL
      for (int r = 0; r < R; ++r) {
        const i32 lack = set1_lane(rows + r * row_bytes + lacks_at + group * int64_t(sizeof(int32_t)));
        QUIRE_UNROLL
        for (int g = 0; g < G; ++g) acc[r][g] = lack;
      }
      for (int64_t unit = 0; unit < unit_rows; ++unit, units += kUnitRowBytes, x += kUnitBytes, next += step) {
        QUIRE_UNROLL
        for (int g = 0; g < G && asks; g += kVectorsPerLine) __builtin_prefetch(next + g * W * kUnitBytes, 0, 2);
        multiply<R, G>(acc, units, x, x_stride, 0);
        if constexpr (kHalves) multiply<R, G>(acc, units, x + QuantizedShape::kBlock / 2, x_stride, 4);
      }
      f32 scale[G];
      QUIRE_UNROLL
      for (int g = 0; g < G; ++g) scale[g] = piece.scale(index, column + g * W);
      QUIRE_UNROLL
      for (int r = 0; r < R; ++r) {
        const f32 x_scale = set1(reinterpret_cast<const float*>(rows + r * row_bytes + scales_at)[group]);
        QUIRE_UNROLL
        for (int g = 0; g < G; ++g) {
          sum[r][g] = sum[r][g] + __builtin_convertvector(acc[r][g], f32) * (x_scale * scale[g]);
        }
      }
    }
    QUIRE_UNROLL
    for (int r = 0; r < R; ++r) {
      QUIRE_UNROLL
      for (int g = 0; g < G; ++g) store(sums + r * kPanelColumns + column + g * W, sum[r][g]);
    }
  }
};

// The same of groups of 16 or 32 as they are stored, unpacked in registers. Up to kRowsAtOnce rows are multiplied at a
// time, and while they are, the products of those before them are scaled and added: together they keep busy both the
// processor's multipliers and what adds.
template <int kBits, bool kHasTable, int kGroup, typename Sums = ByteSums>
struct GroupedTile {
  static constexpr TileShape kShape = kGroupedShape;
  static constexpr int kSteps = kGroup / int(kUnitBytes);
  static constexpr int64_t kBlockBytes = kBits * kUnitRowBytes;
  static constexpr bool kIsKept = kBits == 5 || kBits == 6 || kHasTable;  // once unpacked, for further rows

  // What all steps of a tile have in common.
  struct Place {
    const char* rows;
    const QuantizedRow& layout;
    const WeightPiece& piece;
    int64_t column;
    float* sums;
    char* kept;
    ByteTable table;
  };

  // Products of rows with a group, in int32.
  template <int N, int G>
  struct Products {
    i32 acc[N][G];
    f32 scale[G];
    const char *x_scales, *lacks;
    float* sums;

    QUIRE_MEMBER void add(int64_t row_bytes, int from, int to) const {
      QUIRE_UNROLL
      for (int i = from; i < to; ++i) {
        const int r = i / G, g = i % G;
        const f32 x_scale = set1(*reinterpret_cast<const float*>(x_scales + r * row_bytes));
        const i32 total = Sums::total(acc[r][g], set1_lane(lacks + r * row_bytes));
        float* sum = sums + r * kPanelColumns + g * W;
        store(sum, load(sum) + __builtin_convertvector(total, f32) * (x_scale * scale[g]));
      }
    }
  };

  // The bytes of a step of a group, which is the block's half `half` if there are two.
  QUIRE_INLINE i32 unpack(const char* block, int64_t half, int step, const ByteTable& table) {
    if constexpr (kBits == 8) return load_lanes(block + (half * kSteps + step) * kUnitRowBytes);
    const int row = kGroup == 16 ? step : step % 8 / 2, is_upper = kGroup == 16 ? 0 : step % 2;
    const int shift = kGroup == 16 ? int(half) * 4 : is_upper * 4;
    i32 bytes = (load_lanes(block + row * kUnitRowBytes) >> shift) & 0x0f0f0f0f;
    if constexpr (kBits > 4) {
      const i32 upper[2] = {load_lanes(block + (4 + half) * kUnitRowBytes), {}};
      bytes = bytes | PanelReader::upper_bits<kBits>(upper, row + 4 * is_upper);
    }
    if constexpr (kHasTable) bytes = table.look_up(bytes);
    return bytes;
  }

  // The products of the rows from kFirst on with one group, while `before` are added.
  template <int kFirst, bool kKeeps, int N, int G, int M>
  QUIRE_INLINE void multiply(const Place& place, int64_t index, Products<N, G>& now, const Products<M, G>* before) {
    const QuantizedRow& layout = place.layout;
    const int64_t group = place.piece.first + index, row_bytes = layout.bytes;
    const int64_t x_stride = row_bytes / int64_t(sizeof(XValue)), half = kGroup == 16 ? index % 2 : 0;
    const char* row = place.rows + kFirst * row_bytes;
    const char* block =
        place.piece.units + index * kGroup / QuantizedShape::kBlock * kBlockBytes + place.column * kUnitBytes;
    const char* ahead = block + place.piece.ahead + half * (kSteps * kUnitRowBytes * (kBits > 4 ? 2 : 1) / 2);
    const XValue* x = reinterpret_cast<const XValue*>(row) + group * kGroup;
    now.x_scales = row + layout.scales_at + group * int64_t(sizeof(float));
    now.lacks = row + layout.lacks_at + group * int64_t(sizeof(int32_t));
    now.sums = place.sums + kFirst * kPanelColumns + place.column;
    QUIRE_UNROLL
    for (int g = 0; g < G; ++g) now.scale[g] = place.piece.scale(index, place.column + g * W);
    QUIRE_UNROLL
    for (int r = 0; r < N; ++r) {
      const i32 lack = set1_lane(now.lacks + r * row_bytes);
      QUIRE_UNROLL
      for (int g = 0; g < G; ++g) now.acc[r][g] = lack;
    }
    QUIRE_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      const int at = kBits == 8 || kGroup == 16 ? step : step / 2 + step % 2 * 4;
      typename Sums::Weights w[G];
      QUIRE_UNROLL
      for (int g = 0; g < G; ++g) {
        char* kept = place.kept + (step * G + g) * W * kUnitBytes;
        if (kFirst == 0 && g % kVectorsPerLine == 0 && (kBits > 4 || step % 2 == 0)) {
          __builtin_prefetch(ahead + step * kUnitRowBytes / (kBits > 4 ? 1 : 2) + g * W * kUnitBytes, 0, 2);
        }
        const i32 bytes =
            kFirst > 0 && kIsKept ? load_lanes(kept) : unpack(block + g * W * kUnitBytes, half, step, place.table);
        if constexpr (kKeeps && kIsKept) store_lanes(kept, bytes);
        w[g] = Sums::weights(bytes);
      }
      QUIRE_UNROLL
      for (int r = 0; r < N; ++r) {
        const XQuad value = set1_quad(x + r * x_stride + at * kUnitBytes);
        QUIRE_UNROLL
        for (int g = 0; g < G; ++g) now.acc[r][g] = Sums::add(now.acc[r][g], w[g], value);
      }
      if (before != nullptr) before->add(row_bytes, step * M * G / kSteps, (step + 1) * M * G / kSteps);
    }
  }

  template <int R, int G>
  static void run(const char* rows, const QuantizedRow& layout, const WeightPiece& piece, int64_t column, float* sums) {
    constexpr int A = kOverlaps && R > kRowsAtOnce ? (R + 1) / 2 : R,
                  B = R - A;  // rows of the first and the second half
    // Half a page off the sums, for a load waits for stores to places of the same last 12 bits.
    char* kept =
        piece.room + ((reinterpret_cast<intptr_t>(sums) + 2048 - reinterpret_cast<intptr_t>(piece.room)) & 4095);
    const Place place = {rows, layout, piece, column, sums, kept, ByteTable(kHasTable ? piece.table : kFloat4)};
    for (int r = 0; piece.first == 0 && r < R; ++r) {
      for (int g = 0; g < G; ++g) store(sums + r * kPanelColumns + column + g * W, set1(0));
    }
    Products<A, G> first;
    if constexpr (!kOverlaps) {
      for (int64_t index = 0; index < piece.groups; ++index) {
        multiply<0, false, A, G, A>(place, index, first, nullptr);
        first.add(layout.bytes, 0, A * G);
      }
      return;
    }
    multiply<0, (B > 0), A, G, A>(place, 0, first, nullptr);
    if constexpr (B == 0) {
      for (int64_t index = 1; index < piece.groups; ++index) {
        Products<A, G> next;
        multiply<0, false, A, G, A>(place, index, next, &first);
        first = next;
      }
      first.add(layout.bytes, 0, A * G);
    } else {
      Products<B, G> second;
      multiply<A, false, B, G, A>(place, 0, second, &first);
      for (int64_t index = 1; index < piece.groups; ++index) {
        multiply<0, true, A, G, B>(place, index, first, &second);
        multiply<A, false, B, G, A>(place, index, second, &first);
      }
      second.add(layout.bytes, 0, B * G);
    }
  }
};

using RunTile = void(const char*, const QuantizedRow&, const WeightPiece&, int64_t, float*);

// The tile for these numbers of rows and vectors, of units as they lie in a panel or (is_plain) may be multiplied by.
#if defined(QUIRE_SIMD_AVX2)
template <typename Sums>
static RunTile* small_tile(const QuantizedFormat& format, bool is_unpacked, int64_t rows, int64_t vectors) {
  if (format.group == 16) {
    if (is_unpacked) return tile_function<GroupedTile<8, false, 16, Sums>>(rows, vectors);
    if (format.bits == 6) return tile_function<GroupedTile<6, false, 16, Sums>>(rows, vectors);
    return tile_function<GroupedTile<4, false, 16, Sums>>(rows, vectors);
  }
  if (is_unpacked) return tile_function<GroupedTile<8, false, 32, Sums>>(rows, vectors);
  return tile_function<GroupedTile<5, false, 32, Sums>>(rows, vectors);
}

static RunTile* quantized_tile(const QuantizedFormat& format, bool is_plain, bool has_halves, int64_t rows,
                               int64_t vectors) {
  if (format.group > QuantizedShape::kBlock) return tile_function<QuantizedTile<false>>(rows, vectors);
  if (has_halves) return tile_function<GroupedTile<4, false, 32, SumsOf<4, false>>>(rows, vectors);
  if (has_bytes(format) && is_plain) return tile_function<GroupedTile<8, false, 32>>(rows, vectors);
  if (has_bytes(format)) return tile_function<GroupedTile<4, true, 32>>(rows, vectors);
  if (format.bits == 5 && format.zero == 0) return small_tile<SumsOf<5, true>>(format, is_plain, rows, vectors);
  if (format.bits == 5) return small_tile<SumsOf<5, false>>(format, is_plain, rows, vectors);
  return small_tile<SumsOf<6, false>>(format, is_plain, rows, vectors);  // 4 bits are added likewise
}
#else
static RunTile* quantized_tile([[maybe_unused]] const QuantizedFormat& format, [[maybe_unused]] bool is_plain,
                               bool has_halves, int64_t rows, int64_t vectors) {
#if defined(__AVX512VNNI__)
  const bool is_whole = format.group > QuantizedShape::kBlock, is_narrow = format.group == 16;
  if (!is_plain && format.table != nullptr) return tile_function<GroupedTile<4, true, 32>>(rows, vectors);
  if (!is_plain && format.bits == 5) return tile_function<GroupedTile<5, false, 32>>(rows, vectors);
  if (!is_plain && format.bits == 6) return tile_function<GroupedTile<6, false, 16>>(rows, vectors);
  if (!is_plain) return tile_function<GroupedTile<4, false, 16>>(rows, vectors);
  constexpr int kRows = kGroupedShape.rows;
  if (rows == kRows && has_halves) return &GroupedTile<4, false, 32>::run<kRows, 2>;
  if (rows == kRows && !is_whole && !is_narrow) return &GroupedTile<8, false, 32>::run<kRows, 2>;
#endif
  return has_halves ? tile_function<QuantizedTile<true>>(rows, vectors)
                    : tile_function<QuantizedTile<false>>(rows, vectors);
}
#endif

}  // namespace quire::QUIRE_ISA
