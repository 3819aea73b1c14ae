// Weights that other tools have quantized, into the layout of quantized/layout.h. Nothing is rounded.
#pragma once

#include "quantized/layout.h"

namespace quire {

// Integers of 4 or 8 bits as a tool packed them: that of a row and a column begins rows[row - first] + columns[column]
// bits from the start, inside of a byte. They are the rows [first, first + count) of W.
struct PlacedIntegers {
  const uint8_t* bytes;
  const int64_t *rows, *columns;
  int64_t first, count;

  void read(int64_t row, int64_t column, int64_t num_columns, int bits, uint8_t* out) const {
    const int64_t start = rows[row - first];
    for (int64_t i = 0; i < num_columns; ++i) {
      const int64_t at = start + columns[column + i];
      out[i] = uint8_t((bytes[at >> 3] >> (at & 7)) & ((1 << bits) - 1));
    }
  }
};

// Both return whether all scales and mins are finite.
// Rows of W as blocks of ggml, `row_bytes` apart, of the type of the same name as the format's.
bool pack_blocks(int code, const uint8_t* rows, int64_t row_bytes, const QuantizedShape& shape, char* out);

// Some rows of W. Of all its rows: scales [n, bases] and zero points [n, bases] (null where the format has none). Rows
// are packed in their order: each call makes those behind its own, of the same panel, zero.
bool pack_integers(const QuantizedShape& shape, const PlacedIntegers& from, const char* scales, const uint8_t* zeros,
                   char* out);

}  // namespace quire
