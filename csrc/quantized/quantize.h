// Weights into the formats int8 and int4, at load. Lanes are rows of W, so that every variant makes the same choices.
#pragma once

#include "quantized/matmul.h"
#include "quantized/panel.h"

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

// What int4 stores for v: the integer nearest to v * inverse + half, where `inverse` is 0.5 / scale.
QUIRE_INLINE f32 stored_half(f32 v, f32 inverse, f32 half) {
  const f32 shifter = set1(12582912.0f);
  const f32 rounded = v * inverse + half + shifter - shifter;
  return max(select(rounded < set1(15), rounded, set1(15)), set1(0));
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

  // Writes the units of one vector of rows of W: what `stored_of` makes of each value.
  template <int kBits, typename StoredOf>
  QUIRE_MEMBER void store_units(int64_t first, const StoredOf& stored_of, char* out) const {
    const auto stored = [&](int64_t i) __attribute__((always_inline)) {
      return __builtin_convertvector(stored_of(load(values[i] + first)), i32);
    };
    for (int64_t row = 0; row < kBlockK * kBits / (8 * kUnitBytes); ++row) {
      i32 unit = {};
      for (int byte = 0; byte < 4; ++byte) {
        i32 bits = stored(row * 4 + byte);
        if constexpr (kBits == 4) bits = bits | stored(row * 4 + byte + kBlockK / 2) << 4;
        unit = unit | bits << (8 * byte);
      }
      store_lanes(out + row * kUnitRowBytes + first * kUnitBytes, kBits == 4 ? rotated_left<1>(unit) : unit);
    }
  }
};

// The scale (Number::kOffsetScale) of W rows of W (lanes) that leaves the least sum of squared errors, of those tried:
// three offsets, each with the scale at which no weight is clipped and smaller ones; last, the least squares scale of
// the best one's integers.
struct ScaleSearch {
  i32 bits{};
  f32 error{}, products{}, squares{};

  QUIRE_MEMBER void try_scale(const WeightBlock& block, int64_t first, f32 wanted, i32 offset, bool is_first = false) {
    const i32 code = offset - 8;
    const i32 nearest = ((((as_int(wanted) >> 15) - code + 8) & ~15) + code) & (i32)(wanted > set1(kQuantizedZero));
    const f32 scale = scale_of(nearest), inverse = ratio_or_zero(0.5f, scale);
    const f32 from = __builtin_convertvector(offset, f32), half = from * 0.5f;
    f32 new_error = set1(0), new_products = set1(0), new_squares = set1(0);
    for (int64_t i = 0; i < kBlockK; ++i) {
      const f32 v = load(block.values[i] + first), integer = stored_half(v, inverse, half) * 2.0f - from;
      const f32 off = v - integer * scale;
      new_error = new_error + off * off;
      new_products = new_products + v * integer;
      new_squares = new_squares + integer * integer;
    }
    const i32 is_better = (i32)(new_error < error) | (is_first ? -1 : 0);
    bits = (nearest & is_better) | (bits & ~is_better);
    products = select(is_better, new_products, products);
    squares = select(is_better, new_squares, squares);
    error = select(is_better, new_error, error);
  }

  QUIRE_MEMBER void run(const WeightBlock& block, int64_t first) {
    f32 lowest = set1(0), highest = set1(0);
    for (int64_t i = 0; i < kBlockK; ++i) {
      const f32 v = load(block.values[i] + first);
      lowest = select((i32)(v < lowest), v, lowest);
      highest = select((i32)(v > highest), v, highest);
    }
    const f32 middle = ratio_or_zero(-30, highest - lowest) * lowest;
    for (int step = 0; step < 15; ++step) {
      const f32 from = round_within(middle, set1(1), 0, 30) + float(step / 5 - 1);
      const f32 offset = max(select(from < set1(23), from, set1(23)), set1(8));
      const f32 above = highest / (set1(30) - offset), below = lowest / (set1(0) - offset);
      const f32 unclipped = select((i32)(above > below), above, below);
      try_scale(block, first, unclipped * (float(20 - step % 5) / 20), __builtin_convertvector(offset, i32), step == 0);
    }
    const f32 fitted = products / max(squares, set1(1));
    try_scale(block, first, fitted, offset_of(bits));
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
      const auto stored_of = [&](f32 v)
                                 __attribute__((always_inline)) { return round_within(v, inverse, -127, 127) + 128; };
      block.store_units<8>(first, stored_of, panel + shape.integers_at() + index * shape.block_bytes());
    }
  }
}

// int4: one scale and one offset for each block.
template <typename T>
static void quantize_halves(const T* rows, int64_t stride, int64_t num_rows, const QuantizedShape& shape, char* panel) {
  WeightBlock block;
  ScaleSearch search;
  for (int64_t index = 0; index < shape.blocks(); ++index) {
    block.read(rows + index * kBlockK, stride, num_rows, smaller(kBlockK, shape.k - index * kBlockK));
    for (int64_t first = 0; first < kPanelColumns; first += W) {
      search.run(block, first);
      const u16_lanes bits = __builtin_convertvector(search.bits, u16_lanes);
      std::memcpy(panel + (index * kPanelColumns + first) * int64_t(sizeof(uint16_t)), &bits, sizeof bits);
      const f32 inverse = ratio_or_zero(0.5f, scale_of(search.bits));
      const f32 half = __builtin_convertvector(offset_of(search.bits), f32) * 0.5f;
      const auto stored_of = [&](f32 v) __attribute__((always_inline)) { return stored_half(v, inverse, half); };
      block.store_units<4>(first, stored_of, panel + shape.integers_at() + index * shape.block_bytes());
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
    is_finite = is_finite && largest[j] == largest[j];
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

static constexpr QuantizedTable kQuantized = {
    .rows_bytes = quantized_rows_bytes,
    .quantize = {{quantize<8, float>, quantize<8, bf16>}, {quantize<4, float>, quantize<4, bf16>}},
    .matmul = {quantized_matmul<float>, quantized_matmul<bf16>},
    .gather = {gather_quantized<float>, gather_quantized<bf16>},
};

}  // namespace quire::QUIRE_ISA
