// y = x W^T + bias on quantized weights (quantized/layout.h), x being quantized too, each group of a row by itself, in
// the basis of the weight (quantized/rotation.h).
//
// The products of a group are summed in int32, where no order matters. Those sums are scaled and added up in float32,
// group after group, without fused operations; so are, apart, the sums of x times the mins, which are subtracted in the
// end. So an element has the same bits in any batch and in every variant.
#pragma once

#include "isa/rows.h"
#include "matmul/tiles.h"
#include "quantized/quads.h"
#include "quantized/rotation.h"
#include "quantized/unpack.h"

namespace quire::QUIRE_ISA {

// A largest value up to this counts as zero: 127 divided by it might be infinite.
constexpr float kQuantizedZero = 1e-30f;

// Rows of x that are kept quantized at once: enough that reading the weights anew for the next ones costs nothing.
constexpr int64_t kMostQuantizedRows = 512;

// The most rows of a tile whose weights have small groups: its sums fill registers beside the accumulators.
constexpr int kGroupedRows = kTileRows < 8 ? kTileRows : 8;
constexpr int kRowsAtOnce = 4;

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

// The largest magnitude of a row; NaN if an element is not finite.
template <typename T>
static float largest_of(const T* row, int64_t k) {
  f32 largest = set1(0), poison = set1(0);
  for_parts(k, [&](int64_t i, int64_t n) {
    const f32 v = load_some(row + i, n);
    largest = max(abs(v), largest);
    poison = fma(v, set1(0), poison);
  });
  return reduce_max(largest) + reduce_add(poison);
}

// A value is x * (127 / largest) to the nearest (even) integer, the scale largest / 127. A group that holds something
// not finite has the scale NaN.
template <typename T>
static void quantize_row(const T* x, const int32_t* order, const QuantizedRow& layout, char* row) {
  XValue* values = reinterpret_cast<XValue*>(row);
  float* scales = reinterpret_cast<float*>(row + layout.scales_at);
  int32_t* lacks = reinterpret_cast<int32_t*>(row + layout.lacks_at);
  float* sums = reinterpret_cast<float*>(row + layout.sums_at);
  for (int64_t group = 0; group < layout.groups; ++group, values += layout.group) {
    const T* from = x + group * layout.group;
    const int64_t count = smaller(layout.group, layout.k - group * layout.group);
    T picked[32];
    if (order != nullptr) {
      for (int64_t i = 0; i < count; ++i) picked[i] = x[order[group * layout.group + i]];
      from = picked;
    }
    const float largest = largest_of(from, count);
    const bool is_zero = !(largest > kQuantizedZero);  // or has no largest value
    const float scale = largest / 127;
    const f32 inverse = set1(is_zero ? 0 : 127 / largest), shifter = set1(12582912.0f);  // 1.5 * 2^23: rounds
    f32 sum = set1(0);                                                                   // exact: below 2^24
    for (int64_t i = 0; i < layout.group; i += W) {
      const f32 v = i < count && !is_zero ? load_some(from + i, smaller(W, count - i)) : set1(0);
      const f32 rounded = v * inverse + shifter;
      sum = sum + (rounded - shifter);
      store_values(values + i, as_int(rounded) - as_int(shifter));
    }
    const float total = reduce_add(sum);
    scales[group] = scale;
    lacks[group] = -int32_t(total) * int32_t(layout.zero);
    if (layout.has_mins) sums[group] = total * scale;
  }
}

// The same of a row in the basis of a rotated weight.
template <typename T>
static void quantize_rotated_row(const T* x, const float* factors, const QuantizedRow& layout, char* row) {
  alignas(64) float rotated[kMostQuantizedK];  // as much as is used is touched
  rotate(x, factors, layout.k, rotated);
  quantize_row<float>(rotated, nullptr, layout, row);
}

// A piece of a panel: of `groups` groups the units [group / 4][32], scales and mins [groups][32].
struct WeightPiece {
  const char* units;
  const bf16* stored_scales;  // where the panel has a scale for each group: its own, and `scales` are not used
  const float *scales, *mins;
  const uint8_t* table;
  char* room;             // of kPieceK * kPanelColumns bytes, for what a tile unpacks
  int64_t first, groups;  // the first group's index in a row
  int64_t ahead;          // how far behind its units that lies which a tile asks for while it multiplies

