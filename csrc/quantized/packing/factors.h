// What columns are multiplied with before rows are rotated (quantized/rotation.h).
#pragma once

#include <vector>

#include "quantized/layout.h"

namespace quire {

// Writes x's factors behind the panels of the weight at `out`, and returns those of W [n, k], whose rows are `stride`
// apart. A factor is a sign, so that no row of ordinary numbers is one of Hadamard's; the root of the rotated block's
// width; and, where the largest of a column is 8 times (or an eighth) of the median's of all columns, the power of two
// next to their ratio: x is as much larger there, as a rule (a norm's weights and those behind it can be scaled so).
std::vector<float> choose_factors(const QuantizedShape& shape, DType dtype, const void* weight, int64_t stride,
                                  char* out);

}  // namespace quire
