// Tiles of a product on quantized weights: rows of quantized x times a piece of a panel (quantized/matmul.h).
#pragma once

#include "quantized/tiles/quads.h"
#include "quantized/tiles/unpack.h"

namespace quire::QUIRE_ISA {

// Tiles of a single panel: of bytes in one group, and of small groups, whose sums are beside the accumulators.
constexpr int kPanelVectors = kTileShape.most < kVectorsPerPanel ? kTileShape.most : int(kVectorsPerPanel);
#if defined(__AVXVNNI__)
constexpr TileShape kByteShape = {6, 2, kPanelVectors}, kGroupedShape = {6, 2, kPanelVectors};
#elif defined(QUIRE_SIMD_AVX2)
constexpr TileShape kByteShape = {4, 2, kPanelVectors}, kGroupedShape = {4, 2, kPanelVectors};
#elif defined(QUIRE_ARM)
#if defined(QUIRE_ARM_DOT)
constexpr TileShape kByteShape = kTileShape, kGroupedShape = kTileShape;
#else
constexpr TileShape kByteShape = {4, 4, kPanelVectors}, kGroupedShape = kByteShape;
#endif
#else
constexpr TileShape kByteShape = {kTileRows, kTileShape.vectors, kPanelVectors};
constexpr TileShape kGroupedShape = {kTileRows < 8 ? kTileRows : 8, kTileShape.vectors, kPanelVectors};
#endif

// Tiles of groups of several blocks, of more rows than kGroupedShape: six rows are multiplied at once, not four twice,
// which takes less time where sums are scaled seldom.
#if defined(__AVX512VNNI__)
constexpr TileShape kLongShape = {6, kGroupedShape.vectors, kPanelVectors};
#else
constexpr TileShape kLongShape = kGroupedShape;
#endif

// Whether small groups are unpacked in registers.
#if defined(__AVX512VNNI__) || defined(QUIRE_SIMD_AVX2) || defined(QUIRE_ARM)
constexpr bool kUnpacksInRegisters = true;
#else
constexpr bool kUnpacksInRegisters = false;
#endif

// Tiles of bytes in one group that have this many rows write their results themselves. Where there are fewer rows it
// saves nothing.
#if defined(__AVX512VNNI__)
constexpr int kWritingRows = 11;
#else
constexpr int kWritingRows = 1 << 30;
#endif

// From this many rows on, halves of bytes are unpacked once for all rows, where that is faster.
#if defined(QUIRE_SIMD_AVX2) && !defined(__AVXVNNI__)
constexpr int64_t kFewestUnpackedHalves = 12;
#else
constexpr int64_t kFewestUnpackedHalves = int64_t{1} << 62;
#endif

// Whether products of these integers are those of ByteSums.
QUIRE_INLINE bool has_bytes(const QuantizedFormat& format) { return format.bits == 8 || format.table != nullptr; }

// A row of x as the tiles read it: its values, then of each group its scale, then what the sum of its products lacks
// because stored integers have too much (lack_of), then the sum of its values times the scale.
struct QuantizedRow {
  int64_t k, group, groups, zero, bits;
  bool has_mins, has_bytes, is_whole;
  int64_t blocks;  // of a group, unless that is all of k
  int64_t scales_at, lacks_at, sums_at, bytes;

  QUIRE_MEMBER explicit QuantizedRow(const QuantizedShape& shape)
      : k(shape.k),
        group(shape.format.group),
        groups(shape.groups()),
        zero(shape.format.zero),
        bits(shape.format.bits),
        has_mins(shape.format.min != Number::kNone),
        has_bytes(quire::QUIRE_ISA::has_bytes(shape.format)),
        is_whole(shape.is_whole),
        blocks(is_whole ? 1 : ceil_div(group, QuantizedShape::kBlock)),
        scales_at(groups * group * value_bytes()),
        lacks_at(scales_at + groups * int64_t(sizeof(float))),
        sums_at(lacks_at + groups * int64_t(sizeof(int32_t))),
        // Odd numbers of cache lines keep rows out of each other's sets.
        bytes((ceil_div(sums_at + (has_mins ? groups : 0) * int64_t(sizeof(float)), 64) | 1) * 64) {}

  QUIRE_MEMBER int64_t value_bytes() const {
    return has_bytes ? sizeof(ByteSums::Value) : sizeof(SumsOf<4, false>::Value);
  }
};

QUIRE_INLINE const TileShape& shape_of(const QuantizedRow& layout, int64_t rows) {
  if (layout.is_whole) return kByteShape;
  return layout.blocks > 1 && rows > kGroupedShape.rows ? kLongShape : kGroupedShape;
}

// A piece of a panel: of `groups` groups the units [group / 4][32], scales and mins [groups][32].
struct WeightPiece {
  const char* units;
  StoredScales stored_scales;  // the panel's; if it has numbers, `scales` are not used
  const float *scales, *mins;
  const uint8_t* table;
  int64_t first, groups;          // the first group's index in a row
  Ask ask = Ask::kNot;            // whether a tile asks for weights while it multiplies,
  int64_t ahead = 0;              // how far behind its units these lie,
  int64_t share = 0, shares = 1;  // and which share of them: all passes ask for one, or those of the first rows for all
  // Asked for with each block or smaller group where that is in line (asks_in_line()); else as much as it takes.
  int64_t line_bytes = 0;
  // Where a large tile writes its results, plus bias, which may be null, in rows `out_stride` apart; null: to the sums.
  bf16* out = nullptr;
  int64_t out_stride = 0;
  const float* bias = nullptr;

