// Tiles of a product on quantized weights: rows of quantized x times a piece of a panel (quantized/matmul.h).
#pragma once

#include "matmul/tiles.h"
#include "quantized/quads.h"
#include "quantized/unpack.h"

namespace quire::QUIRE_ISA {

// The most rows of a tile whose weights have small groups: its sums fill registers beside the accumulators.
constexpr int kGroupedRows = kTileRows < 8 ? kTileRows : 8;

// A row of x as the tiles read it: its values, then of each group its scale, then what the sum of its products lacks
// because stored integers have too much (QuantizedFormat::zero), then the sum of its values times the scale.
struct QuantizedRow {
  int64_t k, group, groups, zero;
  bool has_mins;
  int64_t scales_at, lacks_at, sums_at, bytes;

  QUIRE_MEMBER explicit QuantizedRow(const QuantizedShape& shape)
      : k(shape.k),
        group(shape.format.group),
        groups(shape.groups()),
        zero(shape.format.zero),
        has_mins(shape.format.min != Number::kNone),
        scales_at(groups * group * int64_t(sizeof(XValue))),
        lacks_at(scales_at + groups * int64_t(sizeof(float))),
        sums_at(lacks_at + groups * int64_t(sizeof(int32_t))),
        // Odd numbers of cache lines keep rows out of each other's sets.
        bytes((ceil_div(sums_at + (has_mins ? groups : 0) * int64_t(sizeof(float)), 64) | 1) * 64) {}
};

// A piece of a panel: of `groups` groups the units [group / 4][32], scales and mins [groups][32].
struct WeightPiece {
  const char* units;
  StoredScales stored_scales;  // the panel's; if it has numbers, `scales` are not used
  const float *scales, *mins;
  const uint8_t* table;
  int64_t first, groups;  // the first group's index in a row
  Ask ask;                // whether a tile asks for weights while it multiplies,
  int64_t ahead;          // how far behind its units these lie,
  int64_t share, shares;  // and which share of them: all blocks of rows ask for one, or the first for all

  QUIRE_MEMBER f32 scale(int64_t index, int64_t column) const {
    if (stored_scales.numbers != nullptr) return stored_scales.of_group(first + index, column);
    return load(scales + index * kPanelColumns + column);
  }
};

// kHalves: the units of plain halves of bytes, as they lie in a panel (PanelReader::has_plain_halves).
template <bool kHalves>
struct QuantizedTile {
  static constexpr int kMost = kPanelVectors, kMostRows = kTileRows;

  template <int R, int G>
  QUIRE_INLINE void multiply(i32 (&acc)[R][G], const char* units, const XValue* x, int64_t x_stride, int shift) {
    Quads w[G];
    QUIRE_UNROLL
    for (int g = 0; g < G; ++g) {
      const i32 bytes = load_lanes(units + g * W * kUnitBytes);
      w[g] = weight_quads(kHalves ? (bytes >> shift) & 0x0f0f0f0f : bytes);
    }
    QUIRE_UNROLL
    for (int r = 0; r < R; ++r) {
      const Quads value = set1_quad(x + r * x_stride);
      QUIRE_UNROLL
      for (int g = 0; g < G; ++g) acc[r][g] = dot4(acc[r][g], w[g], value);
    }
  }

  // sums += the products of R quantized rows and G vectors of columns, from `column` on; sums' rows are 32 apart. Those
  // of the first piece are what they begin with.
  template <int R, int G>
  static void run(const char* rows, const QuantizedRow& layout, const WeightPiece& piece, int64_t column, float* sums) {
    const int64_t row_bytes = layout.bytes, scales_at = layout.scales_at, lacks_at = layout.lacks_at;
    const int64_t unit_rows = layout.group / kUnitBytes / (kHalves ? 2 : 1);
    const int64_t x_stride = row_bytes / int64_t(sizeof(XValue));
    const int64_t step = kUnitRowBytes / piece.shares;
    const char* units = piece.units + column * kUnitBytes;
    const char* ahead = units + piece.ahead + piece.groups * unit_rows * step * piece.share;
    const Ask ask = piece.ask;
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
      for (int64_t unit = 0; unit < unit_rows; ++unit, units += kUnitRowBytes, x += kUnitBytes) {
        ask_for<(G * W * kUnitBytes + 63) / 64>(ask, ahead);
        ahead += step;
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

}  // namespace quire::QUIRE_ISA
