// The tasks of a product of bf16 on tiles: what run_task of matmul/matmul.h is elsewhere.
#pragma once

#include "matmul/amx_tiles.h"

namespace quire::QUIRE_ISA {

// Steps of k after which sums are parked: of many rows, so that a block of them stays in the first-level cache while
// panels pass.
constexpr int64_t kManyRowsSteps = 16, kFewRowsSteps = 256;
constexpr int64_t kBytesAheadTiles = 8192;
constexpr int64_t kTileStageBytes = kAmxMostRows * (kFewRowsSteps + 1) * kAmxRowBytes;

constexpr int64_t kAmxScratchBytes = kTileStageBytes + kTaskRows * kTaskPanels * kPanelColumns * 4;

// Whether tiles can be loaded from rows where they are: whole steps, in whole cache lines, which do not share a few
// sets of the cache.
QUIRE_INLINE bool is_read_in_place(const bf16* x, int64_t stride, int64_t k) {
  const int64_t bytes = stride * int64_t(sizeof(bf16));
  return reinterpret_cast<uintptr_t>(x) % 64 == 0 && k % (2 * kAmxUnits) == 0 && bytes % 64 == 0 && bytes % 2048 != 0;
}

// Elements [begin, end) of k of some rows -> `to`, whole steps padded with zeros.
static TileRows stage_rows(const bf16* x, int64_t x_stride, int64_t rows, int64_t begin, int64_t end, char* to) {
  const int64_t bytes = (end - begin) * int64_t(sizeof(bf16)), padded = ceil_div(bytes, kAmxRowBytes) * kAmxRowBytes;
  const int64_t stride = padded / 64 % 2 == 0 ? padded + 64 : padded;  // an odd number of cache lines
  for (int64_t r = 0; r < rows; ++r) {
    std::memcpy(to + r * stride, x + r * x_stride + begin, size_t(bytes));
    std::memset(to + r * stride + bytes, 0, size_t(padded - bytes));
  }
  return {to, stride, rows};
}

static void run_amx_task(const MatmulArgs& args, const ProductTask& task, char* scratch) {
  const int64_t k = args.weight.k, units = ceil_div(k, 2), panel_bytes = units * kUnitRowBytes;
  const int64_t block_units = (task.rows > kAmxMostRows ? kManyRowsSteps : kFewRowsSteps) * kAmxUnits;
  const bool is_parked = units > block_units, in_place = is_read_in_place(static_cast<const bf16*>(args.x), args.x_stride, k);
  float* parked = reinterpret_cast<float*>(scratch + kTileStageBytes);
  Tiles tiles;
  for (int64_t unit = 0; unit < units || unit == 0; unit += block_units) {
    const int64_t count = smaller(block_units, units - unit);
    const bool is_last = unit + count == units;
    for (int64_t row = 0; row < task.rows; row += kAmxMostRows) {
      const int64_t rows = smaller(kAmxMostRows, task.rows - row);
      const bf16* from = static_cast<const bf16*>(args.x) + (task.row + row) * args.x_stride;
      const TileRows x = k == 0 ? TileRows{nullptr, 0, rows}
                         : in_place
                             ? TileRows{reinterpret_cast<const char*>(from + 2 * unit), 2 * args.x_stride, rows}
                             : stage_rows(from, args.x_stride, rows, 2 * unit, smaller(2 * (unit + count), k), scratch);
      for (int64_t p = 0; p < task.panels; ++p) {
        const char* panel = args.weight.data + (task.panel + p) * panel_bytes + unit * kUnitRowBytes;
        float* sums = parked + (is_parked ? (row / kAmxMostRows * task.panels + p) * kAmxMostRows * kPanelColumns : 0);
        const TileRequests requests = {row == 0 ? Ask::kNext : Ask::kNot, panel + kBytesAheadTiles, kStepBytes};
        add_panel<bf16>(tiles, x, panel, count, reinterpret_cast<char*>(sums), kPanelColumns * 4, unit == 0, requests);
        if (is_last) {
          finish(args.to, task.row + row, rows, (task.panel + p) * kPanelColumns, sums, kPanelColumns, kPanelColumns);
        }
      }
    }
  }
  tiles.release();
}

}  // namespace quire::QUIRE_ISA
