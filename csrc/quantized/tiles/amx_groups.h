// Products on tiles (isa/x86/amx.h) of weights in groups of 16 or 32. The sums of a group leave the tiles to be scaled,
// while the next group is multiplied.
#pragma once

#include "isa/x86/amx.h"
#include "quantized/tiles/amx.h"
#include "quantized/tiles/tile.h"
#include "quantized/tiles/unpack.h"

namespace quire::QUIRE_ISA {

// Fewer rows are multiplied in as little time without tiles, and have the same bits: the less the shorter groups are.
constexpr int64_t kFewestTileValues = 512;

QUIRE_INLINE bool has_groups_on_tiles(const QuantizedShape& shape, int64_t rows) {
  const bool is_signed = shape.format.bits < 8 || shape.format.zero == 128;  // less their zero, integers fit a byte
  return is_signed && shape.format.group <= QuantizedShape::kBlock && rows * shape.format.group >= kFewestTileValues;
}

// What the tiles multiply by, of blocks [begin, end) of a panel: integers less the format's zero, in signed bytes.
static void read_signed(const PanelReader& reader, const char* panel, int64_t begin, int64_t end, char* piece) {
  const __m512i zeros = _mm512_set1_epi8(char(reader.shape.format.zero));
  const auto less = [&](i32 v) __attribute__((always_inline)) { return (i32)_mm512_sub_epi8((__m512i)v, zeros); };
  reader.read_units(panel, begin, end, less, piece);
}

// Up to kAmxRows rows of x times a vector of columns of a piece. While the sums of a group are scaled, those of the
// next one leave their tile, and the one after that is multiplied: each would wait for the one before.
template <int kGroup>
struct GroupedSums {
  static constexpr int64_t kGroupBytes = kGroup / kUnitBytes * kUnitRowBytes;

  template <int kTile>
  QUIRE_INLINE void multiply(const char* x, int64_t x_stride, const char* units) {
    clear_tile<kTile>();
    load_tile<4 + kTile>(x, x_stride);
    load_tile<6 + kTile>(units, kUnitRowBytes);
    multiply_tiles<kTile, 4 + kTile, 6 + kTile>(static_cast<const SignedBytes*>(nullptr));
  }

  // What lies in memory: of x the values and scales of the first group, and the integers; and of what is read next the
  // lines that are asked for with each group.
  struct Operands {
    const char *x, *x_scales, *units;
    int64_t x_stride, groups;
    const char* next;
    int64_t lines;
  };

  // sum += products, scaled, of rows [kFirst, kEnd).
  template <int kFirst, int kEnd, int R>
  QUIRE_INLINE void scale_rows(const char* x_scales, int64_t stride, const char* products, f32 scale, f32 (&sum)[R]) {
    QUIRE_UNROLL
    for (int r = kFirst; r < kEnd; ++r) {
      const f32 x_scale = set1(*reinterpret_cast<const float*>(x_scales + r * stride));
      const i32 total = load_lanes(products + r * kAmxRowBytes);
      sum[r] = sum[r] + __builtin_convertvector(total, f32) * (x_scale * scale);
    }
  }

  // Scales group `index`, whose products tile kTile had.
  template <int kTile, int R>
  QUIRE_INLINE void step(const Operands& from, int64_t index, f32 scale, char* products, f32 (&sum)[R]) {
    const char* x_scales = from.x_scales + index * int64_t(sizeof(float));
    char* own = products + kTile * kAmxRows * kAmxRowBytes;
    scale_rows<0, R / 4>(x_scales, from.x_stride, own, scale, sum);
    if (index + 1 < from.groups) store_tile<1 - kTile>(products + (1 - kTile) * kAmxRows * kAmxRowBytes, kAmxRowBytes);
    for (int64_t i = 0; i < from.lines; ++i) ask_for<1>(Ask::kNext, from.next + (index * from.lines + i) * 64);
    scale_rows<R / 4, R / 2>(x_scales, from.x_stride, own, scale, sum);
    if (index + 2 < from.groups) {
      multiply<kTile>(from.x + (index + 2) * kGroup, from.x_stride, from.units + (index + 2) * kGroupBytes);
    }
    scale_rows<R / 2, R>(x_scales, from.x_stride, own, scale, sum);
  }

  template <int R>
  static void run(const char* rows, const QuantizedRow& layout, const WeightPiece& given, int64_t column,
                  const char* next, int64_t lines, float* sums) {
    const WeightPiece piece = given;
    alignas(64) char products[2 * kAmxRows * kAmxRowBytes];
    const Operands from = {rows + piece.first * kGroup,
                           rows + layout.scales_at + piece.first * int64_t(sizeof(float)),
                           piece.units + column * kUnitBytes,
                           layout.bytes,
                           piece.groups,
                           next,
                           lines};
    f32 sum[R];
    QUIRE_UNROLL
    for (int r = 0; r < R; ++r) sum[r] = piece.first == 0 ? set1(0) : load(sums + r * kPanelColumns + column);
    multiply<0>(from.x, from.x_stride, from.units);
    store_tile<0>(products, kAmxRowBytes);
    if (from.groups > 1) multiply<1>(from.x + kGroup, from.x_stride, from.units + kGroupBytes);
    for (int64_t index = 0; index < from.groups; index += 2) {
      step<0, R>(from, index, piece.scale(index, column), products, sum);
      if (index + 1 < from.groups) step<1, R>(from, index + 1, piece.scale(index + 1, column), products, sum);
    }
    QUIRE_UNROLL
    for (int r = 0; r < R; ++r) store(sums + r * kPanelColumns + column, sum[r]);
  }
};

using RunGroups = void(const char*, const QuantizedRow&, const WeightPiece&, int64_t, const char*, int64_t, float*);

template <int kGroup, int R = 1>
static RunGroups* grouped_sums(int64_t rows) {
  if constexpr (R < int(kAmxRows)) {
    if (rows > R) return grouped_sums<kGroup, R + 1>(rows);
  }
  return &GroupedSums<kGroup>::template run<R>;
}

// Adds the products of a task's rows and a piece of a panel, as read_signed gives it, to their sums. Meanwhile the
// `next_bytes` from `next` on come near, which are read next.
static void multiply_groups(Tiles& tiles, const char* rows, int64_t num_rows, const QuantizedRow& layout,
                            const WeightPiece& piece, const char* next, int64_t next_bytes, const PanelOut& out,
                            float* sums) {
  const int64_t blocks = ceil_div(num_rows, kAmxRows);
  const char* end = next + next_bytes;
  const int64_t lines = ceil_div(next_bytes, 64 * piece.groups * blocks * (kPanelColumns / W));
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t row = block * num_rows / blocks, height = (block + 1) * num_rows / blocks - row;
    out.expect(row, height, piece.first + piece.groups == layout.groups);
    tiles.configure_groups(height, layout.group);
    RunGroups* const run = layout.group == 16 ? grouped_sums<16>(height) : grouped_sums<32>(height);
    for (int64_t column = 0; column < kPanelColumns; column += W) {
      run(rows + row * layout.bytes, layout, piece, column, next, next < end ? lines : 0, sums + row * kPanelColumns);
      next += lines * piece.groups * 64;
    }
  }
}

}  // namespace quire::QUIRE_ISA
