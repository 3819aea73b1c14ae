// Tiles of a product on quantized weights with groups of 16 or 32 (quantized/matmul.h), for processors that multiply
// bytes in vectors of 512 bits: integers are unpacked in registers.
#pragma once

#include "quantized/tile.h"

#if defined(__AVX512VNNI__)
namespace quire::QUIRE_ISA {

// Groups of integers as they are stored, or of bytes. Of more than kRowsAtOnce rows, the first half is multiplied with
// a group before the second: the sums of all stay in registers beside the products of half of them.
template <int kBits, bool kHasTable, int kGroup>
struct GroupedTile {
  static constexpr int kMost = kPanelVectors, kMostRows = kGroupedRows, kRowsAtOnce = 6;
  static constexpr int kSteps = kGroup / int(kUnitBytes);
  static constexpr int64_t kBlockBytes = kBits * kUnitRowBytes, kGroupsPerBlock = QuantizedShape::kBlock / kGroup;
  static constexpr bool kHasUpper = kBits == 5 || kBits == 6;
  static constexpr int kLines = int(kBlockBytes / kGroupsPerBlock / 64);  // that a group takes

  // Quantized rows of x (QuantizedRow).
  struct Rows {
    const char* first;
    int64_t bytes, scales_at, lacks_at;
  };

  // A group of a panel, and what is asked for while it is multiplied.
  struct Group {
    const char *block, *ahead;
    int64_t index, half;  // in a row; of the block, if that has two
    Ask ask;
  };

  // The bytes of a step of a group. `upper` are the bits above the lower four of all its steps.
  QUIRE_INLINE i32 unpack(const char* block, int64_t half, int step, i32 upper, const ByteTable& table) {
    if constexpr (kBits == 8) {
      f32 bytes = as_float(load_lanes(block + (half * kSteps + step) * kUnitRowBytes));
      keep_in_register(bytes);  // else the compiler loads it for each row
      return as_int(bytes);
    }
    const int row = kGroup == 16 ? step : step % 8 / 2, is_upper = kGroup == 16 ? 0 : step % 2;
    const int shift = kGroup == 16 ? int(half) * 4 : is_upper * 4;
    i32 bytes = (load_lanes(block + row * kUnitRowBytes) >> shift) & 0x0f0f0f0f;
    if constexpr (kHasUpper) {
      const i32 rows[2] = {upper, {}};
      bytes = bytes | PanelReader::upper_bits<kBits>(rows, row + 4 * is_upper);
    }
    if constexpr (kHasTable) bytes = table.look_up(bytes);
    return bytes;
  }

  // sum += the products of N rows, from kFirst on, with a group, scaled.
  template <int kFirst, int N, int R, int G>
  QUIRE_INLINE void multiply(const Rows& rows, const Group& group, const ByteTable& table, const f32 (&scale)[G],
                             f32 (&sum)[R][G]) {
    const char* row = rows.first + kFirst * rows.bytes;
    const char* x = row + group.index * kGroup * int64_t(sizeof(XValue));
    const char* lacks = row + rows.lacks_at + group.index * int64_t(sizeof(int32_t));
    const char* x_scales = row + rows.scales_at + group.index * int64_t(sizeof(float));
    i32 acc[N][G], upper[G] = {};
    QUIRE_UNROLL
    for (int g = 0; g < G && kHasUpper; ++g) {
      upper[g] = load_lanes(group.block + (4 + group.half) * kUnitRowBytes + g * W * kUnitBytes);
    }
    QUIRE_UNROLL
    for (int r = 0; r < N; ++r) {
      const i32 lack = set1_lane(lacks + r * rows.bytes);
      QUIRE_UNROLL
      for (int g = 0; g < G; ++g) acc[r][g] = lack;
    }
    QUIRE_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      if (step % 2 == 0) {
        keep_order();
        constexpr int kAsked = 2 * kLines / kSteps;
        if constexpr (kFirst == 0) ask_for<kAsked>(group.ask, group.ahead + step / 2 * kAsked * 64);
      }
      const int at = kBits == 8 || kGroup == 16 ? step : step / 2 + step % 2 * 4;
      Quads w[G];
      QUIRE_UNROLL
      for (int g = 0; g < G; ++g) {
        w[g] = weight_quads(unpack(group.block + g * W * kUnitBytes, group.half, step, upper[g], table));
      }
      QUIRE_UNROLL
      for (int r = 0; r < N; ++r) {
        const Quads value = set1_quad(reinterpret_cast<const XValue*>(x + r * rows.bytes) + at * kUnitBytes);
        QUIRE_UNROLL
        for (int g = 0; g < G; ++g) acc[r][g] = dot4(acc[r][g], w[g], value);
      }
    }
    QUIRE_UNROLL
    for (int r = 0; r < N; ++r) {
      const f32 x_scale = set1(*reinterpret_cast<const float*>(x_scales + r * rows.bytes));
      QUIRE_UNROLL
      for (int g = 0; g < G; ++g) {
        f32& to = sum[kFirst + r][g];
        to = to + __builtin_convertvector(acc[r][g], f32) * (x_scale * scale[g]);
      }
    }
  }

  template <int R, int G>
  static void run(const char* rows, const QuantizedRow& layout, const WeightPiece& given, int64_t column, float* sums) {
    const WeightPiece piece = given;                                 // keep_order does not have it read anew
    constexpr int A = R > kRowsAtOnce ? (R + 1) / 2 : R, B = R - A;  // rows of the first and the second half
    const Rows x = {rows, layout.bytes, layout.scales_at, layout.lacks_at};
    const ByteTable table(kHasTable ? piece.table : kFloat4);
    f32 sum[R][G];
    QUIRE_UNROLL
    for (int r = 0; r < R; ++r) {
      QUIRE_UNROLL
      for (int g = 0; g < G; ++g) {
        sum[r][g] = piece.first == 0 ? set1(0) : load(sums + r * kPanelColumns + column + g * W);
      }
    }
    int64_t turn = piece.share;  // groups until the next one with which lines are asked for
    for (int64_t index = 0; index < piece.groups; ++index) {
      const char* block = piece.units + index / kGroupsPerBlock * kBlockBytes + column * kUnitBytes;
      const int64_t half = index % kGroupsPerBlock;
      const Ask ask = turn == 0 ? piece.ask : Ask::kNot;
      turn = turn == 0 ? piece.shares - 1 : turn - 1;
      const Group group = {block, block + piece.ahead + half * kLines * 64, piece.first + index, half, ask};
      f32 scale[G];
      QUIRE_UNROLL
      for (int g = 0; g < G; ++g) scale[g] = piece.scale(index, column + g * W);
      multiply<0, A>(x, group, table, scale, sum);
      if constexpr (B > 0) multiply<A, B>(x, group, table, scale, sum);
    }
    QUIRE_UNROLL
    for (int r = 0; r < R; ++r) {
      QUIRE_UNROLL
      for (int g = 0; g < G; ++g) store(sums + r * kPanelColumns + column + g * W, sum[r][g]);
    }
  }
};

}  // namespace quire::QUIRE_ISA
#endif
