// The sums of x's groups times a panel's mins (quantized/matmul.h).
#pragma once

#include "isa/x86/amx.h"
#include "quantized/tiles/tile.h"

namespace quire::QUIRE_ISA {

// Lines that are asked for while mins are added: `bytes` from `first` on for each group of a panel.
struct MinRequests {
  const char* first;
  int64_t bytes;

  QUIRE_MEMBER void ask(int64_t group) const {
    const int64_t end = (group + 1) * bytes & -64;
    for (int64_t at = group * bytes & -64; at < end; at += 64) ask_for(Ask::kNext, first + at);
  }
};

// minuses [R][32] += the sums of x's groups times the mins.
template <int R, typename... Requests>
static void add_mins_of_rows(const char* rows, const QuantizedRow& layout, const WeightPiece& piece, float* minuses,
                             const Requests&... requests) {
  constexpr int64_t kVectors = kPanelColumns / W;
  const char* x_sums = rows + layout.sums_at + piece.first * int64_t(sizeof(float));
  f32 sum[R][kVectors];
  QUIRE_UNROLL
  for (int r = 0; r < R; ++r) {
    QUIRE_UNROLL
    for (int64_t g = 0; g < kVectors; ++g) sum[r][g] = load(minuses + r * kPanelColumns + g * W);
  }
  for (int64_t group = 0; group < piece.groups; ++group) {
    (requests.ask(piece.first + group), ...);
    const float* mins = piece.mins + group * kPanelColumns;
    QUIRE_UNROLL
    for (int r = 0; r < R; ++r) {
      const f32 x_sum = set1(reinterpret_cast<const float*>(x_sums + r * layout.bytes)[group]);
      QUIRE_UNROLL
      for (int64_t g = 0; g < kVectors; ++g) sum[r][g] = sum[r][g] + x_sum * load(mins + g * W);
    }
  }
  QUIRE_UNROLL
  for (int r = 0; r < R; ++r) {
    QUIRE_UNROLL
    for (int64_t g = 0; g < kVectors; ++g) store(minuses + r * kPanelColumns + g * W, sum[r][g]);
  }
}

template <typename... Requests>
using AddMins = void(const char*, const QuantizedRow&, const WeightPiece&, float*, const Requests&...);
constexpr int kMinRowsAtOnce = W == 16 ? 4 : 2, kMostMinRowsAtOnce = kAmx ? 8 : kMinRowsAtOnce;

template <int R, typename... Requests>
static AddMins<Requests...>* add_mins_function(int64_t rows) {
  if constexpr (R > 1) {
    if (rows < R) return add_mins_function<R - 1, Requests...>(rows);
  }
  return &add_mins_of_rows<R, Requests...>;
}

// The same of any number of rows: some at once, as additions to one sum wait for each other, or all of a few.
static void add_mins(const char* rows, int64_t num_rows, const QuantizedRow& layout, const WeightPiece& piece,
                     float* minuses) {
  int64_t blocks = num_rows <= kMostMinRowsAtOnce ? 1 : ceil_div(num_rows, kMinRowsAtOnce);
  for (int64_t row = 0; row < num_rows; --blocks) {
    const int64_t height = ceil_div(num_rows - row, blocks);
    add_mins_function<kMostMinRowsAtOnce>(height)(rows + row * layout.bytes, layout, piece,
                                                  minuses + row * kPanelColumns);
    row += height;
  }
}

}  // namespace quire::QUIRE_ISA
