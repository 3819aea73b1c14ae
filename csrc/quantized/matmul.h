// y = x W^T + bias on quantized weights (quantized/layout.h), x being quantized too, each row (and group) by itself.
//
// The products of a group are summed in int32, where no order matters; those sums are scaled and added up in float32,
// group after group, without fused operations. So an element has the same bits in any batch and in every variant.
#pragma once

#include "isa/rows.h"
#include "matmul/tiles.h"
#include "quantized/quads.h"

namespace quire::QUIRE_ISA {

// A largest value up to this counts as zero: 127 divided by it might be infinite.
constexpr float kQuantizedZero = 1e-30f;

// Rows of x that are kept quantized at once: enough that reading the weights anew for the next ones costs nothing.
constexpr int64_t kMostQuantizedRows = 512;

// So few rows, and int4 weights, are read as fast as the processor's own prefetchers go.
#if defined(__AVX512VNNI__)
constexpr int kUnfetchedQuantizedRows = 4;
#else
constexpr int kUnfetchedQuantizedRows = 1;
#endif

// A row of x as the tiles read it: its values, then of each group the scale, then of each group what the sum of the
// products has too much because weights lie shifted by Format::kZero.
template <typename Format>
struct QuantizedRow {
  QuantizedShape<Format> shape;

  QUIRE_MEMBER int64_t scales_at() const {
    return ceil_div(shape.groups() * shape.group_k(), W) * W * int64_t(sizeof(XValue));
  }
  QUIRE_MEMBER int64_t excess_at() const { return scales_at() + shape.groups() * int64_t(sizeof(float)); }
  // Odd numbers of cache lines keep rows out of each other's sets.
  QUIRE_MEMBER int64_t bytes() const {
    return (ceil_div(excess_at() + shape.groups() * int64_t(sizeof(int32_t)), 64) | 1) * 64;
  }
};

// The largest magnitude of a row; NaN if an element is not finite.
template <typename T>
static float largest_of(const T* row, int64_t k) {
  f32 largest = set1(0), poison = set1(0);
  for_parts(k, [&](int64_t i, int64_t n) {
    const f32 v = load_some(row + i, n);
    largest = max(abs(v), largest);
    poison = poison + (v - v);
  });
  return reduce_max(largest) + reduce_add(poison);
}

// A value is x * (127 / largest) to the nearest (even) integer, the scale largest / 127. A group that holds something
// not finite has the scale NaN.
template <typename Format, typename T>
static void quantize_row(const T* x, QuantizedRow<Format> layout, char* row) {
  XValue* values = reinterpret_cast<XValue*>(row);
  float* scales = reinterpret_cast<float*>(row + layout.scales_at());
  int32_t* excess = reinterpret_cast<int32_t*>(row + layout.excess_at());
  const int64_t group_k = layout.shape.group_k();
  for (int64_t group = 0; group < layout.shape.groups(); ++group, values += group_k) {
    const T* from = x + group * group_k;
    const int64_t count = smaller(group_k, layout.shape.k - group * group_k);
    const float largest = largest_of(from, count);
    const bool is_zero = !(largest > kQuantizedZero);  // or has no largest value
    scales[group] = largest / 127;
    const f32 inverse = set1(is_zero ? 0 : 127 / largest), shifter = set1(12582912.0f);  // 1.5 * 2^23: rounds
    f32 sum = set1(0);                                                                   // exact: below 2^24
    for (int64_t i = 0; i < group_k; i += W) {
      const f32 v = i < count && !is_zero ? load_some(from + i, smaller(W, count - i)) : set1(0);
      const f32 rounded = v * inverse + shifter;
      sum = sum + (rounded - shifter);
      store_values(values + i, as_int(rounded) - as_int(shifter));
    }
    excess[group] = int32_t(reduce_add(sum)) * Format::kZero;
  }
}

// acc[r][g] += x[r] * w[g] for one unit of the tile's rows and vectors of columns.
template <int R, int G>
QUIRE_INLINE void multiply_quads(i32 (&acc)[R][G], const XValue* x, int64_t x_stride, const i32 (&units)[G]) {
  Quads w[G];
  QUIRE_UNROLL
  for (int g = 0; g < G; ++g) w[g] = weight_quads(units[g]);
  QUIRE_UNROLL
  for (int r = 0; r < R; ++r) {
    const Quads value = set1_quad(x + r * x_stride);
    QUIRE_UNROLL
    for (int g = 0; g < G; ++g) acc[r][g] = dot4(acc[r][g], w[g], value);
  }
}

template <typename Format>
struct QuantizedTile {
  static constexpr int kMost = kPanelVectors;

  // Sums of one group for R rows of x, x_stride values apart, and G vectors of columns. The halves of an int4 unit are
  // two units, the second half a group further on.
  template <int R, int G>
  QUIRE_INLINE void multiply_group(i32 (&acc)[R][G], const XValue* x, int64_t x_stride, const char* weight,
                                   int64_t unit_rows) {
    QUIRE_UNROLL
    for (int r = 0; r < R; ++r) {
      QUIRE_UNROLL
      for (int g = 0; g < G; ++g) acc[r][g] = i32{};
    }
    for (int64_t row = 0; row < unit_rows; ++row, weight += kUnitRowBytes) {
      if constexpr (Format::kBits == 8 && R > kUnfetchedQuantizedRows) {
        QUIRE_UNROLL
        for (int g = 0; g < G; ++g) __builtin_prefetch(weight + g * W * kUnitBytes + kBytesAhead, 0, 2);
      }
      i32 units[G];
      QUIRE_UNROLL
      for (int g = 0; g < G; ++g) units[g] = load_lanes(weight + g * W * kUnitBytes);
      if constexpr (Format::kBits == 8) {
        multiply_quads<R, G>(acc, x + row * 4, x_stride, units);
      } else {
        i32 half[G];
        QUIRE_UNROLL
        for (int g = 0; g < G; ++g) half[g] = units[g] & 0x0f0f0f0f;
        multiply_quads<R, G>(acc, x + row * 4, x_stride, half);
        QUIRE_UNROLL
        for (int g = 0; g < G; ++g) half[g] = (units[g] >> 4) & 0x0f0f0f0f;
        multiply_quads<R, G>(acc, x + row * 4 + Format::kGroup / 2, x_stride, half);
      }
    }
  }

