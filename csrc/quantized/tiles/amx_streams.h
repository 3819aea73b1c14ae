// Products on tiles (isa/x86/amx.h) of some rows and weights of fewer than 8 bits in groups of 16 or 32, which are
// unpacked, multiplied and scaled at the same time, each a step behind the one before.
#pragma once

#include "isa/x86/amx.h"
#include "quantized/tiles/mins.h"
#include "quantized/tiles/tile.h"
#include "quantized/tiles/unpack.h"

namespace quire::QUIRE_ISA {

// Fewer rows are multiplied in less time without tiles (few_rows.h), and have the same bits: of bytes, of integers of
// fewer bits, and of these where groups leave their tiles more often, mins are added apart, or scales are not read as
// they are stored.
constexpr int64_t kFewestByteRows = 13, kFewestRows = 10, kFewestSmallRows = 11;

QUIRE_INLINE int64_t fewest_rows_on_tiles(const QuantizedFormat& format) {
  if (format.bits == 8) return kFewestByteRows;
  const bool has_pieces = format.scale == Number::kFloat || format.scale == Number::kExponent;
  return has_pieces || format.group == 16 || format.min != Number::kNone ? kFewestSmallRows : kFewestRows;
}

constexpr int64_t kMostStreamedRows = 14;  // whose sums fit the registers
constexpr int64_t kBytesAheadOfBlocks = 4096;

QUIRE_INLINE bool streams_groups(const QuantizedShape& shape, int64_t rows) {
  const QuantizedFormat& format = shape.format;
  if (format.bits == 8 || shape.is_whole || shape.has_long_groups() || rows > kMostStreamedRows) return false;
  return shape.k > 0 && rows >= fewest_rows_on_tiles(format);
}

// 1.5 * 2^23: integers that are added to its bits are added to the number.
constexpr float kShifter = 12582912.0f;
alignas(64) constexpr float kShifters[W] = {kShifter, kShifter, kShifter, kShifter, kShifter, kShifter,
                                            kShifter, kShifter, kShifter, kShifter, kShifter, kShifter,
                                            kShifter, kShifter, kShifter, kShifter};

// Blocks of a panel that are unpacked while others are multiplied, into four places that take turns.
struct StreamedBlocks {
  static constexpr int64_t kPlaces = 4, kBytes = QuantizedShape::kBlock * kPanelColumns;

  const PanelReader* reader;
  const char* panel;
  int64_t stored_bytes, line_bytes;  // of a group, and what is asked for with each
  char* places;

  // What the group `index` of `group` values is multiplied by.
  QUIRE_MEMBER const char* units(int64_t index, int64_t group) const {
    return places + index * group * kPanelColumns % (kPlaces * kBytes);
  }
  // The lines that are asked for with the group, and what is unpacked soon, which goes to the nearest cache.
  QUIRE_MEMBER const char* line(int64_t index) const {
    const char* first = panel + reader->integers_at + kBytesAheadOfBlocks + index * line_bytes;
    return first - reinterpret_cast<uintptr_t>(first) % 64;
  }
  QUIRE_MEMBER const char* near_line(int64_t index) const {
    return panel + reader->integers_at + (index + 6) * stored_bytes;
  }

  // Unpacks a block, less the format's zero.
  QUIRE_MEMBER void unpack(int64_t block) const {
    const __m512i zeros = _mm512_set1_epi8(char(reader->shape.format.zero));
    const auto less = [&](i32 v) __attribute__((always_inline)) { return (i32)_mm512_sub_epi8((__m512i)v, zeros); };
    reader->read_units<false>(panel, block, block + 1, 0, less, places + block % kPlaces * kBytes);
  }
};

// R rows of x times groups of a panel, with a template for each R, as sums are kept in registers. While the sums of a
// group are scaled, those of the next one leave their tiles, the one after that is multiplied, and a later one is
// unpacked: each would wait for the one before. Sums begin with kShifter's bits: while tiles are in use, one port
// neither multiplies nor converts, but adds.
template <int kGroup, int R>
struct StreamedSums {
  static constexpr int64_t kVectors = kPanelColumns / W, kGroupsPerBlock = QuantizedShape::kBlock / kGroup;
  static constexpr int64_t kTileBytes = kAmxRows * kAmxRowBytes;
  static constexpr int kLines = kGroup / 4;  // that a group has at least
  static_assert(kVectors == 2);

