// Products of tiles (isa/amx.h): rows of x times the panels of a packed or quantized weight, whose units of four bytes
// lie as tiles want them.
//
// A step is what one product of tiles adds up: 16 units of k. Of bf16 a step is a sum of its own, the even elements and
// the odd ones each in order, that is then added to those before. A row has the same steps in any batch.
#pragma once

#include "isa/amx.h"
#include "matmul/tiles.h"

namespace quire::QUIRE_ISA {

constexpr int64_t kStepBytes = kAmxUnits * kUnitRowBytes;  // of a panel

// Rows of x as tiles read them: whole steps, `stride` bytes apart.
struct TileRows {
  const char* data;
  int64_t stride, count;
};

// What is asked for while a panel is multiplied: `step` bytes from `at` on with each of its steps.
struct TileRequests {
  Ask ask;
  const char* at;
  int64_t step;
};

// Adds `steps` steps to the sums in tiles 0 and 1, and if kHasSecond those of rows 16 and up to tiles 2 and 3.
template <typename T, bool kHasSecond, Ask kAsk>
static void add_asking(const char* x, int64_t x_stride, const char* panel, int64_t steps, TileRequests requests) {
  const T* type = nullptr;
  for (int64_t step = 0; step < steps; ++step, x += kAmxRowBytes, panel += kStepBytes) {
    load_tile<6>(panel, kUnitRowBytes);
    load_tile<4>(x, x_stride);
    multiply_tiles<0, 4, 6>(type);
    load_tile<7>(panel + kAmxRowBytes, kUnitRowBytes);
    multiply_tiles<1, 4, 7>(type);
    if constexpr (kHasSecond) {
      load_tile<5>(x + kAmxRows * x_stride, x_stride);
      multiply_tiles<2, 5, 6>(type);
      multiply_tiles<3, 5, 7>(type);
    }
    if constexpr (kAsk != Ask::kNot) {
      for (int64_t at = 0; at < requests.step; at += 64) ask_for<1>(kAsk, requests.at + at);
      requests.at += requests.step;
    }
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
  add_asking<T, kHasSecond, Ask::kNot>(x.data + steps * kAmxRowBytes, x.stride, last, 1, {Ask::kNot, nullptr, 0});
}

// sums [x.count][32], rows `sums_stride` bytes apart, += the products of up to kAmxMostRows rows with `units` units of a
// panel; or, from zero, = them. What rows have beyond the units, up to a whole step, must be zero.
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

}  // namespace quire::QUIRE_ISA
