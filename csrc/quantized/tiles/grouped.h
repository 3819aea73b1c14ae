// Tiles of a product on quantized weights with groups of 16 or 32 (quantized/matmul.h) whose integers are unpacked in
// registers, and the choice of a tile.
#pragma once

#include "quantized/tiles/tile.h"
#if defined(QUIRE_ARM)
#include "quantized/tiles/arm.h"
#endif

namespace quire::QUIRE_ISA {

#if defined(__AVX512VNNI__)
// Groups of integers as they are stored, or of bytes. Of more than kRowsAtOnce rows, the first half is multiplied with
// a group before the second: the sums of all stay in registers beside the products of half of them. kIsLong: groups
// have several blocks, of kGroup each.
template <int kBits, bool kHasTable, int kGroup, bool kIsLong = false>
struct GroupedTile {
  static constexpr TileShape kShape = kGroupedShape;
  static constexpr int kRowsAtOnce = 6;
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
    const char *block, *ahead;  // the first block, and what is asked for with it
    int64_t index, blocks;      // in a row; of the group
    int64_t line_bytes;         // that are asked for with each block
    Ask ask;
  };

  // The bytes of a step of a group.
  template <int kHalf>
  QUIRE_INLINE i32 unpack(const char* block, int step, i32 upper, const ByteTable& table) {
    if constexpr (kBits == 8) {
      f32 bytes = as_float(load_lanes(block + (kHalf * kSteps + step) * kUnitRowBytes));
      keep_in_register(bytes);  // else the compiler loads it for each row
      return as_int(bytes);
    } else {
      return unpack_step<kBits, kHasTable, kGroup>(block, kHalf, step, upper, table);
    }
  }

  // acc += the products of N of R rows, from kFirst on, with a block of a group, or with a group of half a block.
  template <int kHalf, int kFirst, int R, int N, int G>
  QUIRE_INLINE void multiply_block(const RowAddresses<N>& x, const char* block, const char* ahead, const Group& group,
                                   const ByteTable& table, i32 (&acc)[N][G]) {
    i32 upper[G] = {};
    QUIRE_UNROLL
    for (int g = 0; g < G && kHasUpper; ++g) {
      upper[g] = load_lanes(block + (4 + kHalf) * kUnitRowBytes + g * W * kUnitBytes);
    }
    QUIRE_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      if (step % 2 == 0) keep_order();
      if (kFirst == 0 && step % 2 == 0) {
        const int line = step * kLines / kSteps, lines = (step + 2) * kLines / kSteps - line;
        ask_for(group.ask, ahead + line * 64, lines);
        // Upper bits lie behind the others, so that the processor foresees less. More rows take longer than reading.
        const char* soon = block + kBytesSoon + (kHalf * kLines + line) * 64;
        if (kHasUpper && R <= 4) ask_for(Ask::kNearest, soon, lines);
      }
      const int at = kBits == 8 || kGroup == 16 ? step : step / 2 + step % 2 * 4;
      add_quads<ByteSums>(acc, x, at * kUnitBytes, [&](int g) __attribute__((always_inline)) {
        return unpack<kHalf>(block + g * W * kUnitBytes, step, upper[g], table);
      });
    }
    for (int64_t line = kLines; kFirst + N == R && line * 64 < group.line_bytes; ++line) {
      ask_for(group.ask, ahead + line * 64);
    }
  }

  // sum += the products of N rows, from kFirst on, with a group, scaled.
  template <int kHalf, int kFirst, int N, int R, int G>
  QUIRE_INLINE void multiply(const Rows& rows, const Group& group, const ByteTable& table, const f32 (&scale)[G],
                             f32 (&sum)[R][G]) {
    const char* row = rows.first + kFirst * rows.bytes;
    const int64_t blocks = kIsLong ? group.blocks : 1;
    RowAddresses<N> x(row + group.index * blocks * kGroup * int64_t(sizeof(ByteSums::Value)), rows.bytes);
    const RowAddresses<N> lacks(row + rows.lacks_at + group.index * int64_t(sizeof(int32_t)), rows.bytes);
    i32 acc[N][G];
    QUIRE_UNROLL
    for (int r = 0; r < N; ++r) {
      const i32 lack = set1_lane(lacks[r]);
      QUIRE_UNROLL
      for (int g = 0; g < G; ++g) acc[r][g] = lack;
    }
    const char *block = group.block, *ahead = group.ahead;
    for (int64_t i = 0; i < blocks; ++i, block += kBlockBytes, ahead += group.line_bytes, x += kGroup) {
      multiply_block<kHalf, kFirst, R>(x, block, ahead, group, table, acc);
    }
    const RowAddresses<N> x_scales(row + rows.scales_at + group.index * int64_t(sizeof(float)), rows.bytes);
    QUIRE_UNROLL
    for (int r = 0; r < N; ++r) {
      const f32 x_scale = set1(*reinterpret_cast<const float*>(x_scales[r]));
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
    const int64_t blocks = kIsLong ? layout.blocks : 1;
    const int64_t line_bytes = piece.line_bytes > 0 ? piece.line_bytes : kLines * 64;
    const char* line = piece.units + column * kUnitBytes;
    int64_t turn = piece.share;  // groups until the next one with which lines are asked for
    const auto add_group = [&]<int kHalf>(const char* block, int64_t index) __attribute__((always_inline)) {
      const Ask ask = turn == 0 ? piece.ask : Ask::kNot;
      turn = turn == 0 ? piece.shares - 1 : turn - 1;
      const char* ahead = line + ((piece.ahead + index * blocks * line_bytes) & -64);
      const Group group = {block, ahead, piece.first + index, blocks, line_bytes, ask};
      f32 scale[G];
      QUIRE_UNROLL
      for (int g = 0; g < G; ++g) scale[g] = piece.scale(index, column + g * W);
      multiply<kHalf, 0, A>(x, group, table, scale, sum);
      if constexpr (B > 0) multiply<kHalf, A, B>(x, group, table, scale, sum);
    };
    const char* block = line;
    for (int64_t index = 0; index < piece.groups; index += kGroupsPerBlock, block += blocks * kBlockBytes) {
      add_group.template operator()<0>(block, index);
      if (kGroupsPerBlock == 2 && index + 1 < piece.groups) add_group.template operator()<1>(block, index + 1);
    }
    QUIRE_UNROLL
    for (int r = 0; r < R; ++r) {
      QUIRE_UNROLL
      for (int g = 0; g < G; ++g) store(sums + r * kPanelColumns + column + g * W, sum[r][g]);
    }
  }
};