  QUIRE_MEMBER f32 scale(int64_t index, int64_t column) const {
    if (stored_scales.numbers != nullptr) return stored_scales.of_group(first + index, column);
    return load(scales + index * kPanelColumns + column);
  }
};

// Where the sums of a task's rows and a panel go: the first row and column there.
struct PanelOut {
  const ProductOut& to;
  int64_t row, column;

  // Asks for the lines of some of the task's rows, which will be written to once they are multiplied by the last piece.
  QUIRE_MEMBER void expect(int64_t first, int64_t rows, bool is_last) const {
    if (is_last) expect_out(to, row + first, rows, column);
  }

  // Whether tiles write these rows themselves: so many that no tile has fewer than kWritingRows.
  QUIRE_MEMBER bool is_written_by_tiles(const QuantizedRow& layout, int64_t rows) const {
    const bool is_whole = layout.is_whole && column + kPanelColumns <= to.n;
    return rows >= int64_t{kWritingRows} * kByteShape.rows && is_whole && to.dtype == kBFloat16;
  }

  QUIRE_MEMBER int64_t stride() const {
    return to.stride * int64_t(to.dtype == kFloat32 ? sizeof(float) : sizeof(bf16));
  }
  QUIRE_MEMBER char* line(int64_t first) const {
    return static_cast<char*>(to.out) + (row + first) * stride() + column * (stride() / to.stride);
  }
};

// kHalves: the units of plain halves of bytes, as they lie in a panel (PanelReader::has_plain_halves).
template <bool kHalves>
struct QuantizedTile {
  static constexpr TileShape kShape = kByteShape;
  static constexpr int64_t kValueBytes = sizeof(ByteSums::Value), kHalf = QuantizedShape::kBlock / 2;
  static constexpr bool kIsWhole = kUnpacksInRegisters;  // there is one group: others have tiles of their own

  template <int R, int G>
  QUIRE_INLINE void multiply(i32 (&acc)[R][G], const char* units, const RowAddresses<R>& x, int64_t at, int shift) {
    add_quads<ByteSums>(acc, x, at, [&](int g) __attribute__((always_inline)) {
      const i32 bytes = load_lanes(units + g * W * kUnitBytes);
      return kHalves ? (bytes >> shift) & 0x0f0f0f0f : bytes;
    });
  }

  // sums += the products of R quantized rows and G vectors of columns, from `column` on; sums' rows are 32 apart. Those
  // of the first piece are what they begin with.
  template <int R, int G>
  static void run(const char* rows, const QuantizedRow& layout, const WeightPiece& piece, int64_t column, float* sums) {
    const int64_t row_bytes = layout.bytes, scales_at = layout.scales_at, lacks_at = layout.lacks_at;
    const int64_t unit_rows = layout.group / kUnitBytes / (kHalves ? 2 : 1);
    const int64_t step = kUnitRowBytes / piece.shares;
    const char* units = piece.units + column * kUnitBytes;
    const char* ahead = units + piece.ahead + piece.groups * unit_rows * step * piece.share;
    const Ask ask = piece.ask;
    f32 sum[R][G];
    QUIRE_UNROLL
    for (int r = 0; r < R; ++r) {
      QUIRE_UNROLL
      for (int g = 0; g < G; ++g) {
        sum[r][g] = kIsWhole || piece.first == 0 ? set1(0) : load(sums + r * kPanelColumns + column + g * W);
      }
    }
    const int64_t groups = kIsWhole ? 1 : piece.groups;
    for (int64_t index = 0; index < groups; ++index) {
      const int64_t group = piece.first + index;
      RowAddresses<R> x(rows + group * layout.group * kValueBytes, row_bytes);
      i32 acc[R][G];
      QUIRE_UNROLL
      for (int r = 0; r < R; ++r) {
        const i32 lack = set1_lane(rows + r * row_bytes + lacks_at + group * int64_t(sizeof(int32_t)));
        QUIRE_UNROLL
        for (int g = 0; g < G; ++g) acc[r][g] = lack;
      }
      for (int64_t unit = 0; unit < unit_rows; ++unit, units += kUnitRowBytes, x += kUnitBytes * kValueBytes) {
        ask_for(ask, ahead, (G * W * kUnitBytes + 63) / 64);
        ahead += step;
        multiply<R, G>(acc, units, x, 0, 0);
        if constexpr (kHalves) {
          multiply<R, G>(acc, units, x, kHalf, 4);
          if (unit % (kHalf / kUnitBytes) == kHalf / kUnitBytes - 1) x += kHalf * kValueBytes;  // which it has done
        }
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
    if (R >= kWritingRows && piece.out != nullptr) {
      f32 bias[G];  // sums are not -0, so that adding 0 changes none
      QUIRE_UNROLL
      for (int g = 0; g < G; ++g) bias[g] = piece.bias == nullptr ? set1(0) : load(piece.bias + column + g * W);
      QUIRE_UNROLL
      for (int r = 0; r < R; ++r) {
        bf16* to = piece.out + r * piece.out_stride + column;
        QUIRE_UNROLL
        for (int g = 0; g < G; g += 2) store_two(to + g * W, sum[r][g] + bias[g], sum[r][g + 1] + bias[g + 1]);
      }
      return;
    }
    QUIRE_UNROLL
    for (int r = 0; r < R; ++r) {
      QUIRE_UNROLL
      for (int g = 0; g < G; ++g) store(sums + r * kPanelColumns + column + g * W, sum[r][g]);
    }
  }
};

}  // namespace quire::QUIRE_ISA
