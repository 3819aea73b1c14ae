// Products on tiles (isa/x86/amx.h) of weights in groups of 16 or 32. The sums of a group leave the tiles to be scaled,
// while the next group is multiplied.
#pragma once

#include <type_traits>

#include "quantized/tiles/amx_streams.h"

namespace quire::QUIRE_ISA {

// Fewer rows are multiplied in as little time without tiles, and have the same bits. Integers of fewer than 8 bits are
// unpacked first, and smaller groups leave their tiles more often: as many values of x make up for both.
constexpr int64_t kFewestTileValues = 320;
// From this many rows on, bytes too are made signed first, as each row then takes less time.
constexpr int64_t kFewestSignedRows = 40;
constexpr int64_t kBytesAheadOfTiles = 8192;  // of a panel

QUIRE_INLINE bool has_groups_on_tiles(const QuantizedShape& shape, int64_t rows) {
  if (shape.is_whole) return false;
  if (streams_groups(shape, rows)) return true;
  return shape.format.bits == 8 ? rows >= fewest_rows_on_tiles(shape.format)
                                : rows * smaller(shape.format.group, QuantizedShape::kBlock) >= kFewestTileValues;
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

// R rows of x times a piece, with a template for each R, as sums are kept in registers. While the sums of a group are
// scaled, those of the next one leave their tiles, and the one after that is multiplied: each would wait for the one
// before.
template <int kGroup, bool kIsSigned, int R>
struct GroupedSums {
  static constexpr int64_t kPartBytes = kGroup / kUnitBytes * kUnitRowBytes, kVectors = kPanelColumns / W;
  static constexpr int64_t kTileBytes = kAmxRows * kAmxRowBytes;
  static_assert(kVectors == 2);
  using Bytes = std::conditional_t<kIsSigned, SignedBytes, int8_t>;

  template <int kTile>
  QUIRE_INLINE void multiply_vector(const char* units) {
    load_tile<6 + kTile % 2>(units + kTile % 2 * kAmxRowBytes, kUnitRowBytes);
    multiply_tiles<kTile, 4 + kTile / 2, 6 + kTile % 2>(static_cast<const Bytes*>(nullptr));
  }

  // Of a group, of as many `parts` of kGroup, that has tiles 0 and 1 (kTurn 0) or 2 and 3.
  template <int kTurn>
  QUIRE_INLINE void multiply(const char* x, int64_t x_stride, const char* units, int64_t parts) {
    clear_tile<2 * kTurn>();
    clear_tile<2 * kTurn + 1>();
    for (int64_t i = 0; i < parts; ++i, x += kGroup, units += kPartBytes) {
      load_tile<4 + kTurn>(x, x_stride);
      multiply_vector<2 * kTurn>(units);
      multiply_vector<2 * kTurn + 1>(units);
    }
  }

  template <int kTurn>
  QUIRE_INLINE void leave(char* products) {
    store_tile<2 * kTurn>(products + 2 * kTurn * kTileBytes, kAmxRowBytes);
    store_tile<2 * kTurn + 1>(products + (2 * kTurn + 1) * kTileBytes, kAmxRowBytes);
  }

  // What is scaled: a group's scales, and of the first row of x its scale and lack.
  struct Group {
    f32 scale[kVectors];
    const char *x_scale, *lack, *products;
  };

  // sum += products, scaled, of rows [kFirst, kEnd).
  template <int kFirst, int kEnd>
  QUIRE_INLINE void scale_rows(const Group& group, int64_t stride, f32 (&sum)[R][kVectors]) {
    QUIRE_UNROLL
    for (int r = kFirst; r < kEnd; ++r) {
      const f32 x_scale = set1(*reinterpret_cast<const float*>(group.x_scale + r * stride));
      const i32 lack = kIsSigned ? i32{} : set1_lane(group.lack + r * stride);
      QUIRE_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        const i32 total = load_lanes(group.products + v * kTileBytes + r * kAmxRowBytes) + lack;
        sum[r][v] = sum[r][v] + __builtin_convertvector(total, f32) * (x_scale * group.scale[v]);
      }
    }
  }

  static void run(const char* rows, const QuantizedRow& layout, const WeightPiece& given, GroupRequests requests,
                  float* sums) {
    const WeightPiece piece = given;
    const int64_t stride = layout.bytes, parts = layout.blocks, values = parts * kGroup, bytes = parts * kPartBytes;
    const char *x = rows + piece.first * values, *units = piece.units;
    alignas(64) char products[2 * kVectors * kTileBytes];
    f32 sum[R][kVectors];
    QUIRE_UNROLL
    for (int r = 0; r < R; ++r) {
      QUIRE_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        sum[r][v] = piece.first == 0 ? set1(0) : load(sums + r * kPanelColumns + v * W);
      }
    }
    multiply<0>(x, stride, units, parts);
    leave<0>(products);
    if (piece.groups > 1) multiply<1>(x + values, stride, units + bytes, parts);
    const auto step = [&]<int kTurn>(int64_t index) __attribute__((always_inline)) {
      if (requests.out != nullptr && index < R) __builtin_prefetch(requests.out + index * requests.out_stride, 1, 2);
      for (int64_t i = 0; i < requests.lines && requests.next < requests.end; ++i, requests.next += 64) {
        ask_for(Ask::kNext, requests.next);
      }
      const int64_t number = (piece.first + index) * int64_t(sizeof(float));
      const Group group = {{piece.scale(index, 0), piece.scale(index, W)},
                           rows + layout.scales_at + number,
                           rows + layout.lacks_at + number,
                           products + kTurn * kVectors * kTileBytes};
      scale_rows<0, R / 4>(group, stride, sum);
      if (index + 1 < piece.groups) leave<1 - kTurn>(products);
      scale_rows<R / 4, R / 2>(group, stride, sum);
      if (index + 2 < piece.groups) {
        multiply<kTurn>(x + (index + 2) * values, stride, units + (index + 2) * bytes, parts);
      }
      scale_rows<R / 2, R>(group, stride, sum);
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

using RunGroups = void(const char*, const QuantizedRow&, const WeightPiece&, GroupRequests, float*);
constexpr int kMostGroupRows = 14;  // whose sums fit the registers

template <int kGroup, bool kIsSigned, int R = 1>
static RunGroups* grouped_sums(int64_t rows) {
  if constexpr (R < kMostGroupRows) {
    if (rows > R) return grouped_sums<kGroup, kIsSigned, R + 1>(rows);
  }
  return &GroupedSums<kGroup, kIsSigned, R>::run;
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
    tiles.configure_groups(height, smaller(layout.group, QuantizedShape::kBlock));
    RunGroups* const run = !groups.is_signed    ? grouped_sums<32, false>(height)
                           : layout.group == 16 ? grouped_sums<16, true>(height)
                                                : grouped_sums<32, true>(height);
    run(rows + row * layout.bytes, layout, piece, requests, sums + row * kPanelColumns);
    requests.next += requests.lines * piece.groups * 64;
    row += height;
  }
}

}  // namespace quire::QUIRE_ISA