  // Multiplies by a vector of columns of a group, whose rows of x are in tile 4 or 5.
  template <int kTile>
  QUIRE_INLINE void multiply_vector(const char* units) {
    load_tile<kTile>(kShifters, 0);
    load_tile<6 + kTile % 2>(units + kTile % 2 * kAmxRowBytes, kUnitRowBytes);
    multiply_tiles<kTile, 4 + kTile / 2, 6 + kTile % 2>(static_cast<const SignedBytes*>(nullptr));
  }

  template <int kTile>
  QUIRE_INLINE void leave(char* products) {
    store_tile<kTile>(products + kTile * kTileBytes, kAmxRowBytes);
  }

  // What is scaled: a group's scales, the first row's scale, and the lines that are asked for meanwhile.
  struct Group {
    f32 scale[kVectors];
    const char *x_scale, *products, *line, *near_line;
  };

  // sum += products, scaled, of rows [kFirst, kEnd). Requests lie between rows: some at once would keep loads waiting.
  template <int kFirst, int kEnd>
  QUIRE_INLINE void scale_rows(const Group& group, int64_t stride, f32 (&sum)[R][kVectors]) {
    QUIRE_UNROLL
    for (int r = kFirst; r < kEnd; ++r) {
      keep_order();
      if (r < kLines) ask_for(Ask::kNext, group.line + r * 64);
      if (r < kLines) ask_for(Ask::kNearest, group.near_line + r * 64);
      const f32 x_scale = set1(*reinterpret_cast<const float*>(group.x_scale + r * stride));
      QUIRE_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        const f32 total = as_float(load_lanes(group.products + v * kTileBytes + r * kAmxRowBytes));
        sum[r][v] = sum[r][v] + (total - set1(kShifter)) * (x_scale * group.scale[v]);
      }
    }
  }

  // sums [R][32] += the products with a piece, whose units are unpacked from `blocks`. `out`, unless it is null, is
  // where rows will be written to.
  static void run(const char* rows, const QuantizedRow& layout, const WeightPiece& given, const StreamedBlocks& blocks,
                  const char* out, int64_t out_stride, float* sums) {
    const WeightPiece piece = given;
    const char* x = rows + piece.first * kGroup;
    const int64_t stride = layout.bytes;
    alignas(64) char products[2 * kVectors * kTileBytes];
    f32 sum[R][kVectors];
    QUIRE_UNROLL
    for (int r = 0; r < R; ++r) {
      QUIRE_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        sum[r][v] = piece.first == 0 ? set1(0) : load(sums + r * kPanelColumns + v * W);
      }
    }
    const auto unpack = [&](int64_t index) __attribute__((always_inline)) {
      const int64_t group = piece.first + index;
      if (index < piece.groups && group % kGroupsPerBlock == 0) blocks.unpack(group / kGroupsPerBlock);
    };
    const auto units = [&](int64_t index)
                           __attribute__((always_inline)) { return blocks.units(piece.first + index, kGroup); };
    for (int64_t index = 0; index < 4; ++index) unpack(index);
    load_tile<4>(x, stride);
    multiply_vector<0>(units(0));
    multiply_vector<1>(units(0));
    leave<0>(products);
    leave<1>(products);
    if (piece.groups > 1) {
      load_tile<5>(x + kGroup, stride);
      multiply_vector<2>(units(1));
      multiply_vector<3>(units(1));
    }
    // Groups take turns with the tiles 0 and 1, and 2 and 3.
    const auto step = [&]<int kTurn>(int64_t index) __attribute__((always_inline)) {
      constexpr int kThis = 2 * kTurn, kOther = 2 - kThis;
      const int64_t group_index = piece.first + index;
      if (out != nullptr && index < R) __builtin_prefetch(out + index * out_stride, 1, 2);
      const Group group = {{piece.scale(index, 0), piece.scale(index, W)},
                           rows + layout.scales_at + group_index * int64_t(sizeof(float)),
                           products + kThis * kTileBytes,
                           blocks.line(group_index),
                           blocks.near_line(group_index)};
      const bool has_next = index + 1 < piece.groups, has_second = index + 2 < piece.groups;
      if (has_next) leave<kOther>(products);
      if (has_second) {
        load_tile<4 + kTurn>(x + (index + 2) * kGroup, stride);
        multiply_vector<kThis>(units(index + 2));
      }
      scale_rows<0, R / 2>(group, stride, sum);
      if (has_next) leave<kOther + 1>(products);
      if (has_second) multiply_vector<kThis + 1>(units(index + 2));
      unpack(index + 4);
      scale_rows<R / 2, R>(group, stride, sum);
      for (int64_t at = kLines * 64; at + 63 < blocks.line_bytes; at += 64) ask_for(Ask::kNext, group.line + at);
    };
    for (int64_t index = 0; index < piece.groups; index += 2) {
      step.template operator()<0>(index);
      if (index + 1 < piece.groups) step.template operator()<1>(index + 1);
    }
    QUIRE_UNROLL
    for (int r = 0; r < R; ++r) {
      QUIRE_UNROLL
      for (int v = 0; v < kVectors; ++v) store(sums + r * kPanelColumns + v * W, sum[r][v]);
    }
  }
};
static_assert(kFewestRows >= 8);  // requests lie between as many rows

