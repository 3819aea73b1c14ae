// The tasks of a product of bf16 on tiles: what run_task of matmul/matmul.h is elsewhere.
#pragma once

#include "matmul/tiles/amx.h"

namespace quire::QUIRE_ISA {

constexpr int64_t kTileStageBytes = kBlockRows * (kFewRowsSteps + 1) * kAmxRowBytes;
constexpr int64_t kAmxScratchBytes = kTileStageBytes + kTileSums * 4;

// Whether tiles can be loaded from rows where they are: whole steps, in whole cache lines, which do not share a few
// sets of the cache.
QUIRE_INLINE bool is_read_in_place(const bf16* x, int64_t stride, int64_t k) {
  const int64_t bytes = stride * int64_t(sizeof(bf16));
  return reinterpret_cast<uintptr_t>(x) % 64 == 0 && k % (2 * kAmxUnits) == 0 && bytes % 64 == 0 && bytes % 2048 != 0;
}

// `count` elements of each of some rows -> `to`, whole steps padded with zeros.
static TileRows stage_rows(const bf16* x, int64_t x_stride, int64_t rows, int64_t count, char* to) {
  if (count == 0) return {to, 0, rows};  // x may be null
  const int64_t bytes = count * int64_t(sizeof(bf16)), padded = ceil_div(bytes, kAmxRowBytes) * kAmxRowBytes;
  const int64_t stride = (padded / 64 | 1) * 64;  // odd numbers of cache lines keep rows out of each other's sets
  for (int64_t r = 0; r < rows; ++r) {
    std::memcpy(to + r * stride, x + r * x_stride, size_t(bytes));
    std::memset(to + r * stride + bytes, 0, size_t(padded - bytes));
  }
  return {to, stride, rows};
}

static void run_amx_task(const MatmulArgs& args, const ProductTask& task, char* scratch) {
  const int64_t k = args.weight.k, units = ceil_div(k, kPerUnit<bf16>), panel_bytes = units * kUnitRowBytes;
  const bf16* x = static_cast<const bf16*>(args.x) + task.row * args.x_stride;
  const bool in_place = is_read_in_place(static_cast<const bf16*>(args.x), args.x_stride, k);
  const auto rows_of = [&](int64_t row, int64_t rows, int64_t unit, int64_t count) -> TileRows {
    const bf16* from = x + row * args.x_stride + unit * kPerUnit<bf16>;
    if (in_place) return {reinterpret_cast<const char*>(from), args.x_stride * int64_t(sizeof(bf16)), rows};
    const int64_t elements = smaller(count * kPerUnit<bf16>, k - unit * kPerUnit<bf16>);
    return stage_rows(from, args.x_stride, rows, elements, scratch);
  };
  const auto write = [&](int64_t row, int64_t rows, int64_t panel, const char* sums, const char*, int64_t) {
    finish_panel(args.to, task.row + row, rows, (task.panel + panel) * kPanelColumns,
                 reinterpret_cast<const float*>(sums));
  };
  run_on_tiles<bf16>(task, units, args.weight.data + task.panel * panel_bytes, panel_bytes, scratch + kTileStageBytes,
                     rows_of, write);
}

}  // namespace quire::QUIRE_ISA
