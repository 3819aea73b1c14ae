// y = x W^T + bias on quantized weights (quantized/layout.h), x being quantized too, each group of a row by itself, in
// the basis of the weight (quantized/rotation.h).
//
// The products of a group are summed in int32, where no order matters. Those sums are scaled and added up in float32,
// group after group, without fused operations; so are, apart, the sums of x times the mins, which are subtracted in the
// end. So an element has the same bits in any batch and in every variant.
#pragma once

#include "elementwise/activation.h"
#include "elementwise/norm.h"
#include "isa/rows.h"
#include "quantized/rotation.h"
#include "quantized/tiles/grouped.h"
#include "quantized/tiles/mins.h"
#if defined(QUIRE_AMX)
#include "quantized/tiles/amx.h"
#include "quantized/tiles/amx_groups.h"
#include "quantized/tiles/few_rows.h"
#endif

namespace quire::QUIRE_ISA {

#if !defined(QUIRE_AMX)
QUIRE_INLINE constexpr bool has_groups_on_tiles(const QuantizedShape&, int64_t) { return false; }
#endif

// A largest value up to this counts as zero: 127 divided by it might be infinite.
constexpr float kQuantizedZero = 1e-30f;

// Rows of x that are kept quantized at once: enough that reading the weights anew for the next ones costs nothing.
constexpr int64_t kMostQuantizedRows = 512;

// The largest magnitude of some elements; infinity if one is not finite.
template <typename T>
QUIRE_INLINE float largest_of(const T* row, int64_t k) {
  const i32 infinity = i32{} + 0x7f800000;
  f32 largest[2] = {};  // two chains of operations, which overlap
  const auto see = [&](int chain, f32 v) __attribute__((always_inline)) {
    const i32 bits = as_int(abs(v));  // those of NaN are above those of infinity
    largest[chain] = max(as_float(bits < infinity ? bits : infinity), largest[chain]);
  };
  int64_t i = 0;
  for (; i + 2 * W <= k; i += 2 * W) {
    see(0, load(row + i));
    see(1, load(row + i + W));
  }
  for (; i < k; i += W) see(0, load_some(row + i, smaller(W, k - i)));
  return reduce_max(max(largest[0], largest[1]));
}

// What the sum of a group's products begins with: minus its values, whose sum is `total`, times what the format or the
// products subtract from stored integers.
QUIRE_INLINE int32_t lack_of([[maybe_unused]] f32 values, int32_t total, const QuantizedRow& layout) {
  const int32_t zero = int32_t(layout.zero);
#if defined(QUIRE_SIMD_AVX2) && !defined(__AVXVNNI__)
  if (!layout.has_bytes) return start_of_halves(values, layout.bits == 4 ? zero : 1 << (layout.bits - 1));
#endif
#if defined(QUIRE_SIMD_NEON)
  if (!layout.has_bytes) return -total * zero;
#endif
  return -total * (zero - ByteSums::kZero);
}

// Groups that are quantized together: so their divisions take a few operations.
constexpr int64_t kGroupsAtOnce = 16;

// The values, lack and sum of a group; `inverse` is 0 where all values are.
template <typename Value, typename T>
QUIRE_INLINE void round_group(const T* from, int64_t count, int64_t size, float scale, float inverse,
                              const QuantizedRow& layout, int64_t group, char* row) {
  Value* values = reinterpret_cast<Value*>(row) + group * size;
  const f32 factor = set1(inverse), shifter = set1(12582912.0f);  // 1.5 * 2^23: rounds
  i32 sums_of[2] = {};
  const auto round = [&](int chain, int64_t i, f32 v) __attribute__((always_inline)) {
    const i32 rounded = as_int(v * factor + shifter) - as_int(shifter);
    sums_of[chain] = sums_of[chain] + rounded;
    store_values(values + i, rounded, std::make_index_sequence<W>());
  };
  const bool is_zero = inverse == 0;
  int64_t i = 0;
  for (; i + 2 * W <= count && !is_zero; i += 2 * W) {
    round(0, i, load(from + i));
    round(1, i + W, load(from + i + W));
  }
  for (; i < size; i += W) {
    round(0, i, i < count && !is_zero ? load_some(from + i, smaller(W, count - i)) : set1(0));
  }
  const f32 sums = __builtin_convertvector(sums_of[0] + sums_of[1], f32);  // below 2^24
  const float total = reduce_add(sums);
  reinterpret_cast<float*>(row + layout.scales_at)[group] = scale;
  reinterpret_cast<int32_t*>(row + layout.lacks_at)[group] = lack_of(sums, int32_t(total), layout);
  if (layout.has_mins) reinterpret_cast<float*>(row + layout.sums_at)[group] = total * scale;
}

// A value is x * (127 / largest) to the nearest (even) integer, the scale largest / 127. A group that holds something
// not finite has the scale NaN, and zeros as values.
template <typename Value, typename T>
static void quantize_row_as(const T* x, const int32_t* order, const QuantizedRow& layout, char* row) {
  constexpr int64_t kBlock = QuantizedShape::kBlock;
  T picked[kGroupsAtOnce * kBlock];
  alignas(64) float largest[kGroupsAtOnce] = {}, scales[kGroupsAtOnce], inverses[kGroupsAtOnce];
  for (int64_t first = 0; first < layout.groups; first += kGroupsAtOnce) {
    const int64_t begin = first * layout.group, num_groups = smaller(kGroupsAtOnce, layout.groups - first);
    const int64_t num_values = smaller(num_groups * layout.group, layout.k - begin);
    for (int64_t i = 0; order != nullptr && i < num_values; ++i) picked[i] = x[order[begin + i]];
    const T* from = order != nullptr ? picked : x + begin;
    const auto count = [&](int64_t g) { return smaller(layout.group, num_values - g * layout.group); };
    for (int64_t g = 0; g < num_groups; ++g) {
      const T* values = from + g * layout.group;
      largest[g] = count(g) == kBlock ? largest_of(values, kBlock) : largest_of(values, count(g));
    }
    for (int64_t g = 0; g < num_groups; g += W) {
      const f32 most = load(largest + g) + (load(largest + g) - load(largest + g));  // NaN instead of infinity
      store(scales + g, most / 127);
      store(inverses + g, as_float(as_int(127 / most) & (i32)(most > kQuantizedZero)));
    }
    for (int64_t g = 0; g < num_groups; ++g) {
      const T* values = from + g * layout.group;
      if (layout.group == kBlock && count(g) == kBlock) {
        round_group<Value>(values, kBlock, kBlock, scales[g], inverses[g], layout, first + g, row);
      } else {
        round_group<Value>(values, count(g), layout.group, scales[g], inverses[g], layout, first + g, row);
      }
    }
  }
}

template <typename T>
static void quantize_row(const T* x, const int32_t* order, const QuantizedRow& layout, char* row) {
  using Value = SumsOf<4, false>::Value;
  if (layout.has_bytes) return quantize_row_as<ByteSums::Value>(x, order, layout, row);
  quantize_row_as<Value>(x, order, layout, row);
}

// The same of a row in the basis of a rotated weight.
template <typename T>
static void quantize_rotated_row(const T* x, const float* factors, const QuantizedRow& layout, char* row) {
  alignas(64) float rotated[kMostQuantizedK];  // as much as is used is touched
  rotate(x, factors, layout.k, rotated);
  quantize_row<float>(rotated, nullptr, layout, row);
}

// The most blocks of rows that share requests, where the nearest cache is large and where it is not: more multiply for
// so long that one of them may as well read. Nothing asks for a task's first piece then, so that tasks are larger.
constexpr int64_t kSharingBlocks = 4, kFewSharingBlocks = 2, kSharingTaskPanels = kAsksNear ? 32 : kTaskPanels;
// The most bytes of a piece for which small tiles share requests: two of them stay in the second-level cache.
constexpr int64_t kMostShared = W == 8 ? 256 * 1024 : 0;

QUIRE_INLINE const TileShape& shape_of(const QuantizedRow& layout) {
  return layout.group > QuantizedShape::kBlock ? kByteShape : kGroupedShape;
}

// Whether tiles read integers as they are stored, and unpack those of fewer than 8 bits for each block of rows anew;
// else they are unpacked once for all rows. Unpacking reads in bursts, tiles read all the time: up to a dozen rows that
// makes up for unpacking twice.
static bool is_read_as_stored(const PanelReader& reader, int64_t rows) {
  if (reader.is_plain()) return reader.shape.format.bits == 8 || rows < kFewestUnpackedHalves || !asks_in_line();
  return kUnpacksInRegisters && rows <= kGroupedShape.rows * (W == 16 && asks_in_line() ? 3 : 2) / 2;
}

// Whether the tiles of this product ask as asks_in_line() says. Those of 256 bits do also where integers are unpacked
// first.
static bool asks_in_line(const PanelReader& reader, int64_t rows) {
  const QuantizedShape& shape = reader.shape;
  if (shape.k == 0 || shape.format.group > QuantizedShape::kBlock || has_groups_on_tiles(shape, rows)) return false;
  return asks_in_line() && (W == 8 || is_read_as_stored(reader, rows));
}

// Whether each of several passes through a piece of a panel asks for its share of the next piece, which then comes
// while all rows are multiplied.
static bool shares_requests(const PanelReader& reader, const QuantizedRow& layout, int64_t rows) {
  const TileShape& shape = shape_of(layout);
  const int64_t blocks = ceil_div(rows, shape.rows);
  if (asks_in_line(reader, rows)) return blocks > 1 || shape.width(int(rows)) < kVectorsPerPanel;
  if (blocks == 1 || !is_read_as_stored(reader, rows)) return false;
  if (kAsksNear) return blocks <= (has_large_nearest_cache() ? kSharingBlocks : kFewSharingBlocks);
  return layout.group > QuantizedShape::kBlock && layout.group * kPanelColumns <= kMostShared;
}

// What the tiles ask for while they multiply by a panel: how, and how many bytes ahead; or shares of the next piece.
struct Requests {
  Ask ask = Ask::kNext;
  int64_t ahead = kPanelAhead;
  bool are_shared;

