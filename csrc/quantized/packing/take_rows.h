// Some rows of a matrix in panels (matmul/layout.h, quantized/layout.h), as a matrix of their own.
#pragma once

#include "quantized/layout.h"

namespace quire {

// Both write the rows of the given indices to `out`, which has memory for `count` rows, with the same bits.
void take_packed_rows(const char* weight, int64_t k, int64_t element_bytes, const int64_t* rows, int64_t count,
                      char* out);
void take_quantized_rows(const QuantizedShape& shape, const char* weight, const int64_t* rows, int64_t count,
                         char* out);

}  // namespace quire
