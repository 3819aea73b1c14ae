// Products on tiles (isa/x86/amx.h) of weights in groups of 16 or 32. The sums of a group leave the tiles to be scaled,
// while the next group is multiplied.
#pragma once

#include <type_traits>

#include "isa/x86/amx.h"
#include "quantized/tiles/tile.h"
#include "quantized/tiles/unpack.h"

namespace quire::QUIRE_ISA {

// Fewer rows are multiplied in as little time without tiles, and have the same bits. Integers of fewer than 8 bits are
// unpacked first, and smaller groups leave their tiles more often: as many values of x make up for both.
constexpr int64_t kFewestByteRows = 3, kFewestTileValues = 32;
// From this many rows on, bytes too are made signed first, as each row then takes less time.
constexpr int64_t kFewestSignedRows = 40;
constexpr int64_t kBytesAheadOfTiles = 8192;  // of a panel

QUIRE_INLINE bool has_groups_on_tiles(const QuantizedShape& shape, int64_t rows) {
  if (shape.format.group > QuantizedShape::kBlock) return false;
  return shape.format.bits == 8 ? rows >= kFewestByteRows : rows * shape.format.group >= kFewestTileValues;
}

// What tiles multiply by of blocks [begin, end) of a panel, for `rows` rows of x: bytes as they are stored, or integers
// less the format's zero in signed bytes, which are written to `to`. And what is read soon.
struct GroupPiece {
  bool is_signed;
  const char *units, *next;
  int64_t bytes;

  QUIRE_MEMBER GroupPiece(const PanelReader& reader, const char* panel, int64_t begin, int64_t end, int64_t rows,
                          char* to) {
    const QuantizedFormat& format = reader.shape.format;
    const char* stored = panel + reader.integers_at + begin * reader.shape.block_bytes();
    bytes = (end - begin) * reader.shape.block_bytes();
    is_signed = format.bits < 8 || (format.zero == 128 && rows >= kFewestSignedRows);
    units = is_signed ? to : stored;
    next = stored + (is_signed ? bytes : smaller(bytes, kBytesAheadOfTiles));
    if (!is_signed) return;
    const __m512i zeros = _mm512_set1_epi8(char(format.zero));
    const auto less = [&](i32 v) __attribute__((always_inline)) { return (i32)_mm512_sub_epi8((__m512i)v, zeros); };
    reader.read_units(panel, begin, end, kPanelAhead, less, to);
  }
};

// What is asked for with each group that is multiplied: lines that are read soon, and a line that sums will go to.
struct GroupRequests {
  const char *next, *end;
  int64_t lines;
  const char* out;  // null: no sums are complete yet
  int64_t out_stride;
};

// 1.5 * 2^23: integers that are added to its bits are added to the number.
constexpr float kShifter = 12582912.0f;
alignas(64) constexpr float kShifters[W] = {kShifter, kShifter, kShifter, kShifter, kShifter, kShifter,
                                            kShifter, kShifter, kShifter, kShifter, kShifter, kShifter,
                                            kShifter, kShifter, kShifter, kShifter};

// Blocks of a panel that are unpacked while others are multiplied, into four places that take turns.
struct UnpackedBlocks {
  static constexpr int64_t kPlaces = 4, kBytes = QuantizedShape::kBlock * kPanelColumns;

  const PanelReader* reader;  // null: groups lie behind each other, ready to be multiplied by
  const char* panel;
  int64_t line_bytes;  // of a panel for each block
  char* places;

  // What a group of `group` values, which is `index` in its row, is multiplied by.
  QUIRE_MEMBER const char* units(int64_t index, int64_t group) const {
    return places + index * group * kPanelColumns % (kPlaces * kBytes);
  }

  QUIRE_MEMBER void unpack(int64_t block) const {
    const __m512i zeros = _mm512_set1_epi8(char(reader->shape.format.zero));
    const auto less = [&](i32 v) __attribute__((always_inline)) { return (i32)_mm512_sub_epi8((__m512i)v, zeros); };
    reader->read_units<false>(panel, block, block + 1, 0, less, places + block % kPlaces * kBytes);
  }
};

// R rows of x times a piece, with a template for each R, as sums are kept in registers. While the sums of a group are
// scaled, those of the next one leave their tiles, the one after that is multiplied, and one more is unpacked: each
// would wait for the one before.
template <int kGroup, bool kIsSigned, bool kUnpacks, int R>
struct GroupedSums {
  static constexpr int64_t kGroupBytes = kGroup / kUnitBytes * kUnitRowBytes, kVectors = kPanelColumns / W;
  static constexpr int64_t kTileBytes = kAmxRows * kAmxRowBytes, kGroupsPerBlock = QuantizedShape::kBlock / kGroup;
  static constexpr int kLines = kGroup == 32 ? 8 : 4;  // at least
  static_assert(kVectors == 2);
  using Bytes = std::conditional_t<kIsSigned, SignedBytes, int8_t>;