using RunStream = void(const char*, const QuantizedRow&, const WeightPiece&, const StreamedBlocks&, const char*,
                       int64_t, float*);

template <int kGroup, int R = kFewestRows>
static RunStream* streamed_sums(int64_t rows) {
  if constexpr (R < kMostStreamedRows) {
    if (rows > R) return streamed_sums<kGroup, R + 1>(rows);
  }
  return &StreamedSums<kGroup, R>::run;
}

// Subtracts the sums of x times a panel's mins from `sums`. Meanwhile the fields' share of lines is asked for.
static void subtract_mins(const char* rows, int64_t num_rows, const PanelReader& reader, const QuantizedRow& layout,
                          const char* panel, float* sums) {
  alignas(64) float scales[kPieceGroups * kPanelColumns], mins[kPieceGroups * kPanelColumns];
  alignas(64) float minuses[kMostStreamedRows * kPanelColumns] = {};
  const bool has_stored = reader.stored_scales(panel, true).numbers != nullptr;
  const int64_t field_bytes = reader.integers_at / layout.groups, height = smaller(num_rows, kMostMinRowsAtOnce);
  const char* line = panel + reader.shape.panel_bytes() + kBytesAheadOfBlocks;
  for (int64_t first = 0; first < layout.groups; first += kPieceGroups) {
    const int64_t end = smaller(first + kPieceGroups, layout.groups);
    if (has_stored) {
      reader.read_mins(panel, first, end, scales, mins);
    } else {
      reader.read_scales(panel, first, end, scales, mins);
    }
    const WeightPiece piece = {nullptr, {}, scales, mins, nullptr, first, end - first};
    const MinRequests requests = {line, field_bytes};
    add_mins_function<kMostMinRowsAtOnce, MinRequests>(height)(rows, layout, piece, minuses, requests);
    add_mins(rows + height * layout.bytes, num_rows - height, layout, piece, minuses + height * kPanelColumns);
  }
  for (int64_t i = 0; i < num_rows * kPanelColumns; i += W) store(sums + i, load(sums + i) - load(minuses + i));
}

// The sums of a task's rows and a panel.
static void stream_panel(Tiles& tiles, const char* rows, int64_t num_rows, const PanelReader& reader,
                         const QuantizedRow& layout, const char* panel, const PanelOut& out, float* sums) {
  alignas(64) char places[StreamedBlocks::kPlaces * StreamedBlocks::kBytes];
  alignas(64) float scales[kPieceGroups * kPanelColumns], mins[kPieceGroups * kPanelColumns];
  const StoredScales stored_scales = reader.stored_scales(panel, false);
  const int64_t piece_groups = stored_scales.numbers != nullptr ? layout.groups : kPieceGroups;
  const int64_t stored_bytes = reader.shape.block_bytes() * layout.group / QuantizedShape::kBlock;
  const int64_t line_bytes = layout.has_mins ? stored_bytes : reader.shape.panel_bytes() / layout.groups;
  const StreamedBlocks blocks = {&reader, panel, stored_bytes, line_bytes, places};
  RunStream* const run = layout.group == 32 ? streamed_sums<32>(num_rows) : streamed_sums<16>(num_rows);
  tiles.configure_groups(num_rows, layout.group);
  for (int64_t first = 0; first < layout.groups; first += piece_groups) {
    const int64_t end = smaller(first + piece_groups, layout.groups);
    if (stored_scales.numbers == nullptr) reader.read_scales(panel, first, end, scales, mins);
    const WeightPiece piece = {nullptr, stored_scales, scales, mins, nullptr, first, end - first};
    const char* to = end == layout.groups ? out.line(0) : nullptr;
    run(rows, layout, piece, blocks, to, out.stride(), sums);
  }
  if (layout.has_mins) subtract_mins(rows, num_rows, reader, layout, panel, sums);
}

}  // namespace quire::QUIRE_ISA
