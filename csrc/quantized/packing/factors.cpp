#include "quantized/packing/factors.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "runtime/thread_pool.h"

namespace quire {
namespace {

constexpr float kSmall = 8, kLarge = 32;  // times less, or more, than the median
constexpr int kMostExponent = 32;         // of a power of two
constexpr int64_t kColumns = 1024;        // of a task

// Bits without the sign are in the order of magnitudes; NaNs are the largest.
template <typename Bits>
void find_largest(const Bits* rows, int64_t stride, int64_t n, int64_t count, Bits* largest) {
  constexpr Bits kMagnitude = Bits(Bits(~Bits{0}) >> 1);
  for (int64_t row = 0; row < n; ++row, rows += stride) {
    for (int64_t i = 0; i < count; ++i) largest[i] = std::max(largest[i], Bits(rows[i] & kMagnitude));
  }
}

template <typename Bits>
std::vector<float> largest_of_columns(const void* weight, int64_t stride, int64_t n, int64_t k) {
  std::vector<Bits> largest(size_t(k), 0);
  auto task = [&](int64_t index, int) {
    const int64_t first = index * kColumns;
    const Bits* rows = static_cast<const Bits*>(weight) + first;
    find_largest(rows, stride, n, std::min(kColumns, k - first), largest.data() + first);
  };
  parallel_for((k + kColumns - 1) / kColumns, task);
  std::vector<float> values(size_t(k), 0);
  for (size_t i = 0; i < values.size(); ++i) {
    const uint32_t bits = sizeof(Bits) == 2 ? uint32_t(largest[i]) << 16 : uint32_t(largest[i]);
    std::memcpy(&values[i], &bits, sizeof bits);
  }
  return values;
}

float median_of(std::vector<float> values) {
  const auto middle = values.begin() + (int64_t(values.size()) - 1) / 2;
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// The power of two next to `ratio`, where that is far from 1.
float compensation(float ratio) {
  if (!(ratio > 0) || !std::isfinite(ratio) || (ratio < kLarge && ratio > 1 / kSmall)) return 1;
  int exponent;
  const float fraction = std::frexp(ratio, &exponent);
  return std::ldexp(1.0f, std::clamp(fraction < 0.70710678f ? exponent - 1 : exponent, -kMostExponent, kMostExponent));
}

// Of mixed bits of the column's index.
float sign_of(uint32_t column) {
  uint32_t bits = column * 0x9e3779b1u;
  bits = (bits ^ (bits >> 15)) * 0x85ebca6bu;
  return (bits ^ (bits >> 13)) & 1 ? -1 : 1;
}

}  // namespace

std::vector<float> choose_factors(const QuantizedShape& shape, DType dtype, const void* weight, int64_t stride,
                                  char* out) {
  if (shape.k == 0) return {};
  std::memset(out + shape.factors_at(), 0, size_t(shape.bytes() - shape.factors_at()));
  const std::vector<float> largest = dtype == kBFloat16
                                         ? largest_of_columns<uint16_t>(weight, stride, shape.n, shape.k)
                                         : largest_of_columns<uint32_t>(weight, stride, shape.n, shape.k);
  const float median = median_of(largest);
  std::vector<float> of_x(size_t(shape.k)), of_weight(size_t(shape.k));
  for (int64_t i = 0; i < shape.k;) {
    const int64_t width = rotation_width(shape.k - i);
    const float root = rotation_root(width);
    for (const int64_t end = i + width; i < end; ++i) {
      const float scale = compensation(largest[size_t(i)] / median), sign = sign_of(uint32_t(i));
      of_x[size_t(i)] = sign * scale / root;
      of_weight[size_t(i)] = sign / (scale * root);
    }
  }
  std::memcpy(out + shape.factors_at(), of_x.data(), of_x.size() * sizeof(float));
  return of_weight;
}

}  // namespace quire
