// y = x W^T + bias on quantized weights (quantized/layout.h), x being quantized too, each group of a row by itself, in
// the basis of the weight (quantized/rotation.h).
//
// The products of a group are summed in int32, where no order matters. Those sums are scaled and added up in float32,
// group after group, without fused operations; so are, apart, the sums of x times the mins, which are subtracted in the
// end. So an element has the same bits in any batch and in every variant.
#pragma once

#include "elementwise/norm.h"
#include "isa/rows.h"
#include "quantized/activations.h"
#include "quantized/requests.h"
#include "quantized/tiles/grouped.h"
#include "quantized/tiles/mins.h"
#if defined(QUIRE_AMX)
#include "quantized/tiles/amx.h"
#include "quantized/tiles/few_rows.h"
#endif

namespace quire::QUIRE_ISA {

// Rows of x that are kept quantized at once: enough that reading the weights anew for the next ones costs nothing.
constexpr int64_t kMostQuantizedRows = 512;

// Adds the products of a task's rows and a piece of a panel to their sums. The tiles of one block of rows ask for all
// (small ones of groups for their shares of it), or each tile for its share.
static void multiply_piece(const char* rows, int64_t num_rows, const PanelReader& reader, const QuantizedRow& layout,
                           bool is_unpacked, bool are_shared, WeightPiece& piece, const PanelOut& out, float* sums) {
  const bool is_plain = is_unpacked || reader.is_plain(), has_halves = !is_unpacked && reader.has_plain_halves();
  const TileShape& shape = shape_of(layout, num_rows);
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
      if (are_shared || (kIsAvx2 && !layout.is_whole)) {
        const int64_t passes = kVectorsPerPanel / width;  // of a block
        piece.share = (are_shared ? block * passes : 0) + vector / width;
        piece.shares = (are_shared ? row_blocks : 1) * passes;
        piece.ahead = ahead - vector * W * kUnitBytes;
      }
      RunTile* const run = quantized_tile(reader.shape, is_plain, has_halves, height, width);
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
  const Requests requests(reader, layout, num_rows, piece_groups);
  requests.ask_for_fields(reader, panel);
  const char* integers = panel + reader.integers_at;
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
      const WeightPiece piece = {groups.units, stored_scales, scales, mins, nullptr, first, end - first};
      multiply_groups(tiles, rows, num_rows, layout, piece, groups, out, sums);
      if (layout.has_mins) add_mins(rows, num_rows, layout, piece, minuses);
      continue;
    }
#endif
    const char* units = integers + begin_block * reader.shape.block_bytes();
    const char* read = units;
    if (is_unpacked) {  // which asks for kPanelAhead behind the piece, unless tiles ask for that in line
      read = integers + end_block * reader.shape.block_bytes();
      units = reader.unpack(panel, begin_block, end_block, requests.line_bytes > 0 ? 0 : kPanelAhead, bytes);
    }
    WeightPiece piece = {units, stored_scales, scales, mins, reader.shape.format.table, first, end - first};
    requests.add_to(piece, integers, read);
    multiply_piece(rows, num_rows, reader, layout, is_unpacked, requests.are_shared, piece, out, sums);
    if (layout.has_mins) add_mins(rows, num_rows, layout, piece, minuses);
  }
  if (layout.has_mins) {
    for (int64_t i = 0; i < num_sums; i += W) store(sums + i, load(sums + i) - load(minuses + i));
  }
}

static int64_t quantized_rows_bytes(const QuantizedShape& shape, int64_t rows) {
  return smaller(rows, kMostQuantizedRows) * QuantizedRow(shape).bytes;
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
        quantize_activated(args, x + row * args.x_stride, factors, layout, args.rows_of_x + row * row_bytes);
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
