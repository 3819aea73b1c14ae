// Products of tiles (isa/x86/amx.h): rows of x times the panels of a packed or quantized weight, whose units of four
// bytes lie as tiles want them.
//
// A step is what one product of tiles adds up: 16 units of k. Of bf16 a step is a sum of its own, the even elements and
// the odd ones each in order, that is then added to those before. A row has the same steps in any batch.
#pragma once

#include "isa/x86/amx.h"
#include "matmul/tiles/tile.h"

namespace quire::QUIRE_ISA {

constexpr int64_t kStepBytes = kAmxUnits * kUnitRowBytes;  // of a panel

// Rows of x as tiles read them: whole steps, `stride` bytes apart.
struct TileRows {
  const char* data;
  int64_t stride, count;
};

// What is asked for while a panel is multiplied: `step` bytes from `at` on with each of its steps, and `rest` bytes
// behind those while its sums are finished.
struct TileRequests {
  Ask ask;
  const char* at;
  int64_t step, rest;
};

// Adds `steps` steps to the sums in tiles 0 and 1, and if kHasSecond those of rows 16 and up to tiles 2 and 3. Then a
// fourth of a step's requests follows each load: all at once, they would keep the next loads waiting.
template <typename T, bool kHasSecond, Ask kAsk>
static void add_asking(const char* x, int64_t x_stride, const char* panel, int64_t steps, TileRequests requests) {
  const T* type = nullptr;
  const auto ask = [&](int64_t from, int64_t end) __attribute__((always_inline)) {
    if constexpr (kAsk != Ask::kNot) {
      for (int64_t at = from; at < end; at += 64) ask_for(kAsk, requests.at + at);
    }
  };
  const int64_t fourth = kHasSecond ? requests.step / 256 * 64 : 0;
  for (int64_t step = 0; step < steps; ++step, x += kAmxRowBytes, panel += kStepBytes) {
    stream_tile<6>(panel, kUnitRowBytes);
    if constexpr (kHasSecond) ask(0, fourth);
    load_tile<4>(x, x_stride);
    multiply_tiles<0, 4, 6>(type);
    stream_tile<7>(panel + kAmxRowBytes, kUnitRowBytes);
    if constexpr (kHasSecond) ask(fourth, 2 * fourth);
    multiply_tiles<1, 4, 7>(type);
    if constexpr (kHasSecond) {
      load_tile<5>(x + kAmxRows * x_stride, x_stride);
      ask(2 * fourth, 3 * fourth);
      multiply_tiles<2, 5, 6>(type);
      multiply_tiles<3, 5, 7>(type);
    }
    ask(3 * fourth, requests.step);
    if constexpr (kAsk != Ask::kNot) requests.at += requests.step;
  }
}

template <typename T, bool kHasSecond>
static void add_steps(const TileRows& x, const char* panel, int64_t units, const TileRequests& requests) {
  const int64_t steps = units / kAmxUnits, rest = units % kAmxUnits;
  if (requests.ask == Ask::kNearest) {
    add_asking<T, kHasSecond, Ask::kNearest>(x.data, x.stride, panel, steps, requests);
  } else if (requests.ask == Ask::kNext) {
    add_asking<T, kHasSecond, Ask::kNext>(x.data, x.stride, panel, steps, requests);
  } else {
    add_asking<T, kHasSecond, Ask::kNot>(x.data, x.stride, panel, steps, requests);
  }
  if (rest == 0) return;
  alignas(64) char last[kStepBytes];
  std::memcpy(last, panel + steps * kStepBytes, size_t(rest * kUnitRowBytes));
  std::memset(last + rest * kUnitRowBytes, 0, size_t((kAmxUnits - rest) * kUnitRowBytes));
  add_asking<T, kHasSecond, Ask::kNot>(x.data + steps * kAmxRowBytes, x.stride, last, 1, {Ask::kNot, nullptr, 0, 0});
}

// sums [x.count][32], rows `sums_stride` bytes apart, += the products of up to kAmxMostRows rows with `units` units of
// a panel; or, from zero, = them. What rows have beyond the units, up to a whole step, must be zero.
template <typename T>
static void add_panel(Tiles& tiles, const TileRows& x, const char* panel, int64_t units, char* sums,
                      int64_t sums_stride, bool from_zero, const TileRequests& requests) {
  tiles.configure(x.count);
  const bool has_second = x.count > kAmxRows;
  char* second = sums + kAmxRows * sums_stride;
  if (from_zero) {
    clear_tile<0>();
    clear_tile<1>();
    clear_tile<2>();
    clear_tile<3>();
  } else {
    load_tile<0>(sums, sums_stride);
    load_tile<1>(sums + kAmxRowBytes, sums_stride);
    if (has_second) {
      load_tile<2>(second, sums_stride);
      load_tile<3>(second + kAmxRowBytes, sums_stride);
    }
  }
  if (has_second) {
    add_steps<T, true>(x, panel, units, requests);
    store_tile<2>(second, sums_stride);
    store_tile<3>(second + kAmxRowBytes, sums_stride);
  } else {
    add_steps<T, false>(x, panel, units, requests);
  }
  store_tile<0>(sums, sums_stride);
  store_tile<1>(sums + kAmxRowBytes, sums_stride);
}

// Steps of k after which sums are parked: of many rows, so that a block of them stays in the first-level cache while
// panels pass.
constexpr int64_t kManyRowsSteps = 12, kFewRowsSteps = 256;
constexpr int64_t kStepsAhead = 2;  // of a panel
// With two tiles of rows and panels of few steps of bytes, sums are finished often and for long: what is asked for
// before must last until then, and more is asked for meanwhile.
constexpr int64_t kShortSteps = 16, kShortStepsAhead = 4, kRestLines = 28;
constexpr int64_t kPassingElements = 512 * 1024;
constexpr int64_t kBlockSums = kBlockRows * kPanelColumns;
static_assert(kBlockRows == kAmxMostRows);
// Of four bytes each: what run_on_tiles needs for a task.
constexpr int64_t kTileSums = kTaskRows * kTaskPanels * kPanelColumns;

// What is asked for while a block of rows is multiplied by `units` units of a panel: what lies ahead in it, or, where a
// task has several blocks, each block's share of what is multiplied next: the panel's next units, or, after its last
// ones, the first ones of the panels behind the task's.
template <typename T>
static TileRequests tile_requests(const ProductTask& task, int64_t row, const char* panel, int64_t units, bool is_last,
                                  int64_t panel_bytes) {
  const int64_t blocks = ceil_div(task.rows, kBlockRows), bytes = units * kUnitRowBytes, steps = units / kAmxUnits;
  if (blocks == 1 && sizeof(T) == 1 && task.rows > kAmxRows && 0 < steps && steps <= kShortSteps) {
    const int64_t step = kStepBytes - ceil_div(kRestLines, steps) * 64;
    return {Ask::kNext, panel + kShortStepsAhead * kStepBytes + kRestLines * 64, step, panel_bytes - steps * step};
  }
  if (blocks == 1) return {Ask::kNext, panel + kStepsAhead * kStepBytes, kStepBytes, 0};
  if (task.row != 0) return {Ask::kNot, nullptr, 0, 0};  // these rows find the weights near
  const int64_t step = smaller(768, ceil_div(kStepBytes, blocks * 64) * 64);
  const char* next = panel + bytes + (is_last ? (task.panels - 1) * panel_bytes : 0);
  return {Ask::kNearest, next + row / kBlockRows * step * steps, step, 0};
}

// Whether results are written past the caches: float32 of so many that they leave these before they are read. Lines
// that lie so far apart slow down the reading of weights where they come into the caches first.
static bool passes_caches(const ProductOut& to, int64_t rows) {
  return to.dtype == kFloat32 && rows * to.n >= kPassingElements &&
         (reinterpret_cast<uintptr_t>(to.out) | uintptr_t(to.stride) * sizeof(float)) % 64 == 0;
}

// As finish, of one panel.
static void finish_panel(const ProductOut& to, int64_t row, int64_t rows, int64_t column, const float* sums) {
  if (!passes_caches(to, rows) || column + kPanelColumns > to.n) {
    return finish(to, row, rows, column, sums, kPanelColumns, kPanelColumns);
  }
  float* out = static_cast<float*>(to.out) + row * to.stride + column;
  for (int64_t r = 0; r < rows; ++r, out += to.stride, sums += kPanelColumns) {
    for (int64_t j = 0; j < kPanelColumns; j += W) {
      _mm512_stream_ps(out + j, to.bias != nullptr ? load(sums + j) + load(to.bias + column + j) : load(sums + j));
    }
  }
  _mm_sfence();  // before other threads see that the task is done
}

// The sums of a task's rows and panels, each of `units` units of k, `panel_bytes` apart from `panels` on:
// rows_of(row, rows, unit, units) gives a block of rows as tiles read them, finish(row, rows, panel, sums, line, lines)
// takes its finished sums [rows][32] and asks for lines; rows and panels count from the task's first. `sums` is of the
// task's size.
template <typename T, typename RowsOf, typename Finish>
QUIRE_INLINE void run_on_tiles(const ProductTask& task, int64_t units, const char* panels, int64_t panel_bytes,
                               char* sums, const RowsOf& rows_of, const Finish& finish) {
  const int64_t steps = ceil_div(units, kAmxUnits), most = task.rows > kBlockRows ? kManyRowsSteps : kFewRowsSteps;
  const int64_t part_units = steps == 0 ? 1 : ceil_div(steps, ceil_div(steps, most)) * kAmxUnits;
  const bool is_parked = units > part_units;
  Tiles tiles;
  for (int64_t unit = 0; unit < units || unit == 0; unit += part_units) {
    const int64_t count = smaller(part_units, units - unit);
    const bool is_last = unit + count == units;
    for (int64_t row = 0; row < task.rows; row += kBlockRows) {
      const int64_t rows = smaller(kBlockRows, task.rows - row);
      const TileRows x = rows_of(row, rows, unit, count);
      for (int64_t p = 0; p < task.panels; ++p) {
        const char* panel = panels + p * panel_bytes + unit * kUnitRowBytes;
        char* to = sums + (is_parked ? (row / kBlockRows * task.panels + p) * kBlockSums * 4 : 0);
        const TileRequests requests = tile_requests<T>(task, row, panel, count, is_last, panel_bytes);
        add_panel<T>(tiles, x, panel, count, to, kPanelColumns * 4, unit == 0, requests);
        if (is_last) finish(row, rows, p, to, requests.at + count / kAmxUnits * requests.step, requests.rest / 64);
      }
    }
  }
  tiles.release();
}

}  // namespace quire::QUIRE_ISA
