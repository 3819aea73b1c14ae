// Products on tiles (isa/x86/amx.h) of weights of 8 bits whose groups are all of k (smaller ones: amx_groups.h).
#pragma once

#include "matmul/tiles/amx.h"
#include "quantized/tiles/tile.h"
#include "quantized/tiles/unpack.h"

namespace quire::QUIRE_ISA {

// Fewer rows are read as fast without tiles, and have the same bits.
constexpr int64_t kFewestTileRows = 5;

QUIRE_INLINE bool is_multiplied_on_tiles(const QuantizedShape& shape, int64_t rows) {
  return rows >= kFewestTileRows && shape.format.bits == 8 && shape.is_whole && shape.k > 0 &&
         shape.format.min == Number::kNone;
}

// Turns the sums of some rows and a panel into float32, in place, and asks for lines meanwhile. The last step of k
// reads a row beyond its values, but multiplies that by zeros.
static void scale_sums(const char* rows, int64_t num_rows, const QuantizedRow& layout, const float* scales, char* sums,
                       const char* line, int64_t lines) {
  int64_t asked = 0;
  for (int64_t r = 0; r < num_rows; ++r, rows += layout.bytes, sums += kPanelColumns * 4) {
    const i32 lack = set1_lane(rows + layout.lacks_at);
    const f32 x_scale = set1(*reinterpret_cast<const float*>(rows + layout.scales_at));
    for (; asked * num_rows < (r + 1) * lines; ++asked) ask_for(Ask::kNext, line + asked * 64);
    QUIRE_UNROLL
    for (int64_t v = 0; v < kPanelColumns; v += W) {
      const f32 total = __builtin_convertvector(load_lanes(sums + v * 4) + lack, f32);
      store(reinterpret_cast<float*>(sums) + v, set1(0) + total * (x_scale * load(scales + v)));
    }
  }
}

// As run_quantized_task.
static void run_whole_task(const PanelReader& reader, const QuantizedRow& layout, const char* weight, const char* rows,
                           const ProductTask& task, const ProductOut& to, int64_t first, char* sums) {
  const int64_t panel_bytes = reader.shape.panel_bytes();
  const char* panels = weight + task.panel * panel_bytes;
  const auto rows_of = [&](int64_t row, int64_t count, int64_t unit, int64_t) -> TileRows {
    return {rows + row * layout.bytes + unit * kUnitBytes, layout.bytes, count};
  };
  const auto write = [&](int64_t row, int64_t count, int64_t panel, char* products, const char* line, int64_t lines) {
    alignas(64) float scales[kPanelColumns], mins[kPanelColumns];
    reader.read_scales(panels + panel * panel_bytes, 0, 1, scales, mins);
    scale_sums(rows + row * layout.bytes, count, layout, scales, products, line, lines);
    finish_panel(to, first + task.row + row, count, (task.panel + panel) * kPanelColumns,
                 reinterpret_cast<const float*>(products));
  };
  run_on_tiles<int8_t>(task, layout.group / kUnitBytes, panels + reader.integers_at, panel_bytes, sums, rows_of, write);
}

}  // namespace quire::QUIRE_ISA
