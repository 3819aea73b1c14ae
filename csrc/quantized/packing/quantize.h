// Weights into the formats int8 and int4, at load. Lanes are rows of W, so that every variant makes the same choices.
#pragma once

#include "quantized/activations.h"
#include "quantized/rotation.h"

namespace quire::QUIRE_ISA {

constexpr int64_t kBlockK = QuantizedShape::kBlock;

// The integer nearest to v * inverse (to even), within [lowest, highest].
QUIRE_INLINE f32 round_within(f32 v, f32 inverse, float lowest, float highest) {
  const f32 shifter = set1(12582912.0f);
  const f32 rounded = v * inverse + shifter - shifter;
  return max(select(rounded < set1(highest), rounded, set1(highest)), set1(lowest));
}

// `over` / v, and 0 where v is as good as zero.
QUIRE_INLINE f32 ratio_or_zero(float over, f32 v) {
  return select(abs(v) > set1(kQuantizedZero), set1(over) / v, set1(0));
}

QUIRE_INLINE f32 rounded_to_bf16(f32 v) {
  alignas(64) bf16 rounded[W];
  store(rounded, v);
  return load(rounded);
}

// kBlockK elements of the 32 rows of a panel, transposed; zero where the matrix ends.
struct WeightBlock {
  float values[kBlockK][kPanelColumns];

  template <typename T>
  QUIRE_MEMBER void read(const T* rows, int64_t stride, int64_t num_rows, int64_t count) {
    if (num_rows < kPanelColumns || count < kBlockK) std::memset(values, 0, sizeof values);
    for (int64_t j = 0; j < num_rows; ++j) {
      alignas(64) float row[kBlockK];
      for (int64_t i = 0; i < kBlockK; i += W) {
        store(row + i, i < count ? load_some(rows + j * stride + i, smaller(W, count - i)) : set1(0));
      }
      for (int64_t i = 0; i < kBlockK; ++i) values[i][j] = row[i];
    }
  }

  // Writes the units of one vector of rows of W: the values by `inverse`, within what the format stores.
  template <int kBits>
  QUIRE_MEMBER void store_units(int64_t first, f32 inverse, char* out) const {
    constexpr int kZero = 1 << (kBits - 1);
    constexpr float kHighest = kZero - 1, kLowest = kBits == 8 ? -kHighest : -kZero;
    const auto stored = [&](int64_t i) __attribute__((always_inline)) {
      const f32 value = round_within(load(values[i] + first), inverse, kLowest, kHighest);
      return __builtin_convertvector(value, i32) + kZero;
    };
    for (int64_t row = 0; row < kBlockK * kBits / (8 * kUnitBytes); ++row) {
      i32 unit = {};
      for (int byte = 0; byte < 4; ++byte) {
        i32 bits = stored(row * 4 + byte);
        if constexpr (kBits == 4) bits = bits | stored(row * 4 + byte + kBlockK / 2) << 4;
        unit = unit | bits << (8 * byte);
      }
      store_lanes(out + row * kUnitRowBytes + first * kUnitBytes, unit);
    }
  }
};

// The scale that leaves the least sum of squared errors of W rows of W (lanes), of those tried: the value of largest
// magnitude becomes -8 or 7, times up to 1 / 0.7 (which clips it) or 1 / 1.05; last, the least squares
// scale of the best one's integers.
struct ScaleSearch {
  f32 scale{}, error{}, products{}, squares{};

  QUIRE_MEMBER void try_scale(const WeightBlock& block, int64_t first, f32 wanted, bool is_first = false) {
    const f32 tried = rounded_to_bf16(wanted), inverse = ratio_or_zero(1, tried);
    f32 new_error = set1(0), new_products = set1(0), new_squares = set1(0);
    for (int64_t i = 0; i < kBlockK; ++i) {
      const f32 v = load(block.values[i] + first), integer = round_within(v, inverse, -8, 7);
      const f32 off = v - integer * tried;
      new_error = new_error + off * off;
      new_products = new_products + v * integer;
      new_squares = new_squares + integer * integer;
    }
    const i32 is_better = (i32)(new_error < error) | (is_first ? -1 : 0);
    scale = select(is_better, tried, scale);
    products = select(is_better, new_products, products);
    squares = select(is_better, new_squares, squares);
    error = select(is_better, new_error, error);
  }