  // The products of R quantized rows and G vectors of columns, from the vector `first` of `weight` on -> out, G * W
  // columns wide.
  template <int R, int G>
  static void run(const char* rows, QuantizedRow<Format> layout, const char* weight, int64_t first, float* out) {
    using Scale = typename Format::Scale;
    const int64_t row_bytes = layout.bytes(), group_k = layout.shape.group_k(), unit_rows = layout.shape.unit_rows();
    const int64_t column = first % kVectorsPerPanel * W;
    const char* units = weight + first / kVectorsPerPanel * layout.shape.panel_bytes() + column * kUnitBytes;
    const int64_t to_scales = unit_rows * kUnitRowBytes + column * (int64_t(sizeof(Scale)) - kUnitBytes);
    f32 sum[R][G];
    QUIRE_UNROLL
    for (int r = 0; r < R; ++r) {
      QUIRE_UNROLL
      for (int g = 0; g < G; ++g) sum[r][g] = set1(0);
    }
    for (int64_t group = 0; group < layout.shape.groups(); ++group) {
      i32 acc[R][G];
      multiply_group<R, G>(acc, reinterpret_cast<const XValue*>(rows) + group * group_k,
                           row_bytes / int64_t(sizeof(XValue)), units,
                           Format::kGroup == 0 ? unit_rows : Format::kGroup * Format::kBits / (8 * kUnitBytes));
      f32 scale[G];
      QUIRE_UNROLL
      for (int g = 0; g < G; ++g) scale[g] = load(reinterpret_cast<const Scale*>(units + to_scales) + g * W);
      units += layout.shape.group_bytes();
      QUIRE_UNROLL
      for (int r = 0; r < R; ++r) {
        const char* row = rows + r * row_bytes;
        const f32 x_scale = set1(reinterpret_cast<const float*>(row + layout.scales_at())[group]);
        const int32_t excess = reinterpret_cast<const int32_t*>(row + layout.excess_at())[group];
        QUIRE_UNROLL
        for (int g = 0; g < G; ++g) {
          sum[r][g] = sum[r][g] + __builtin_convertvector(acc[r][g] - excess, f32) * (x_scale * scale[g]);
        }
      }
    }
    QUIRE_UNROLL
    for (int r = 0; r < R; ++r) {
      QUIRE_UNROLL
      for (int g = 0; g < G; ++g) store(out + (r * G + g) * W, sum[r][g]);
    }
  }
};

template <typename Format>
static int64_t quantized_rows_bytes(int64_t rows, int64_t k) {
  return smaller(rows, kMostQuantizedRows) * QuantizedRow<Format>{{0, k}}.bytes();
}

template <typename Format>
static void run_quantized_task(const QuantizedMatmulArgs& args, const ProductTask& task) {
  const QuantizedRow<Format> layout{{args.to.n, args.k}};
  const int64_t row_blocks = ceil_div(task.rows, kTileRows), row_bytes = layout.bytes();
  for_tiles<QuantizedTile<Format>>(ceil_div(task.rows, row_blocks), task.panels, [&](int64_t vector, int64_t width) {
    const int64_t first_vector = task.panel * kVectorsPerPanel + vector;
    for (int64_t block = 0; block < row_blocks; ++block) {
      const int64_t first = task.row + block * task.rows / row_blocks;
      const int64_t rows = task.row + (block + 1) * task.rows / row_blocks - first;
      alignas(64) float sums[kAccumulators * W];
      tile_function<QuantizedTile<Format>>(rows, width)(args.rows_of_x + first * row_bytes, layout, args.weight,
                                                        first_vector, sums);
      finish(args.to, first, rows, first_vector * W, sums, width * W, width * W);
    }
  });
}

template <typename Format, typename T>
static void quantized_matmul(const QuantizedMatmulArgs& args) {
  const QuantizedRow<Format> layout{{args.to.n, args.k}};
  for (int64_t first = 0; first < args.rows; first += kMostQuantizedRows) {
    QuantizedMatmulArgs part = args;
    part.rows = smaller(kMostQuantizedRows, args.rows - first);
    const T* x = static_cast<const T*>(args.x) + first * args.x_stride;
    const int64_t out_bytes = args.to.dtype == kFloat32 ? int64_t(sizeof(float)) : int64_t(sizeof(bf16));
    part.to.out = static_cast<char*>(args.to.out) + first * args.to.n * out_bytes;
    for_rows(part.rows, args.k, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        quantize_row<Format>(x + row * args.x_stride, layout, args.rows_of_x + row * layout.bytes());
      }
    });
    for_tasks(part.rows, args.to.n, args.k, kTaskPanels,
              [&](const ProductTask& task, int) { run_quantized_task<Format>(part, task); });
  }
}

}  // namespace quire::QUIRE_ISA
