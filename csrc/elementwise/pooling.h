// From the rows of a text to one vector.
#pragma once

#include "base/kernel_table.h"
#include "isa/rows.h"

namespace quire::QUIRE_ISA {

// Each column in the order of its rows, whichever thread computes it.
template <typename T>
static void pool_rows(int pooling, const void* x, int64_t rows, int64_t width, float* out) {
  const auto* from = static_cast<const T*>(x);
  const float count = float(rows);
  const float divisor = pooling == kMean           ? count
                        : pooling == kSumByRoot    ? __builtin_sqrtf(count)
                        : pooling == kWeightedMean ? 0.5f * count * (count + 1.0f)
                                                   : 1.0f;
  const bool is_weighted = pooling == kWeightedMean;
  for_rows((width + W - 1) / W, rows * W, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * W; i < end * W && i < width; i += W) {
      const int64_t n = width - i < W ? width - i : W;
      f32 sum = load_some(from + i, n);
      for (int64_t r = 1; r < rows; ++r) {
        const f32 v = load_some(from + r * width + i, n);
        const f32 larger = select(sum == sum, max(sum, v), sum);  // a NaN stays, as max gives v where sum is one
        sum = pooling == kMax ? larger : is_weighted ? fma(set1(float(r + 1)), v, sum) : sum + v;
      }
      store_some(out + i, sum / set1(divisor), n);
    }
  });
}

static constexpr PoolingTable kPooling = {.pool_rows = {pool_rows<float>, pool_rows<bf16>}};

}  // namespace quire::QUIRE_ISA
