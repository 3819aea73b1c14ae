// Tiles of a product on quantized weights for 64-bit Arm: of all formats, whose integers are unpacked in registers, two
// units of four values at a time.
#pragma once

#include "quantized/tiles/tile.h"

namespace quire::QUIRE_ISA {

QUIRE_INLINE Eight load_eight(const char* p) {
  uint64_t bits;
  std::memcpy(&bits, p, sizeof bits);
  return eight_of(bits);
}

// Sums of the products of R quantized rows and G vectors of columns, in registers. `x` are eight values of each row,
// `first` and `second` the weights of two units.
#if defined(QUIRE_ARM_I8MM)
// Two rows at a time, by matrices of 2 x 8 times 8 x 2 (usmmla of FEAT_I8MM): 128 bits hold the sums of two columns and
// two rows, the rows of a column side by side. The last of an odd number of rows has registers of its own.
template <int R, int G, bool>
struct TileSums {
  static constexpr int kPairs = R / 2;
  static constexpr bool kHasLast = R % 2 == 1;
  i32 pairs[kPairs + 1][2 * G], last[G], x_pairs[kPairs + 1];
  Eight x_last;

  QUIRE_MEMBER void begin(const char* lacks, int64_t row_bytes) {
    QUIRE_UNROLL
    for (int p = 0; p < kPairs; ++p) {
      const i32 both = interleave<0>(set1_lane(lacks + 2 * p * row_bytes), set1_lane(lacks + (2 * p + 1) * row_bytes));
      QUIRE_UNROLL
      for (int i = 0; i < 2 * G; ++i) pairs[p][i] = both;
    }
    QUIRE_UNROLL
    for (int g = 0; g < G && kHasLast; ++g) last[g] = set1_lane(lacks + (R - 1) * row_bytes);
  }
  QUIRE_MEMBER void load_x(const char* x, int64_t row_bytes) {
    QUIRE_UNROLL
    for (int p = 0; p < kPairs; ++p) {
      x_pairs[p] = side_by_side(load_eight(x + 2 * p * row_bytes), load_eight(x + (2 * p + 1) * row_bytes));
    }
    if constexpr (kHasLast) x_last = load_eight(x + (R - 1) * row_bytes);
  }
  QUIRE_MEMBER void add(int g, i32 first, i32 second) {
    const i32 low = interleave<0>(first, second), high = interleave<1>(first, second);
    QUIRE_UNROLL
    for (int p = 0; p < kPairs; ++p) {
      pairs[p][2 * g] = add_matrices(pairs[p][2 * g], low, x_pairs[p]);
      pairs[p][2 * g + 1] = add_matrices(pairs[p][2 * g + 1], high, x_pairs[p]);
    }
    if constexpr (kHasLast) last[g] = add_four<1>(add_four<0>(last[g], first, x_last), second, x_last);
  }
  QUIRE_MEMBER i32 total(int r, int g) const {
    if (r / 2 == kPairs) return last[g];
    const i32 low = pairs[r / 2][2 * g], high = pairs[r / 2][2 * g + 1];
    return r % 2 == 0 ? every_other<0>(low, high) : every_other<1>(low, high);
  }
};
#else
template <int R, int G, bool kIsLess>
struct TileSums {
  using Sums = LaneSums<kIsLess>;
  i32 acc[R][G];
  Eight rows[R];

  QUIRE_MEMBER void begin(const char* lacks, int64_t row_bytes) {
    QUIRE_UNROLL
    for (int r = 0; r < R; ++r) {
      QUIRE_UNROLL
      for (int g = 0; g < G; ++g) acc[r][g] = set1_lane(lacks + r * row_bytes);
    }
  }
  QUIRE_MEMBER void load_x(const char* x, int64_t row_bytes) {
    QUIRE_UNROLL
    for (int r = 0; r < R; ++r) rows[r] = load_eight(x + r * row_bytes);
  }
  QUIRE_MEMBER void add(int g, i32 first, i32 second) {
    const i32 w[2] = {Sums::weights(first), Sums::weights(second)};
    QUIRE_UNROLL
    for (int r = 0; r < R; ++r) {
      acc[r][g] = Sums::template add_four<0>(acc[r][g], w[0], rows[r]);
      acc[r][g] = Sums::template add_four<1>(acc[r][g], w[1], rows[r]);
    }
  }
  QUIRE_MEMBER i32 total(int r, int g) const { return acc[r][g]; }
};
#endif

// Groups of kGroup (0: one group, of all columns) integers as they are stored, or of bytes. Their sums stay in memory:
// registers are for the products of all rows with a group. kIsLess: see LaneSums.
template <int kBits, bool kHasTable, int kGroup, bool kIsLess>
struct ArmTile {
  static constexpr TileShape kShape = kGroup == 0 ? kByteShape : kGroupedShape;
  static constexpr int64_t kBlockBytes = kBits * kUnitRowBytes;
  static constexpr int kLines(int vectors) { return (vectors * W * int(kUnitBytes) + 63) / 64; }