  // Of `rows` rows, by pieces that have `piece_bytes` in the panel.
  QUIRE_MEMBER Requests(const PanelReader& reader, const QuantizedRow& layout, int64_t rows, int64_t piece_bytes)
      : are_shared(shares_requests(reader, layout, rows)) {
    if (are_shared) {
      ahead = piece_bytes;
    } else if (W == 16 && is_intel() && layout.group > QuantizedShape::kBlock) {
      ahead = line_ahead(rows);
    }
    if (kAsksNear && has_large_nearest_cache()) {
      ask = is_intel() ? Ask::kNext : Ask::kNearest;
    } else if (kAsksNear && reader.shape.format.bits == 8) {
      // The processor's own requests stay ahead, the less so the longer each group's scales and mins take in between.
      if (rows <= kUnfetchedRows - (layout.group <= QuantizedShape::kBlock) - layout.has_mins) ask = Ask::kNot;
    }
  }
};

// Adds the products of a task's rows and a piece of a panel to their sums. The tiles of one block of rows ask for all
// (small ones of groups for their shares of it), or each tile for its share.
static void multiply_piece(const char* rows, int64_t num_rows, const PanelReader& reader, const QuantizedRow& layout,
                           bool is_unpacked, bool are_shared, WeightPiece& piece, const PanelOut& out, float* sums) {
  const bool is_plain = is_unpacked || reader.is_plain(), has_halves = !is_unpacked && reader.has_plain_halves();
  const TileShape& shape = shape_of(layout);
  const int64_t row_blocks = ceil_div(num_rows, shape.rows), ahead = piece.ahead;
  for (int64_t block = 0; block < row_blocks; ++block) {
    const int64_t row = block * num_rows / row_blocks, height = (block + 1) * num_rows / row_blocks - row;
    out.expect(row, height, piece.first + piece.groups == layout.groups);
    if (out.is_written_by_tiles(layout, num_rows)) {
      piece.out = reinterpret_cast<bf16*>(out.line(row));
      piece.out_stride = out.to.stride;
      piece.bias = out.to.bias == nullptr ? nullptr : out.to.bias + out.column;
    }
    for_tiles(shape, height, 1, [&](int64_t vector, int64_t width) {
      if (are_shared || (W == 8 && layout.group <= QuantizedShape::kBlock)) {
        const int64_t passes = kVectorsPerPanel / width;  // of a block
        piece.share = (are_shared ? block * passes : 0) + vector / width;
        piece.shares = (are_shared ? row_blocks : 1) * passes;
        piece.ahead = ahead - vector * W * kUnitBytes;
      }
      RunTile* const run = quantized_tile(reader.shape.format, is_plain, has_halves, height, width);
      run(rows + row * layout.bytes, layout, piece, vector * W, sums + row * kPanelColumns);
    });
    if (!are_shared) piece.ask = Ask::kNot;
  }
}

// The sums of a task's rows and one panel. Pieces of the panel are unpacked once for all of them.
static void multiply_panel([[maybe_unused]] Tiles& tiles, const char* rows, int64_t num_rows, const PanelReader& reader,
                           const QuantizedRow& layout, const char* panel, const PanelOut& out, float* sums) {
  alignas(64) char bytes[kPieceK * kPanelColumns];
  alignas(64) float scales[kMostPieceGroups * kPanelColumns], mins[kMostPieceGroups * kPanelColumns];
  alignas(64) float minuses[kTaskRows * kPanelColumns];
  const int64_t num_sums = num_rows * kPanelColumns;
  for (int64_t i = 0; layout.groups == 0 && i < num_sums; i += W) store(sums + i, set1(0));
  if (layout.has_mins) {
    for (int64_t i = 0; i < num_sums; i += W) store(minuses + i, set1(0));
  }
  const StoredScales stored_scales = reader.stored_scales(panel, true);
  // Integers are unpacked for all rows, or by the tiles.
  const bool is_unpacked = !is_read_as_stored(reader, num_rows);
  const bool is_of_one_tile = num_rows <= kGroupedShape.rows && !is_unpacked;
  const int64_t piece_k = is_of_one_tile && num_rows >= kFewestLongPieceRows ? kLongPieceK : kPieceK;
  const int64_t piece_groups = layout.group > piece_k ? 1 : piece_k / layout.group;
  const int64_t piece_bytes = piece_groups * layout.group / QuantizedShape::kBlock * reader.shape.block_bytes();
  const Requests requests(reader, layout, num_rows, piece_bytes);
  // The tiles ask for what lies ahead of the integers they read: all but these lines, as they skip the fields.
  const Ask ask_fields = requests.ask == Ask::kNot ? Ask::kNext : requests.ask;
  const bool is_in_line = requests.ask != Ask::kNot && asks_in_line(reader, num_rows);
  for (int64_t at = 0; at < reader.integers_at && !is_in_line; at += 64) {
    ask_for(ask_fields, panel + requests.ahead + at);
  }
  const int64_t passed = requests.are_shared ? piece_groups : 0;  // what is asked for while one piece is multiplied
  const int64_t line_bytes = is_in_line ? reader.shape.panel_bytes() / layout.groups : 0;
  for (int64_t first = 0; first < layout.groups; first += piece_groups) {
    const int64_t end = smaller(first + piece_groups, layout.groups);
    if (stored_scales.numbers == nullptr) {
      reader.read_scales(panel, first, end, scales, mins);
    } else if (layout.has_mins) {
      reader.read_mins(panel, first, end, scales, mins);
    }
    const int64_t begin_block = first * layout.group / QuantizedShape::kBlock;
    const int64_t end_block = ceil_div(end * layout.group, QuantizedShape::kBlock);
#if defined(QUIRE_AMX)
    if (has_groups_on_tiles(reader.shape, num_rows)) {
      const GroupPiece groups(reader, panel, begin_block, end_block, num_rows, bytes);
      const WeightPiece piece = {groups.units, stored_scales, scales, mins, nullptr, first,
                                 end - first,  Ask::kNot,     0,      0,    1};
      multiply_groups(tiles, rows, num_rows, layout, piece, groups, out, sums);
      if (layout.has_mins) add_mins(rows, num_rows, layout, piece, minuses);
      continue;
    }
#endif
    const char* stored = panel + reader.integers_at;
    const char* units = is_unpacked ? reader.unpack(panel, begin_block, end_block, is_in_line ? 0 : kPanelAhead, bytes)
                                    : stored + begin_block * reader.shape.block_bytes();
    // Unpacking has asked for kPanelAhead behind the piece, unless tiles ask for that in line.
    const char* behind = is_unpacked ? stored + end_block * reader.shape.block_bytes() : units;
    WeightPiece piece = {units,
                         stored_scales,
                         scales,
                         mins,
                         reader.shape.format.table,
                         first,
                         end - first,
                         requests.ask,
                         is_in_line ? stored - units + line_ahead(num_rows) + (first + passed) * line_bytes
                                    : behind - units + requests.ahead,
                         0,
                         1,
                         line_bytes};
    multiply_piece(rows, num_rows, reader, layout, is_unpacked, requests.are_shared, piece, out, sums);
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
                               const char* rows, const ProductTask& task, const ProductOut& to, int64_t first,
                               [[maybe_unused]] int thread) {
#if defined(QUIRE_AMX)
  if (is_multiplied_on_tiles(reader.shape, task.rows)) {
    char* sums = static_cast<char*>(thread_scratch(thread, kTileSums * 4));
    return run_whole_task(reader, layout, weight, rows, task, to, first, sums);
  }
  if (is_of_few_rows(reader.shape, task.rows)) {
    return run_task_of_few_rows(reader, layout, weight, rows, task, to, first);
  }
#endif
  alignas(64) float sums[kTaskRows * kPanelColumns];
  const int64_t panel_bytes = reader.shape.panel_bytes();
  auto* multiply = &multiply_panel;
#if defined(QUIRE_AMX)
  if (streams_groups(reader.shape, task.rows)) multiply = &stream_panel;
#endif
  Tiles tiles;
  for (int64_t panel = task.panel; panel < task.panel + task.panels; ++panel) {
    const PanelOut out = {to, first + task.row, panel * kPanelColumns};
    multiply(tiles, rows, task.rows, reader, layout, weight + panel * panel_bytes, out, sums);
    if (out.is_written_by_tiles(layout, task.rows)) continue;
    finish(to, out.row, task.rows, out.column, sums, kPanelColumns, kPanelColumns);
  }
  tiles.release();
}

// The same of what an activation makes of the row.
template <typename T>
static void quantize_activated(const QuantizedMatmulArgs& args, const T* x, const float* factors,
                               const QuantizedRow& layout, char* to) {
  alignas(64) T activated[kMostQuantizedK];  // as much as is used is touched
  activate_one(*args.activation, args.is_gated, x, layout.k, activated);
  quantize_x<T>(activated, args.order, factors, layout, to);
}

// In how many parts rows are quantized: each long enough to be claimed, and enough for all threads to end together.
static int64_t num_parts(int64_t rows, int64_t k) {
  return smaller(smaller(rows, 16 * num_threads()), 1 + rows * k / 768);
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
    const int64_t parts = num_parts(rows, layout.k);
    auto quantize_part = [&](int64_t part) {
      for (int64_t row = part * rows / parts; row < (part + 1) * rows / parts; ++row) {
        if (args.norm != nullptr) norm_row<T>(*args.norm, first + row);
        const T* from = x + row * args.x_stride;
        char* to = args.rows_of_x + row * row_bytes;
        if (args.activation != nullptr) {
          quantize_activated(args, from, factors, layout, to);
        } else {
          quantize_x(from, args.order, factors, layout, to);
        }
      }
    };
    Preparation quantized(parts, num_threads());
    const int64_t task_panels = shares_requests(reader, layout, rows) ? kSharingTaskPanels : kTaskPanels;
    for_tasks(rows, args.to.n, layout.k, task_panels, [&](const ProductTask& task, int thread) {
      quantized.finish(quantize_part);
      run_quantized_task(reader, layout, args.weight, args.rows_of_x + task.row * row_bytes, task, args.to, first,
                         thread);
    });
  }
}

}  // namespace quire::QUIRE_ISA