#elif defined(QUIRE_SIMD_AVX2)
// The same in vectors of 256 bits. Sums stay in memory: registers are for the products of all rows with a group, which
// are made in one of the ways of quantized/tiles/quads.h. kIsLong: groups have several blocks, of kGroup each.
template <int kBits, bool kHasTable, int kGroup, typename Sums = ByteSums, bool kIsLong = false>
struct GroupedTile {
  static constexpr TileShape kShape = kGroupedShape;
  static constexpr int kSteps = kGroup / int(kUnitBytes);
  static constexpr int64_t kBlockBytes = kBits * kUnitRowBytes, kGroupsPerBlock = QuantizedShape::kBlock / kGroup;
  static constexpr int64_t kValueBytes = sizeof(typename Sums::Value);
  static constexpr int kLines = int(kBlockBytes / kGroupsPerBlock / 64);  // that a block or smaller group takes
  static_assert(!kIsLong || kGroup == QuantizedShape::kBlock);

  // The bytes of a step of a group.
  QUIRE_INLINE i32 unpack(const char* block, int64_t half, int step, const ByteTable& table) {
    if constexpr (kBits == 8) {
      return load_lanes(block + (half * kSteps + step) * kUnitRowBytes);
    } else {
      const i32 upper = kBits > 4 ? load_lanes(block + (4 + half) * kUnitRowBytes) : i32{};
      return unpack_step<kBits, kHasTable, kGroup>(block, int(half), step, upper, table);
    }
  }