  // Two units along k: rows of units of a block, of which the upper or lower halves; and where their values of x are.
  struct Place {
    int row;
    bool is_upper;
    int x;
  };
  // The index-th of a group of at most a block. Halves of the same bytes come one after the other.
  static constexpr Place place(int index) {
    if (kBits == 8 || kGroup == 16) return {2 * index, false, 8 * index};
    return {index / 2 * 2, index % 2 == 1, index / 2 * 8 + index % 2 * 16};
  }

  // The bytes of a unit of a block; of a group of 16, which is its half `half`.
  QUIRE_INLINE i32 unpack(const char* block, int64_t half, int row, bool is_upper, const ByteTable& table) {
    if constexpr (kBits == 8) return load_lanes(block + (half * (kGroup / int(kUnitBytes)) + row) * kUnitRowBytes);
    const int shift = kGroup == 16 ? int(half) * 4 : is_upper * 4;
    i32 bytes = (load_lanes(block + row * kUnitRowBytes) >> shift) & 0x0f0f0f0f;
    if constexpr (kBits > 4) {
      const i32 upper[2] = {load_lanes(block + (4 + half) * kUnitRowBytes), {}};
      bytes = bytes | PanelReader::upper_bits<kBits>(upper, row + 4 * is_upper);
    }
    if constexpr (kHasTable) bytes = table.look_up(bytes);
    return bytes;
  }

  template <int R, int G>
  static void run(const char* rows, const QuantizedRow& layout, const WeightPiece& given, int64_t column, float* sums) {
    const WeightPiece piece = given;
    const int64_t row_bytes = layout.bytes;
    const ByteTable table(kHasTable ? piece.table : kFloat4);
    for (int r = 0; piece.first == 0 && r < R; ++r) {
      for (int g = 0; g < G; ++g) store(sums + r * kPanelColumns + column + g * W, set1(0));
    }
    for (int64_t index = 0; index < piece.groups; ++index) {
      const int64_t group = piece.first + index;
      const char* x = rows + group * layout.group;
      TileSums<R, G, kIsLess> products;
      products.begin(rows + layout.lacks_at + group * int64_t(sizeof(int32_t)), row_bytes);
      if constexpr (kGroup == 0) {
        const char* units = piece.units + column * kUnitBytes;
        for (int64_t i = 0; i < layout.group; i += 8, units += 2 * kUnitRowBytes) {
          ask_for(piece.ask, units + piece.ahead, kLines(G));
          ask_for(piece.ask, units + piece.ahead + kUnitRowBytes, kLines(G));
          products.load_x(x + i, row_bytes);
          QUIRE_UNROLL
          for (int g = 0; g < G; ++g) {
            const char* at = units + g * W * kUnitBytes;
            products.add(g, load_lanes(at), load_lanes(at + kUnitRowBytes));
          }
        }
      } else {
        const int64_t half = kGroup == 16 ? index % 2 : 0;
        const int64_t first = index * layout.blocks * kGroup / QuantizedShape::kBlock;
        const char* block = piece.units + first * kBlockBytes + column * kUnitBytes;
        for (int64_t b = 0; b < layout.blocks; ++b, block += kBlockBytes, x += kGroup) {
          const char* ahead = block + piece.ahead;
          QUIRE_UNROLL
          for (int i = 0; i < kGroup / 8; ++i) {
            const Place at = place(i);
            if (!at.is_upper && (kBits == 8 || half == 0)) {
              ask_for(piece.ask, ahead + at.row * kUnitRowBytes, kLines(G));
              ask_for(piece.ask, ahead + (at.row + 1) * kUnitRowBytes, kLines(G));
            }
            products.load_x(x + at.x, row_bytes);
            QUIRE_UNROLL
            for (int g = 0; g < G; ++g) {
              const char* vector = block + g * W * kUnitBytes;
              products.add(g, unpack(vector, half, at.row, at.is_upper, table),
                           unpack(vector, half, at.row + 1, at.is_upper, table));
            }
          }
        }
      }
      add_scaled<R, G>(products, rows + layout.scales_at + group * int64_t(sizeof(float)), row_bytes, piece, index,
                       column, sums);
    }
  }

 private:
  template <int R, int G>
  QUIRE_INLINE void add_scaled(const TileSums<R, G, kIsLess>& products, const char* x_scales, int64_t row_bytes,
                               const WeightPiece& piece, int64_t index, int64_t column, float* sums) {
    f32 scale[G];
    QUIRE_UNROLL
    for (int g = 0; g < G; ++g) scale[g] = piece.scale(index, column + g * W);
    QUIRE_UNROLL
    for (int r = 0; r < R; ++r) {
      const f32 x_scale = set1(*reinterpret_cast<const float*>(x_scales + r * row_bytes));
      QUIRE_UNROLL
      for (int g = 0; g < G; ++g) {
        float* sum = sums + r * kPanelColumns + column + g * W;
        store(sum, load(sum) + __builtin_convertvector(products.total(r, g), f32) * (x_scale * scale[g]));
      }
    }
  }
};

}  // namespace quire::QUIRE_ISA