  template <int kTile>
  QUIRE_INLINE void multiply_vector(const char* units) {
    load_tile<kTile>(kShifters, 0);
    load_tile<6 + kTile % 2>(units + kTile % 2 * kAmxRowBytes, kUnitRowBytes);
    multiply_tiles<kTile, 4 + kTile / 2, 6 + kTile % 2>(static_cast<const Bytes*>(nullptr));
  }

  // What is scaled: a group's scales, and of the first row of x its scale and lack.
  struct Group {
    f32 scale[kVectors];
    const char *x_scale, *lack, *products;
  };

  // sum += products, scaled, of rows [kFirst, kEnd).
  template <int kFirst, int kEnd>
  QUIRE_INLINE void scale_rows(const Group& group, int64_t stride, const char* lines, f32 (&sum)[R][kVectors]) {
    QUIRE_UNROLL
    for (int r = kFirst; r < kEnd; ++r) {
      if constexpr (kUnpacks) {
        keep_order();
        if (r < kLines) __builtin_prefetch(lines + r * 64, 0, 2);
      }
      const f32 x_scale = set1(*reinterpret_cast<const float*>(group.x_scale + r * stride));
      const i32 lack = kIsSigned ? i32{} : set1_lane(group.lack + r * stride);
      QUIRE_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        const f32 total = as_float(load_lanes(group.products + v * kTileBytes + r * kAmxRowBytes) + lack);
        sum[r][v] = sum[r][v] + (total - set1(kShifter)) * (x_scale * group.scale[v]);
      }
    }
  }

