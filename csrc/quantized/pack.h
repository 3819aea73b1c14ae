// Weights that other tools have quantized, into the layout of quantized/layout.h. Nothing is rounded.
#pragma once

#include "quantized/layout.h"

namespace quire {

// Rows of W as blocks of ggml, `row_bytes` apart, of the type of the same name as the format's.
void pack_blocks(int code, const uint8_t* rows, int64_t row_bytes, const QuantizedShape& shape, char* out);

// W as integers [n, k] of a byte, and scales [n, bases] and zero points [n, bases] (null where the format has none).
void pack_integers(const QuantizedShape& shape, const uint8_t* integers, const char* scales, const uint8_t* zeros,
                   char* out);

}  // namespace quire