  template <int R, int G>
  static void run(const char* rows, const QuantizedRow& layout, const WeightPiece& given, int64_t column, float* sums) {
    const WeightPiece piece = given;  // keep_order does not have it read anew
    const int64_t row_bytes = layout.bytes, scales_at = layout.scales_at, lacks_at = layout.lacks_at;
    const ByteTable table(kHasTable ? piece.table : kFloat4);
    sums += column;
    for (int r = 0; piece.first == 0 && r < R; ++r) {
      for (int g = 0; g < G; ++g) store(sums + r * kPanelColumns + g * W, set1(0));
    }
    // What is asked for: this pass's share of the lines, some with each block or smaller group.
    const int64_t blocks = kIsLong ? layout.blocks : 1, parts = piece.groups * blocks;
    const int64_t all_bytes = parts * (piece.line_bytes > 0 ? piece.line_bytes : kLines * 64);
    const int64_t share_bytes = ceil_div(all_bytes, piece.shares);
    const char* line = piece.units + column * kUnitBytes + piece.ahead + share_bytes * piece.share;
    const char* const last = piece.ask == Ask::kNot ? line : line + share_bytes;
    constexpr int kAskingSteps = G == kVectorsPerPanel ? kSteps : 1;  // of a part: others would lack registers
    const int64_t num_lines = ceil_div(share_bytes, 64 * parts * kAskingSteps);
    for (int64_t index = 0; index < piece.groups; ++index) {
      keep_order();  // sums, too, stay in memory
      const int64_t group = piece.first + index, half = kGroup == 16 ? index % 2 : 0;
      const int64_t first = index * blocks * kGroup / QuantizedShape::kBlock;
      const char* block = piece.units + first * kBlockBytes + column * kUnitBytes;
      RowAddresses<R> x(rows + group * blocks * kGroup * kValueBytes, row_bytes);
      const RowAddresses<R> lacks(rows + lacks_at + group * int64_t(sizeof(int32_t)), row_bytes);
      i32 acc[R][G], totals[R][G];
      const auto begin = [&](i32(&to)[R][G]) __attribute__((always_inline)) {
        QUIRE_UNROLL
        for (int r = 0; r < R; ++r) {
          const i32 lack = set1_lane(lacks[r]);
          QUIRE_UNROLL
          for (int g = 0; g < G; ++g) to[r][g] = lack;
        }
      };
      const auto add_part = [&]() __attribute__((always_inline)) {
        QUIRE_UNROLL
        for (int step = 0; step < kSteps; ++step) {
          const int at = kBits == 8 || kGroup == 16 ? step : step / 2 + step % 2 * 4;
          for (int64_t i = 0; step < kAskingSteps && i < num_lines && line < last; ++i, line += 64) {
            ask_for(Ask::kNext, line);
          }
          add_quads<Sums>(acc, x, at * kUnitBytes, [&](int g) __attribute__((always_inline)) {
            return unpack(block + g * W * kUnitBytes, half, step, table);
          });
        }
      };
      if constexpr (kIsLong) {
        begin(totals);
        for (int64_t i = 0; i < blocks; ++i, block += kBlockBytes, x += kGroup * kValueBytes) {
          QUIRE_UNROLL
          for (int r = 0; r < R; ++r) {
            QUIRE_UNROLL
            for (int g = 0; g < G; ++g) acc[r][g] = i32{};  // sums of four bits fit an int16 without a lack
          }
          add_part();
          QUIRE_UNROLL
          for (int r = 0; r < R; ++r) {
            QUIRE_UNROLL
            for (int g = 0; g < G; ++g) totals[r][g] = totals[r][g] + Sums::total(acc[r][g], i32{});
          }
        }
      } else {
        begin(acc);
        add_part();
      }
      f32 scale[G];
      QUIRE_UNROLL
      for (int g = 0; g < G; ++g) scale[g] = piece.scale(index, column + g * W);
      const RowAddresses<R> x_scales(rows + scales_at + group * int64_t(sizeof(float)), row_bytes);
      QUIRE_UNROLL
      for (int r = 0; r < R; ++r) {
        const f32 x_scale = set1(*reinterpret_cast<const float*>(x_scales[r]));
        QUIRE_UNROLL
        for (int g = 0; g < G; ++g) {
          const i32 total = kIsLong ? totals[r][g] : Sums::total(acc[r][g], set1_lane(lacks[r]));
          float* sum = sums + r * kPanelColumns + g * W;
          store(sum, load(sum) + __builtin_convertvector(total, f32) * (x_scale * scale[g]));
        }
      }
    }
  }
};
#endif

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

