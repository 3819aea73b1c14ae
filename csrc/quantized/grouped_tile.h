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
  static constexpr int kMost = kPanelVectors, kMostRows = kGroupedRows, kRowsAtOnce = 4;
  static constexpr int kSteps = kGroup / int(kUnitBytes);
  static constexpr int64_t kBlockBytes = kBits * kUnitRowBytes, kGroupsPerBlock = QuantizedShape::kBlock / kGroup;
  static constexpr int kLines = int(kBlockBytes / kGroupsPerBlock / 64);  // that a group takes

  // A group of a panel, and what is asked for while it is multiplied.
  struct Group {
    const char *block, *ahead;
    int64_t index, half;  // in a row; of the block, if that has two
    Ask ask;
  };

  // The bytes of a step of a group.
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

  // sum += the products of N rows with a group, scaled; `rows` and sum[kFirst] are the first row's.
  template <int kFirst, int N, int R, int G>
  QUIRE_INLINE void multiply(const char* rows, const QuantizedRow& layout, const Group& group, const ByteTable& table,
                             const f32 (&scale)[G], f32 (&sum)[R][G]) {
    const int64_t row_bytes = layout.bytes, x_stride = row_bytes / int64_t(sizeof(XValue));
    const XValue* x = reinterpret_cast<const XValue*>(rows) + group.index * kGroup;
    i32 acc[N][G];
    QUIRE_UNROLL
    for (int r = 0; r < N; ++r) {
      const i32 lack = set1_lane(rows + r * row_bytes + layout.lacks_at + group.index * int64_t(sizeof(int32_t)));
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
        w[g] = weight_quads(unpack(group.block + g * W * kUnitBytes, group.half, step, table));
      }
      QUIRE_UNROLL
      for (int r = 0; r < N; ++r) {
        const Quads value = set1_quad(x + r * x_stride + at * kUnitBytes);
        QUIRE_UNROLL
        for (int g = 0; g < G; ++g) acc[r][g] = dot4(acc[r][g], w[g], value);
      }
    }
    const float* x_scales = reinterpret_cast<const float*>(rows + layout.scales_at) + group.index;
    QUIRE_UNROLL
    for (int r = 0; r < N; ++r) {
      const f32 x_scale = set1(x_scales[r * row_bytes / int64_t(sizeof(float))]);
      QUIRE_UNROLL
      for (int g = 0; g < G; ++g) {
        f32& to = sum[kFirst + r][g];
        to = to + __builtin_convertvector(acc[r][g], f32) * (x_scale * scale[g]);
      }
    }
  }

  template <int R, int G>
  static void run(const char* rows, const QuantizedRow& layout, const WeightPiece& piece, int64_t column, float* sums) {
    constexpr int A = R > kRowsAtOnce ? (R + 1) / 2 : R, B = R - A;  // rows of the first and the second half
    const ByteTable table(kHasTable ? piece.table : kFloat4);
    f32 sum[R][G];
    QUIRE_UNROLL
    for (int r = 0; r < R; ++r) {
      QUIRE_UNROLL
      for (int g = 0; g < G; ++g) {
        sum[r][g] = piece.first == 0 ? set1(0) : load(sums + r * kPanelColumns + column + g * W);
      }
    }
    for (int64_t index = 0; index < piece.groups; ++index) {
      const char* block = piece.units + index / kGroupsPerBlock * kBlockBytes + column * kUnitBytes;
      const int64_t half = index % kGroupsPerBlock;
      const Group group = {block, block + piece.ahead + half * kLines * 64, piece.first + index, half, piece.ask};
      f32 scale[G];
      QUIRE_UNROLL
      for (int g = 0; g < G; ++g) scale[g] = piece.scale(index, column + g * W);
      multiply<0, A>(rows, layout, group, table, scale, sum);
      if constexpr (B > 0) multiply<A, B>(rows + A * layout.bytes, layout, group, table, scale, sum);
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
