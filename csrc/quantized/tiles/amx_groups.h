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

// What is asked for while rows are multiplied: lines that are read next, and those that sums will be written to.
struct GroupRequests {
  const char *next, *end;
  int64_t lines;  // of `next`, with each group
  char* out;      // null: is not written yet
  int64_t out_stride;
};

// Blocks of R rows of x times a piece, one vector of columns after the other. While the sums of a group are scaled,
// those of the next one leave their tile, and the one after that is multiplied: each would wait for the one before.
template <int kGroup, int R>
struct GroupedSums {
  static constexpr int64_t kGroupBytes = kGroup / kUnitBytes * kUnitRowBytes, kVectors = kPanelColumns / W;
  static constexpr int64_t kTileBytes = kAmxRows * kAmxRowBytes;

  // The next group to be multiplied.
  struct Cursor {
    const char *row, *first_units, *x, *units;
    int64_t stride, groups, index = 0, vector = 0;

    QUIRE_MEMBER Cursor(const char* rows, const QuantizedRow& layout, const WeightPiece& piece)
        : row(rows + piece.first * kGroup),
          first_units(piece.units),
          x(row),
          units(first_units),
          stride(layout.bytes),
          groups(piece.groups) {}

    QUIRE_MEMBER void advance() {
      x += kGroup;
      units += kGroupBytes;
      if (++index < groups) return;
      index = 0;
      vector = (vector + 1) % kVectors;
      if (vector == 0) row += R * stride;
      x = row;
      units = first_units + vector * kAmxRowBytes;
    }
  };

  template <int kTile>
  QUIRE_INLINE void multiply(Cursor& at) {
    clear_tile<kTile>();
    load_tile<4 + kTile>(at.x, at.stride);
    load_tile<6 + kTile>(at.units, kUnitRowBytes);
    multiply_tiles<kTile, 4 + kTile, 6 + kTile>(static_cast<const SignedBytes*>(nullptr));
    at.advance();
  }

  // sum += products, scaled, of rows [kFirst, kEnd).
  template <int kFirst, int kEnd>
  QUIRE_INLINE void scale_rows(const char* x_scales, int64_t stride, const char* products, f32 scale, f32 (&sum)[R]) {
    QUIRE_UNROLL
    for (int r = kFirst; r < kEnd; ++r) {
      const f32 x_scale = set1(*reinterpret_cast<const float*>(x_scales + r * stride));
      const i32 total = load_lanes(products + r * kAmxRowBytes);
      sum[r] = sum[r] + __builtin_convertvector(total, f32) * (x_scale * scale);
    }
  }

  // Scales a group whose products tile kTile had. `left`: groups after it.
  template <int kTile>
  QUIRE_INLINE void step(Cursor& at, int64_t left, const char* x_scales, f32 scale, char* products, f32 (&sum)[R]) {
    const int64_t stride = at.stride;
    scale_rows<0, R / 4>(x_scales, stride, products + kTile * kTileBytes, scale, sum);
    if (left > 0) store_tile<1 - kTile>(products + (1 - kTile) * kTileBytes, kAmxRowBytes);
    scale_rows<R / 4, R / 2>(x_scales, stride, products + kTile * kTileBytes, scale, sum);
    if (left > 1) multiply<kTile>(at);
    scale_rows<R / 2, R>(x_scales, stride, products + kTile * kTileBytes, scale, sum);
  }

  static void run(const char* rows, int64_t blocks, const QuantizedRow& layout, const WeightPiece& given,
                  GroupRequests requests, float* sums) {
    const WeightPiece piece = given;
    alignas(64) char products[2 * kTileBytes];
    Cursor at(rows, layout, piece);
    int64_t left = blocks * kVectors * piece.groups;
    multiply<0>(at);
    store_tile<0>(products, kAmxRowBytes);
    if (left > 1) multiply<1>(at);
    const char* x_scales = rows + layout.scales_at + piece.first * int64_t(sizeof(float));
    bool is_odd = false;
    for (; blocks > 0; --blocks, x_scales += R * layout.bytes, sums += R * kPanelColumns) {
      int64_t asked_row = 0;
      for (int64_t column = 0; column < kPanelColumns; column += W) {
        f32 sum[R];
        QUIRE_UNROLL
        for (int r = 0; r < R; ++r) sum[r] = piece.first == 0 ? set1(0) : load(sums + r * kPanelColumns + column);
        for (int64_t index = 0; index < piece.groups; ++index, is_odd = !is_odd) {
          if (requests.out != nullptr && asked_row < R) {
            __builtin_prefetch(requests.out + asked_row++ * requests.out_stride, 1, 2);
          }
          for (int64_t i = 0; i < requests.lines && requests.next < requests.end; ++i, requests.next += 64) {
            ask_for<1>(Ask::kNext, requests.next);
          }
          const char* x_scale = x_scales + index * int64_t(sizeof(float));
          const f32 scale = piece.scale(index, column);
          --left;
          if (is_odd) {
            step<1>(at, left, x_scale, scale, products, sum);
          } else {
            step<0>(at, left, x_scale, scale, products, sum);
          }
        }
        QUIRE_UNROLL
        for (int r = 0; r < R; ++r) store(sums + r * kPanelColumns + column, sum[r]);
      }
      requests.out += R * requests.out_stride;
    }
  }
};

using RunGroups = void(const char*, int64_t, const QuantizedRow&, const WeightPiece&, GroupRequests, float*);

template <int kGroup, int R = 1>
static RunGroups* grouped_sums(int64_t rows) {
  if constexpr (R < int(kAmxRows)) {
    if (rows > R) return grouped_sums<kGroup, R + 1>(rows);
  }
  return &GroupedSums<kGroup, R>::run;
}

// Adds the products of a task's rows and a piece of a panel, as read_signed gives it, to their sums. Meanwhile the
// `next_bytes` from `next` on come near, which are read next, and after the last piece the lines that sums go to.
static void multiply_groups(Tiles& tiles, const char* rows, int64_t num_rows, const QuantizedRow& layout,
                            const WeightPiece& piece, const char* next, int64_t next_bytes, const PanelOut& out,
                            float* sums) {
  const int64_t steps = ceil_div(num_rows, kAmxRows) * (kPanelColumns / W) * piece.groups;
  const bool is_last = piece.first + piece.groups == layout.groups;
  GroupRequests requests = {next, next + next_bytes, ceil_div(next_bytes, 64 * steps), nullptr, out.stride()};
  for (int64_t row = 0; row < num_rows;) {
    const int64_t left = num_rows - row, height = smaller(left, kAmxRows), blocks = left / height;
    if (is_last) requests.out = out.line(row);
    tiles.configure_groups(height, layout.group);
    RunGroups* const run = layout.group == 16 ? grouped_sums<16>(height) : grouped_sums<32>(height);
    run(rows + row * layout.bytes, blocks, layout, piece, requests, sums + row * kPanelColumns);
    row += blocks * height;
    requests.lines = 0;
  }
}

}  // namespace quire::QUIRE_ISA