  QUIRE_MEMBER void run(const WeightBlock& block, int64_t first) {
    f32 extreme = set1(0);
    for (int64_t i = 0; i < kBlockK; ++i) {
      const f32 v = load(block.values[i] + first);
      extreme = select((i32)(abs(v) > abs(extreme)), v, extreme);
    }
    for (int step = 0; step < 8; ++step) {
      const float factor = float(14 + step) / 20;
      try_scale(block, first, extreme * (factor / -8), step == 0);
      try_scale(block, first, extreme * (factor / 7));
    }
    try_scale(block, first, products / max(squares, set1(1)));
  }
};

// int8: one scale for each row of W; its largest magnitude becomes 127.
template <typename T>
static void quantize_bytes(const T* rows, int64_t stride, int64_t num_rows, const float* largest,
                           const QuantizedShape& shape, char* panel) {
  float* scales = reinterpret_cast<float*>(panel);
  for (int64_t j = 0; j < kPanelColumns; ++j) scales[j] = largest[j] / 127;
  WeightBlock block;
  for (int64_t index = 0; index < shape.blocks(); ++index) {
    block.read(rows + index * kBlockK, stride, num_rows, smaller(kBlockK, shape.k - index * kBlockK));
    for (int64_t first = 0; first < kPanelColumns; first += W) {
      const f32 inverse = ratio_or_zero(127, load(largest + first));
      block.store_units<8>(first, inverse, panel + shape.integers_at() + index * shape.block_bytes());
    }
  }
}

// int4: one scale for each block.
template <typename T>
static void quantize_halves(const T* rows, int64_t stride, int64_t num_rows, const QuantizedShape& shape, char* panel) {
  WeightBlock block;
  ScaleSearch search;
  for (int64_t index = 0; index < shape.blocks(); ++index) {
    block.read(rows + index * kBlockK, stride, num_rows, smaller(kBlockK, shape.k - index * kBlockK));
    for (int64_t first = 0; first < kPanelColumns; first += W) {
      search.run(block, first);
      store(reinterpret_cast<bf16*>(panel) + index * kPanelColumns + first, search.scale);
      block.store_units<4>(first, ratio_or_zero(1, search.scale),
                           panel + shape.integers_at() + index * shape.block_bytes());
    }
  }
}

// One panel. False, and an unusable result, if an element is not finite.
template <int kBits, typename T>
static bool quantize_panel(const T* rows, int64_t stride, int64_t num_rows, const QuantizedShape& shape, char* panel) {
  alignas(64) float largest[kPanelColumns] = {};
  bool is_finite = true;
  for (int64_t j = 0; j < num_rows; ++j) {
    largest[j] = largest_of(rows + j * stride, shape.k);
    is_finite = is_finite && largest[j] - largest[j] == 0;
  }
  if constexpr (kBits == 8) {
    quantize_bytes(rows, stride, num_rows, largest, shape, panel);
  } else {
    quantize_halves(rows, stride, num_rows, shape, panel);
  }
  return is_finite;
}

// All panels, of a weight that is rotated, if there are factors for that.
template <int kBits, typename T>
static bool quantize(const void* weight, int64_t stride, const QuantizedShape& shape, const float* factors, char* out) {
  bool is_finite = true;
  auto task = [&](int64_t index, int thread) {
    const int64_t row = index * kPanelColumns, num_rows = smaller(kPanelColumns, shape.n - row), k = shape.k;
    const T* rows = static_cast<const T*>(weight) + row * stride;
    char* panel = out + index * shape.panel_bytes();
    bool is_finite_here;
    if (factors == nullptr) {
      is_finite_here = quantize_panel<kBits>(rows, stride, num_rows, shape, panel);
    } else {
      float* rotated = static_cast<float*>(thread_scratch(thread, kPanelColumns * k * int64_t(sizeof(float))));
      for (int64_t j = 0; j < num_rows; ++j) rotate(rows + j * stride, factors, k, rotated + j * k);
      is_finite_here = quantize_panel<kBits>(rotated, k, num_rows, shape, panel);
    }
    if (!is_finite_here) __atomic_store_n(&is_finite, false, __ATOMIC_RELAXED);
  };
  if (shape.k > 0) parallel_for(shape.panels(), task);
  return is_finite;
}

}  // namespace quire::QUIRE_ISA