  QUIRE_MEMBER f32 scale(int64_t index, int64_t column) const {
    const int64_t at = index * kPanelColumns + column;
    return stored_scales != nullptr ? load(stored_scales + at) : load(scales + at);
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
    const int64_t ahead = piece.ahead;
    const char* units = piece.units + column * kUnitBytes;
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
        QUIRE_UNROLL
        for (int g = 0; g < G; ++g) __builtin_prefetch(units + ahead + g * W * kUnitBytes, 0, 2);
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

// The same of groups of 16 or 32 as they are stored, unpacked in registers. Up to kRowsAtOnce rows are multiplied at a
// time, and while they are, the products of those before them are scaled and added: together they keep busy both the
// processor's multipliers and what adds.
template <int kBits, bool kHasTable, int kGroup>
struct GroupedTile {
  static constexpr int kMost = kPanelVectors, kMostRows = kGroupedRows, kSteps = kGroup / int(kUnitBytes);
  static constexpr int64_t kBlockBytes = kBits * kUnitRowBytes;
  static constexpr bool kIsKept = kBits == 5 || kBits == 6 || kHasTable;  // once unpacked, for further rows

  // What all steps of a tile have in common.
  struct Place {
    const char* rows;
    const QuantizedRow& layout;
    const WeightPiece& piece;
    int64_t column;
    float* sums;
    char* kept;
    ByteTable table;
  };

  // Products of rows with a group, in int32.
  template <int N, int G>
  struct Products {
    i32 acc[N][G];
    f32 scale[G];
    const char* x_scales;
    float* sums;

    QUIRE_MEMBER void add(int64_t row_bytes, int from, int to) const {
      QUIRE_UNROLL
      for (int i = from; i < to; ++i) {
        const int r = i / G, g = i % G;
        const f32 x_scale = set1(*reinterpret_cast<const float*>(x_scales + r * row_bytes));
        float* sum = sums + r * kPanelColumns + g * W;
        store(sum, load(sum) + __builtin_convertvector(acc[r][g], f32) * (x_scale * scale[g]));
      }
    }
  };

  // The bytes of a step of a group, which is the block's half `half` if there are two.
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

  // The products of the rows from kFirst on with one group, while `before` are added.
  template <int kFirst, bool kKeeps, int N, int G, int M>
  QUIRE_INLINE void multiply(const Place& place, int64_t index, Products<N, G>& now, const Products<M, G>* before) {
    const QuantizedRow& layout = place.layout;
    const int64_t group = place.piece.first + index, row_bytes = layout.bytes;
    const int64_t x_stride = row_bytes / int64_t(sizeof(XValue)), half = kGroup == 16 ? index % 2 : 0;
    const char* row = place.rows + kFirst * row_bytes;
    const char* block =
        place.piece.units + index * kGroup / QuantizedShape::kBlock * kBlockBytes + place.column * kUnitBytes;
    const char* ahead = block + place.piece.ahead + half * (kSteps * kUnitRowBytes * (kBits > 4 ? 2 : 1) / 2);
    const XValue* x = reinterpret_cast<const XValue*>(row) + group * kGroup;
    now.x_scales = row + layout.scales_at + group * int64_t(sizeof(float));
    now.sums = place.sums + kFirst * kPanelColumns + place.column;
    QUIRE_UNROLL
    for (int g = 0; g < G; ++g) now.scale[g] = place.piece.scale(index, place.column + g * W);
    QUIRE_UNROLL
    for (int r = 0; r < N; ++r) {
      const i32 lack = set1_lane(row + r * row_bytes + layout.lacks_at + group * int64_t(sizeof(int32_t)));
      QUIRE_UNROLL
      for (int g = 0; g < G; ++g) now.acc[r][g] = lack;
    }
    QUIRE_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      const int at = kBits == 8 || kGroup == 16 ? step : step / 2 + step % 2 * 4;
      Quads w[G];
      QUIRE_UNROLL
      for (int g = 0; g < G; ++g) {
        char* kept = place.kept + (step * G + g) * W * kUnitBytes;
        if (kFirst == 0 && (kBits > 4 || step % 2 == 0)) {
          __builtin_prefetch(ahead + step * kUnitRowBytes / (kBits > 4 ? 1 : 2) + g * W * kUnitBytes, 0, 2);
        }
        const i32 bytes =
            kFirst > 0 && kIsKept ? load_lanes(kept) : unpack(block + g * W * kUnitBytes, half, step, place.table);
        if constexpr (kKeeps && kIsKept) store_lanes(kept, bytes);
        w[g] = weight_quads(bytes);
      }
      QUIRE_UNROLL
      for (int r = 0; r < N; ++r) {
        const Quads value = set1_quad(x + r * x_stride + at * kUnitBytes);
        QUIRE_UNROLL
        for (int g = 0; g < G; ++g) now.acc[r][g] = dot4(now.acc[r][g], w[g], value);
      }
      if (before != nullptr) before->add(row_bytes, step * M * G / kSteps, (step + 1) * M * G / kSteps);
    }
  }

  template <int R, int G>
  static void run(const char* rows, const QuantizedRow& layout, const WeightPiece& piece, int64_t column, float* sums) {
    constexpr int A = R > kRowsAtOnce ? (R + 1) / 2 : R, B = R - A;  // rows of the first and the second half
    // Half a page off the sums, for a load waits for stores to places of the same last 12 bits.
    char* kept =
        piece.room + ((reinterpret_cast<intptr_t>(sums) + 2048 - reinterpret_cast<intptr_t>(piece.room)) & 4095);
    const Place place = {rows, layout, piece, column, sums, kept, ByteTable(kHasTable ? piece.table : kFloat4)};
    for (int r = 0; piece.first == 0 && r < R; ++r) {
      for (int g = 0; g < G; ++g) store(sums + r * kPanelColumns + column + g * W, set1(0));
    }
    Products<A, G> first;
    multiply<0, (B > 0), A, G, A>(place, 0, first, nullptr);
    if constexpr (B == 0) {
      for (int64_t index = 1; index < piece.groups; ++index) {
        Products<A, G> next;
        multiply<0, false, A, G, A>(place, index, next, &first);
        first = next;
      }
      first.add(layout.bytes, 0, A * G);
    } else {
      Products<B, G> second;
      multiply<A, false, B, G, A>(place, 0, second, &first);
      for (int64_t index = 1; index < piece.groups; ++index) {
        multiply<0, true, A, G, B>(place, index, first, &second);
        multiply<A, false, B, G, A>(place, index, second, &first);
      }
      second.add(layout.bytes, 0, B * G);
    }
  }
};

// minuses [rows][32] += the sums of x's groups times the mins.
static void add_mins(const char* rows, int64_t num_rows, const QuantizedRow& layout, const WeightPiece& piece,
                     float* minuses) {
  constexpr int64_t kVectors = kPanelColumns / W;
  for (int64_t row = 0; row < num_rows; ++row, minuses += kPanelColumns) {
    const float* x_sums = reinterpret_cast<const float*>(rows + row * layout.bytes + layout.sums_at) + piece.first;
    f32 sum[kVectors];
    QUIRE_UNROLL
    for (int64_t g = 0; g < kVectors; ++g) sum[g] = load(minuses + g * W);
    for (int64_t group = 0; group < piece.groups; ++group) {
      const f32 x_sum = set1(x_sums[group]);
      QUIRE_UNROLL
      for (int64_t g = 0; g < kVectors; ++g) {
        sum[g] = sum[g] + x_sum * load(piece.mins + group * kPanelColumns + g * W);
      }
    }
    QUIRE_UNROLL
    for (int64_t g = 0; g < kVectors; ++g) store(minuses + g * W, sum[g]);
  }
}

using RunTile = void(const char*, const QuantizedRow&, const WeightPiece&, int64_t, float*);

// The tile for these numbers of rows and vectors, of units as they lie in a panel or (is_plain) may be multiplied by.
static RunTile* quantized_tile(const QuantizedFormat& format, bool is_plain, bool has_halves, int64_t rows,
                               int64_t vectors) {
#if defined(__AVX512VNNI__)
  const bool is_whole = format.group > QuantizedShape::kBlock, is_narrow = format.group == 16;
  if (!is_plain && format.table != nullptr) return tile_function<GroupedTile<4, true, 32>>(rows, vectors);
  if (!is_plain && format.bits == 5) return tile_function<GroupedTile<5, false, 32>>(rows, vectors);
  if (!is_plain && format.bits == 6) return tile_function<GroupedTile<6, false, 16>>(rows, vectors);
  if (!is_plain) return tile_function<GroupedTile<4, false, 16>>(rows, vectors);
  if (rows == kGroupedRows && has_halves) return &GroupedTile<4, false, 32>::run<kGroupedRows, 2>;
  if (rows == kGroupedRows && !is_whole && !is_narrow) return &GroupedTile<8, false, 32>::run<kGroupedRows, 2>;
#endif
  return has_halves ? tile_function<QuantizedTile<true>>(rows, vectors)
                    : tile_function<QuantizedTile<false>>(rows, vectors);
}

// The sums of a task's rows and one panel. Pieces of the panel are unpacked once for all of them.
static void multiply_panel(const char* rows, int64_t num_rows, const PanelReader& reader, const QuantizedRow& layout,
                           const char* panel, float* sums) {
  alignas(64) char bytes[kPieceK * kPanelColumns];
  alignas(64) float scales[kPieceGroups * kPanelColumns], mins[kPieceGroups * kPanelColumns];
  alignas(64) float minuses[kTaskRows * kPanelColumns];
  const int64_t num_sums = num_rows * kPanelColumns, row_bytes = layout.bytes;
  for (int64_t i = 0; layout.groups == 0 && i < num_sums; i += W) store(sums + i, set1(0));
  if (layout.has_mins) {
    for (int64_t i = 0; i < num_sums; i += W) store(minuses + i, set1(0));
  }
  const bool has_halves = reader.has_plain_halves(), is_plain = has_halves || reader.shape.format.bits == 8;
  const bool has_stored_scales = reader.has_stored_scales();
  const int64_t row_blocks = ceil_div(num_rows, layout.group > QuantizedShape::kBlock ? kTileRows : kGroupedRows);
  // Integers are unpacked for all rows, or by the only tile.
  const bool is_unpacked = !is_plain && (row_blocks > 1 || !kOverlaps);
  const int64_t piece_groups = layout.group > kPieceK ? 1 : kPieceK / layout.group;
  // The tiles ask for what lies kBytesAhead of the integers they read: all but these lines, as they skip the fields.
  for (int64_t at = 0; at < reader.integers_at; at += 64) __builtin_prefetch(panel + kBytesAhead + at, 0, 2);
  for (int64_t first = 0; first < layout.groups; first += piece_groups) {
    const int64_t end = smaller(first + piece_groups, layout.groups);
    if (!has_stored_scales) reader.read_scales(panel, first, end, scales, mins);
    const int64_t begin_block = first * layout.group / QuantizedShape::kBlock;
    const int64_t end_block = ceil_div(end * layout.group, QuantizedShape::kBlock);
    const char* stored = panel + reader.integers_at;
    const char* units = is_unpacked ? reader.unpack(panel, begin_block, end_block, bytes)
                                    : stored + begin_block * reader.shape.block_bytes();
    // Unpacking has asked for kBytesAhead behind the piece.
    const char* behind = is_unpacked ? stored + end_block * reader.shape.block_bytes() : units;
    const bf16* stored_scales = reinterpret_cast<const bf16*>(panel) + first * kPanelColumns;
    const WeightPiece piece = {units,
                               has_stored_scales ? stored_scales : nullptr,
                               scales,
                               mins,
                               reader.shape.format.table,
                               bytes,
                               first,
                               end - first,
                               behind - units + kBytesAhead};
    for (int64_t block = 0; block < row_blocks; ++block) {
      const int64_t row = block * num_rows / row_blocks, height = (block + 1) * num_rows / row_blocks - row;
      for_tiles<QuantizedTile<false>>(height, 1, [&](int64_t vector, int64_t width) {
        const RunTile* run = quantized_tile(reader.shape.format, is_plain || is_unpacked, has_halves, height, width);
        run(rows + row * row_bytes, layout, piece, vector * W, sums + row * kPanelColumns);
      });
    }
    if (layout.has_mins) add_mins(rows, num_rows, layout, piece, minuses);
  }
  if (layout.has_mins) {
    for (int64_t i = 0; i < num_sums; i += W) store(sums + i, load(sums + i) - load(minuses + i));
  }
}

// What x's columns are multiplied with before a row is rotated; null: it is not.
static const float* factors_of(const QuantizedShape& shape, const char* weight) {
  return shape.format.is_rotated ? reinterpret_cast<const float*>(weight + shape.factors_at()) : nullptr;
}

static int64_t quantized_rows_bytes(const QuantizedShape& shape, int64_t rows) {
  return smaller(rows, kMostQuantizedRows) * QuantizedRow(shape).bytes;
}

// A row of x, in the basis of the weight if that has factors.
template <typename T>
static void quantize_x(const T* x, const int32_t* order, const float* factors, const QuantizedRow& layout, char* to) {
  if (factors != nullptr) {
    quantize_rotated_row(x, factors, layout, to);
  } else {
    quantize_row(x, order, layout, to);
  }
}

// The product of a task's rows, of which `rows` is the first one quantized; the first of all is row `first` of `to`.
static void run_quantized_task(const PanelReader& reader, const QuantizedRow& layout, const char* weight,
                               const char* rows, const ProductTask& task, const ProductOut& to, int64_t first) {
  alignas(64) float sums[kTaskRows * kPanelColumns];
  const int64_t panel_bytes = reader.shape.panel_bytes();
  for (int64_t panel = task.panel; panel < task.panel + task.panels; ++panel) {
    multiply_panel(rows, task.rows, reader, layout, weight + panel * panel_bytes, sums);
    finish(to, first + task.row, task.rows, panel * kPanelColumns, sums, kPanelColumns, kPanelColumns);
  }
}

template <typename T>
static void quantized_matmul(const QuantizedMatmulArgs& args) {
  const QuantizedRow layout(args.shape);
  const PanelReader reader(args.shape);
  const int64_t row_bytes = layout.bytes;
  const float* factors = factors_of(args.shape, args.weight);
  for (int64_t first = 0; first < args.rows; first += kMostQuantizedRows) {
    const int64_t rows = smaller(kMostQuantizedRows, args.rows - first);
    const T* x = static_cast<const T*>(args.x) + first * args.x_stride;
    for_rows(rows, layout.k, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        quantize_x(x + row * args.x_stride, args.order, factors, layout, args.rows_of_x + row * row_bytes);
      }
    });
    for_tasks(rows, args.to.n, layout.k, kTaskPanels, [&](const ProductTask& task, int) {
      run_quantized_task(reader, layout, args.weight, args.rows_of_x + task.row * row_bytes, task, args.to, first);
    });
  }
}

}  // namespace quire::QUIRE_ISA
