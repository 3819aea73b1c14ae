// Weights into the quantized layouts, at load, and rows of them back. Lanes are rows of W, so that every variant makes
// the same choices.
#pragma once

#include "quantized/matmul.h"

namespace quire::QUIRE_ISA {

constexpr int64_t kBlockK = 32;

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
};

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

// Writes `unit_rows` rows of units for one vector of rows of W: the block's values by `inverse`, as Format stores them.
template <typename Format>
static void store_units(const WeightBlock& block, int64_t first, f32 inverse, int64_t unit_rows, char* out) {
  constexpr float kHighest = Format::kZero - 1, kLowest = Format::kBits == 8 ? -kHighest : -Format::kZero;
  const auto stored = [&](int64_t i) __attribute__((always_inline)) {
    const f32 value = round_within(load(block.values[i] + first), inverse, kLowest, kHighest);
    return __builtin_convertvector(value, i32) + Format::kZero;
  };
  for (int64_t row = 0; row < unit_rows; ++row) {
    i32 unit = {};
    for (int byte = 0; byte < 4; ++byte) {
      i32 bits = stored(row * 4 + byte);
      if constexpr (Format::kBits == 4) bits = bits | stored(row * 4 + byte + kBlockK / 2) << 4;
      unit = unit | bits << (8 * byte);
    }
    std::memcpy(out + row * kUnitRowBytes + first * kUnitBytes, &unit, sizeof unit);
  }
}

// One scale for W rows of W (lanes) and all of k: the largest magnitude becomes 127.
template <typename T>
static void quantize_panel(const T* rows, int64_t stride, int64_t num_rows, const float* largest,
                           QuantizedShape<Int8> shape, char* panel) {
  float* scales = reinterpret_cast<float*>(panel + shape.unit_rows() * kUnitRowBytes);
  for (int64_t j = 0; j < kPanelColumns; ++j) scales[j] = largest[j] / 127;
  WeightBlock block;
  for (int64_t begin = 0; begin < shape.k; begin += kBlockK) {
    block.read(rows + begin, stride, num_rows, smaller(kBlockK, shape.k - begin));
    for (int64_t first = 0; first < kPanelColumns; first += W) {
      const f32 inverse = ratio_or_zero(127, load(largest + first));
      store_units<Int8>(block, first, inverse, smaller(kBlockK / 4, shape.unit_rows() - begin / 4),
                        panel + begin / 4 * kUnitRowBytes);
    }
  }
}

QUIRE_INLINE f32 rounded_to_bf16(f32 v) {
  alignas(64) bf16 rounded[W];
  store(rounded, v);
  return load(rounded);
}

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

template <typename T>
static void quantize_panel(const T* rows, int64_t stride, int64_t num_rows, const float*, QuantizedShape<Int4> shape,
                           char* panel) {
  WeightBlock block;
  ScaleSearch search;
  for (int64_t group = 0; group < shape.groups(); ++group, panel += shape.group_bytes()) {
    const int64_t begin = group * kBlockK;
    block.read(rows + begin, stride, num_rows, smaller(kBlockK, shape.k - begin));
    for (int64_t first = 0; first < kPanelColumns; first += W) {
      search.run(block, first);
      store(reinterpret_cast<bf16*>(panel + shape.unit_rows() * kUnitRowBytes) + first, search.scale);
      store_units<Int4>(block, first, ratio_or_zero(1, search.scale), shape.unit_rows(), panel);
    }
  }
}

// False, and an unusable result, if an element is not finite.
template <typename Format, typename T>
static bool quantize(const void* weight, int64_t stride, int64_t n, int64_t k, char* out) {
  const QuantizedShape<Format> shape{n, k};
  bool is_finite = true;
  auto task = [&](int64_t index, int) {
    const int64_t row = index * kPanelColumns, num_rows = smaller(kPanelColumns, n - row);
    const T* rows = static_cast<const T*>(weight) + row * stride;
    alignas(64) float largest[kPanelColumns] = {};
    for (int64_t j = 0; j < num_rows; ++j) {
      largest[j] = largest_of(rows + j * stride, k);
      if (largest[j] != largest[j]) __atomic_store_n(&is_finite, false, __ATOMIC_RELAXED);
    }
    quantize_panel(rows, stride, num_rows, largest, shape, out + index * shape.panel_bytes());
  };
  parallel_for(shape.panels(), task);
  return is_finite;
}

// Row `id` of W: integers times scales, rounded to T.
template <typename Format, typename T>
static void dequantize_row(QuantizedShape<Format> shape, const char* data, int64_t id, T* out) {
  using Scale = typename Format::Scale;
  constexpr int64_t kRowsPerBlock = kBlockK * Format::kBits / (8 * kUnitBytes);
  const char* panel = data + id / kPanelColumns * shape.panel_bytes();
  for (int64_t begin = 0; begin < shape.k; begin += kBlockK) {
    const int64_t group = begin / shape.group_k(), row = (begin - group * shape.group_k()) / kBlockK * kRowsPerBlock;
    const char* units = panel + group * shape.group_bytes();
    const Scale* scales = reinterpret_cast<const Scale*>(units + shape.unit_rows() * kUnitRowBytes);
    const float scale = load_n(scales + id % kPanelColumns, 1)[0];
    alignas(64) float values[kBlockK] = {};
    for (int64_t r = 0; r < smaller(kRowsPerBlock, shape.unit_rows() - row); ++r) {
      const char* unit = units + (row + r) * kUnitRowBytes + id % kPanelColumns * kUnitBytes;
      for (int64_t byte = 0; byte < 4; ++byte) {
        const int32_t bits = uint8_t(unit[byte]);
        const auto value = [&](int32_t stored) { return float(stored - Format::kZero) * scale; };
        if constexpr (Format::kBits == 8) {
          values[r * 4 + byte] = value(bits);
        } else {
          values[r * 4 + byte] = value(bits & 15);
          values[r * 4 + byte + kBlockK / 2] = value(bits >> 4);
        }
      }
    }
    for_parts(smaller(kBlockK, shape.k - begin),
              [&](int64_t i, int64_t n) { store_some(out + begin + i, load(values + i), n); });
  }
}

// Rows `ids` of W, each in [0, n).
template <typename Format, typename T>
static void gather_quantized(const int64_t* ids, int64_t count, const char* data, int64_t n, int64_t k, void* out) {
  for_rows(count, k, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      dequantize_row<Format>({n, k}, data, ids[i], static_cast<T*>(out) + i * k);
    }
  });
}

static constexpr QuantizedTable kQuantized = {
    .rows_bytes = {quantized_rows_bytes<Int8>, quantized_rows_bytes<Int4>},
    .quantize = {{quantize<Int8, float>, quantize<Int8, bf16>}, {quantize<Int4, float>, quantize<Int4, bf16>}},
    .matmul = {{quantized_matmul<Int8, float>, quantized_matmul<Int8, bf16>},
               {quantized_matmul<Int4, float>, quantized_matmul<Int4, bf16>}},
    .gather = {{gather_quantized<Int8, float>, gather_quantized<Int8, bf16>},
               {gather_quantized<Int4, float>, gather_quantized<Int4, bf16>}},
};

}  // namespace quire::QUIRE_ISA