static RunTile* quantized_tile(const QuantizedShape& shape, bool is_plain, bool has_halves, int64_t rows,
                               int64_t vectors) {
  const QuantizedFormat& format = shape.format;
  if (shape.is_whole) return tile_function<QuantizedTile<false>>(rows, vectors);
  if (shape.has_long_groups()) {
    return has_halves ? tile_function<GroupedTile<4, false, 32, SumsOf<4, false>, true>>(rows, vectors)
                      : tile_function<GroupedTile<8, false, 32, SumsOf<4, false>, true>>(rows, vectors);
  }
  if (has_halves) return tile_function<GroupedTile<4, false, 32, SumsOf<4, false>>>(rows, vectors);
  if (has_bytes(format) && is_plain) return tile_function<GroupedTile<8, false, 32>>(rows, vectors);
  if (has_bytes(format)) return tile_function<GroupedTile<4, true, 32>>(rows, vectors);
  if (format.bits == 5 && format.zero == 0) return small_tile<SumsOf<5, true>>(format, is_plain, rows, vectors);
  if (format.bits == 5) return small_tile<SumsOf<5, false>>(format, is_plain, rows, vectors);
  return small_tile<SumsOf<6, false>>(format, is_plain, rows, vectors);  // 4 bits are added likewise
}
#elif defined(QUIRE_ARM)
static RunTile* quantized_tile(const QuantizedShape& shape, bool is_plain, bool has_halves, int64_t rows,
                               int64_t vectors) {
  constexpr bool kLess = kBytesAreLess;
  const QuantizedFormat& format = shape.format;
  if (shape.is_whole) return tile_function<ArmTile<8, false, 0, kLess>>(rows, vectors);
  if (has_halves) return tile_function<ArmTile<4, false, 32, false>>(rows, vectors);
  if (has_bytes(format) && is_plain) return tile_function<ArmTile<8, false, 32, kLess>>(rows, vectors);
  if (has_bytes(format)) return tile_function<ArmTile<4, true, 32, kLess>>(rows, vectors);
  if (format.group == 16) {
    if (is_plain) return tile_function<ArmTile<8, false, 16, false>>(rows, vectors);
    if (format.bits == 6) return tile_function<ArmTile<6, false, 16, false>>(rows, vectors);
    return tile_function<ArmTile<4, false, 16, false>>(rows, vectors);
  }
  if (is_plain) return tile_function<ArmTile<8, false, 32, false>>(rows, vectors);
  return tile_function<ArmTile<5, false, 32, false>>(rows, vectors);
}
#else
static RunTile* quantized_tile([[maybe_unused]] const QuantizedShape& shape, [[maybe_unused]] bool is_plain,
                               bool has_halves, int64_t rows, int64_t vectors) {
#if defined(__AVX512VNNI__)
  const QuantizedFormat& format = shape.format;
  const bool is_whole = shape.is_whole, is_narrow = format.group == 16;
  if (!is_plain && format.table != nullptr) return tile_function<GroupedTile<4, true, 32>>(rows, vectors);
  if (!is_plain && format.bits == 5) return tile_function<GroupedTile<5, false, 32>>(rows, vectors);
  if (!is_plain && format.bits == 6) return tile_function<GroupedTile<6, false, 16>>(rows, vectors);
  if (!is_plain) return tile_function<GroupedTile<4, false, 16>>(rows, vectors);
  if (has_halves && shape.has_long_groups()) return tile_function<GroupedTile<4, false, 32, true>>(rows, vectors);
  if (has_halves) return tile_function<GroupedTile<4, false, 32>>(rows, vectors);
  if (is_narrow) return tile_function<GroupedTile<8, false, 16>>(rows, vectors);
  if (!is_whole) return tile_function<GroupedTile<8, false, 32>>(rows, vectors);
#endif
  return has_halves ? tile_function<QuantizedTile<true>>(rows, vectors)
                    : tile_function<QuantizedTile<false>>(rows, vectors);
}
#endif

}  // namespace quire::QUIRE_ISA