  static void run(const char* rows, const QuantizedRow& layout, const WeightPiece& given, const UnpackedBlocks& blocks,
                  GroupRequests requests, float* sums) {
    const WeightPiece piece = given;
    const char *x = rows + piece.first * kGroup, *units = piece.units;
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
      if constexpr (kUnpacks) {
        const int64_t group = piece.first + index;
        if (index < piece.groups && group % kGroupsPerBlock == 0) blocks.unpack(group / kGroupsPerBlock);
      }
    };
    const auto units_of = [&](int64_t index) __attribute__((always_inline)) {
      return kUnpacks ? blocks.units(piece.first + index, kGroup) : units + index * kGroupBytes;
    };
    const auto multiply = [&]<int kTurn>(int64_t index) __attribute__((always_inline)) {
      load_tile<4 + kTurn>(x + index * kGroup, stride);
      multiply_vector<2 * kTurn>(units_of(index));
      multiply_vector<2 * kTurn + 1>(units_of(index));
    };
    for (int64_t index = 0; kUnpacks && index < 4; ++index) unpack(index);
    multiply.template operator()<0>(0);
    store_tile<0>(products, kAmxRowBytes);
    store_tile<1>(products + kTileBytes, kAmxRowBytes);
    if (piece.groups > 1) multiply.template operator()<1>(1);
    const auto step = [&]<int kTurn>(int64_t index) __attribute__((always_inline)) {
      if (requests.out != nullptr && index < R) __builtin_prefetch(requests.out + index * requests.out_stride, 1, 2);
      for (int64_t i = 0; i < requests.lines && requests.next < requests.end; ++i, requests.next += 64) {
        ask_for<1>(Ask::kNext, requests.next);
      }
      const char* lines = nullptr;
      const char* end = nullptr;
      if constexpr (kUnpacks) {
        const int64_t group_bytes = blocks.line_bytes / kGroupsPerBlock;
        const char* from = blocks.panel + blocks.reader->integers_at + 4096 + (piece.first + index) * group_bytes;
        lines = from - (int64_t)((uint64_t)from & 63), end = from + group_bytes - 63;
      }
      constexpr int kOther = 2 * (1 - kTurn), kThis = 2 * kTurn;
      const int64_t number = (piece.first + index) * int64_t(sizeof(float));
      const Group group = {{piece.scale(index, 0), piece.scale(index, W)},
                           rows + layout.scales_at + number,
                           rows + layout.lacks_at + number,
                           products + kThis * kTileBytes};
      if (index + 1 < piece.groups) store_tile<kOther>(products + kOther * kTileBytes, kAmxRowBytes);
      const char* next = units_of(index + 2);
      if (index + 2 < piece.groups) {
        load_tile<4 + kTurn>(x + (index + 2) * kGroup, stride);
        multiply_vector<kThis>(next);
      }
      scale_rows<0, R / 2>(group, stride, lines, sum);
      if (index + 1 < piece.groups) store_tile<kOther + 1>(products + (kOther + 1) * kTileBytes, kAmxRowBytes);
      if (index + 2 < piece.groups) multiply_vector<kThis + 1>(next);
      unpack(index + 4);
      scale_rows<R / 2, R>(group, stride, lines, sum);
      if constexpr (kUnpacks) {
        for (const char* at = lines + smaller(R, kLines) * 64; at < end; at += 64) __builtin_prefetch(at, 0, 2);
      }
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

using RunGroups = void(const char*, const QuantizedRow&, const WeightPiece&, const UnpackedBlocks&, GroupRequests,
                       float*);
constexpr int kMostGroupRows = 14;  // whose sums fit the registers

template <int kGroup, bool kIsSigned, bool kUnpacks, int R = 1>
static RunGroups* grouped_sums(int64_t rows) {
  if constexpr (R < kMostGroupRows) {
    if (rows > R) return grouped_sums<kGroup, kIsSigned, kUnpacks, R + 1>(rows);
  }
  return &GroupedSums<kGroup, kIsSigned, kUnpacks, R>::run;
}

// Adds the products of a task's rows and a piece of a panel to their sums.
static void multiply_groups(Tiles& tiles, const char* rows, int64_t num_rows, const QuantizedRow& layout,
                            const WeightPiece& piece, const GroupPiece& groups, const PanelOut& out, float* sums) {
  const bool is_last = piece.first + piece.groups == layout.groups;
  int64_t blocks = ceil_div(num_rows, kMostGroupRows);
  GroupRequests requests = {groups.next, groups.next + groups.bytes, ceil_div(groups.bytes, 64 * piece.groups * blocks),
                            nullptr, out.stride()};
  for (int64_t row = 0; row < num_rows; --blocks) {
    const int64_t height = ceil_div(num_rows - row, blocks);
    if (is_last) requests.out = out.line(row);
    tiles.configure_groups(height, layout.group);
    RunGroups* const run = !groups.is_signed    ? grouped_sums<32, false, false>(height)
                           : layout.group == 32 ? grouped_sums<32, true, false>(height)
                                                : grouped_sums<16, true, false>(height);
    run(rows + row * layout.bytes, layout, piece, {}, requests, sums + row * kPanelColumns);
    requests.next += requests.lines * piece.groups * 64;
    row += height;
  }
}

// Whether groups are unpacked while others are multiplied: all rows are multiplied at once.
QUIRE_INLINE bool streams_groups(const QuantizedShape& shape, int64_t rows) {
  return shape.format.bits < 8 && rows <= kMostGroupRows && has_groups_on_tiles(shape, rows);
}

// The sums of a task's rows and a panel, without mins.
static void stream_groups(Tiles& tiles, const char* rows, int64_t num_rows, const PanelReader& reader,
                          const QuantizedRow& layout, const char* panel, const PanelOut& out, float* sums) {
  alignas(64) char places[UnpackedBlocks::kPlaces * UnpackedBlocks::kBytes];
  alignas(64) float scales[kPieceGroups * kPanelColumns], mins[kPieceGroups * kPanelColumns];
  const StoredScales stored_scales = reader.stored_scales(panel);
  const int64_t piece_groups = stored_scales.numbers != nullptr ? layout.groups : kPieceGroups;
  const UnpackedBlocks blocks = {&reader, panel, reader.shape.panel_bytes() / reader.shape.blocks(), places};
  RunGroups* const run = layout.group == 32 ? grouped_sums<32, true, true>(num_rows)
                                            : grouped_sums<16, true, true>(num_rows);
  tiles.configure_groups(num_rows, layout.group);
  for (int64_t first = 0; first < layout.groups; first += piece_groups) {
    const int64_t end = smaller(first + piece_groups, layout.groups);
    if (stored_scales.numbers == nullptr) reader.read_scales(panel, first, end, scales, mins);
    const WeightPiece piece = {nullptr, stored_scales, scales, mins, nullptr, first, end - first, Ask::kNot, 0, 0, 1};
    const char* to = end == layout.groups ? out.line(0) : nullptr;
    run(rows, layout, piece, blocks, {nullptr, nullptr, 0, to, out.stride()}, sums);
  }
}

}  // namespace quire::QUIRE_ISA
