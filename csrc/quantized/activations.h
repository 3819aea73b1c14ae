// Rows of x quantized for a product on quantized weights (quantized/matmul.h): each group by itself, as its values
// times a scale, in the basis of the weight.
#pragma once

#include "base/kernel_table.h"
#include "elementwise/activation.h"
#include "quantized/rotation.h"
#include "quantized/tiles/tile.h"

namespace quire::QUIRE_ISA {

// A largest value up to this counts as zero: 127 divided by it might be infinite.
constexpr float kQuantizedZero = 1e-30f;

// The largest magnitude of some elements; infinity if one is not finite.
template <typename T>
QUIRE_INLINE float largest_of(const T* row, int64_t k) {
  const i32 infinity = i32{} + 0x7f800000;
  f32 largest[2] = {};  // two chains of operations, which overlap
  const auto see = [&](int chain, f32 v) __attribute__((always_inline)) {
    const i32 bits = as_int(abs(v));  // those of NaN are above those of infinity
    largest[chain] = max(as_float(bits < infinity ? bits : infinity), largest[chain]);
  };
  int64_t i = 0;
  for (; i + 2 * W <= k; i += 2 * W) {
    see(0, load(row + i));
    see(1, load(row + i + W));
  }
  for (; i < k; i += W) see(0, load_some(row + i, smaller(W, k - i)));
  return reduce_max(max(largest[0], largest[1]));
}

// What the sum of a group's products begins with: minus its values, whose sum is `total`, times what the format or the
// products subtract from stored integers.
QUIRE_INLINE int32_t lack_of([[maybe_unused]] f32 values, int32_t total, const QuantizedRow& layout) {
  const int32_t zero = int32_t(layout.zero);
#if defined(QUIRE_SIMD_AVX2) && !defined(__AVXVNNI__)
  const bool is_of_halves = !layout.has_bytes && layout.blocks == 1;
  if (is_of_halves) return start_of_halves(values, layout.bits == 4 ? zero : 1 << (layout.bits - 1));
#endif
#if defined(QUIRE_ARM)
  if (!layout.has_bytes) return -total * zero;
#endif
  return -total * (zero - ByteSums::kZero);
}

// Groups that are quantized together: so their divisions take a few operations.
constexpr int64_t kGroupsAtOnce = 16;

// The values, lack and sum of a group; `inverse` is 0 where all values are.
template <typename Value, typename T>
QUIRE_INLINE void round_group(const T* from, int64_t count, int64_t size, float scale, float inverse,
                              const QuantizedRow& layout, int64_t group, char* row) {
  Value* values = reinterpret_cast<Value*>(row) + group * size;
  const f32 factor = set1(inverse), shifter = set1(12582912.0f);  // 1.5 * 2^23: rounds
  i32 sums_of[2] = {};
  const auto round = [&](int chain, int64_t i, f32 v) __attribute__((always_inline)) {
    const i32 rounded = as_int(v * factor + shifter) - as_int(shifter);
    sums_of[chain] = sums_of[chain] + rounded;
    store_values(values + i, rounded, std::make_index_sequence<W>());
  };
  const bool is_zero = inverse == 0;
  int64_t i = 0;
  for (; i + 2 * W <= count && !is_zero; i += 2 * W) {
    round(0, i, load(from + i));
    round(1, i + W, load(from + i + W));
  }
  for (; i < size; i += W) {
    round(0, i, i < count && !is_zero ? load_some(from + i, smaller(W, count - i)) : set1(0));
  }
  const f32 sums = __builtin_convertvector(sums_of[0] + sums_of[1], f32);  // below 2^24
  const float total = reduce_add(sums);
  reinterpret_cast<float*>(row + layout.scales_at)[group] = scale;
  reinterpret_cast<int32_t*>(row + layout.lacks_at)[group] = lack_of(sums, int32_t(total), layout);
  if (layout.has_mins) reinterpret_cast<float*>(row + layout.sums_at)[group] = total * scale;
}

// A value is x * (127 / largest) to the nearest (even) integer, the scale largest / 127. A group that holds something
// not finite has the scale NaN, and zeros as values.
template <typename Value, typename T>
static void quantize_row_as(const T* x, const int32_t* order, const QuantizedRow& layout, char* row) {
  constexpr int64_t kBlock = QuantizedShape::kBlock;
  T picked[kGroupsAtOnce * QuantizedShape::kLongGroup];
  alignas(64) float largest[kGroupsAtOnce] = {}, scales[kGroupsAtOnce], inverses[kGroupsAtOnce];
  for (int64_t first = 0; first < layout.groups; first += kGroupsAtOnce) {
    const int64_t begin = first * layout.group, num_groups = smaller(kGroupsAtOnce, layout.groups - first);
    const int64_t num_values = smaller(num_groups * layout.group, layout.k - begin);
    for (int64_t i = 0; order != nullptr && i < num_values; ++i) picked[i] = x[order[begin + i]];
    const T* from = order != nullptr ? picked : x + begin;
    const auto count = [&](int64_t g) { return smaller(layout.group, num_values - g * layout.group); };
    for (int64_t g = 0; g < num_groups; ++g) {
      const T* values = from + g * layout.group;
      largest[g] = count(g) == kBlock ? largest_of(values, kBlock) : largest_of(values, count(g));
    }
    for (int64_t g = 0; g < num_groups; g += W) {
      const f32 most = load(largest + g) + (load(largest + g) - load(largest + g));  // NaN instead of infinity
      store(scales + g, most / 127);
      store(inverses + g, as_float(as_int(127 / most) & (i32)(most > kQuantizedZero)));
    }
    for (int64_t g = 0; g < num_groups; ++g) {
      const T* values = from + g * layout.group;
      if (layout.group == kBlock && count(g) == kBlock) {
        round_group<Value>(values, kBlock, kBlock, scales[g], inverses[g], layout, first + g, row);
      } else {
        round_group<Value>(values, count(g), layout.group, scales[g], inverses[g], layout, first + g, row);
      }
    }
  }
}

template <typename T>
static void quantize_row(const T* x, const int32_t* order, const QuantizedRow& layout, char* row) {
  using Value = SumsOf<4, false>::Value;
  if (layout.has_bytes) return quantize_row_as<ByteSums::Value>(x, order, layout, row);
  quantize_row_as<Value>(x, order, layout, row);
}

// What x's columns are multiplied with before a row is rotated; null: it is not.
static const float* factors_of(const QuantizedShape& shape, const char* weight) {
  return shape.format.is_rotated ? reinterpret_cast<const float*>(weight + shape.factors_at()) : nullptr;
}

// A row of x, in the basis of the weight if that has factors.
template <typename T>
static void quantize_x(const T* x, const int32_t* order, const float* factors, const QuantizedRow& layout, char* to) {
  if (factors == nullptr) return quantize_row(x, order, layout, to);
  alignas(64) float rotated[kMostQuantizedK];  // as much as is used is touched
  rotate(x, factors, layout.k, rotated);
  quantize_row<float>(rotated, nullptr, layout, to);
}

// The same of a row of a product's x: of what the activation makes of it, if there is one.
template <typename T>
static void quantize_activated(const QuantizedMatmulArgs& args, const T* x, const float* factors,
                               const QuantizedRow& layout, char* to) {
  if (args.activation == nullptr) return quantize_x(x, args.order, factors, layout, to);
  alignas(64) T activated[kMostQuantizedK];  // as much as is used is touched
  activate_one(*args.activation, args.is_gated, x, layout.k, activated);
  quantize_x<T>(activated, args.order, factors, layout, to);
}

}  // namespace quire::QUIRE_ISA
