// Rows of a quantized weight as numbers.
#pragma once

#include "quantized/rotation.h"
#include "quantized/tiles/unpack.h"

namespace quire::QUIRE_ISA {

// Row `id` of W as it was quantized: integers times scales, minus mins, rounded to T.
template <typename T>
static void dequantize_row(const PanelReader& reader, const char* data, int64_t id, T* out) {
  const QuantizedShape& shape = reader.shape;
  const QuantizedFormat& format = shape.format;
  const char* panel = data + id / kPanelColumns * shape.panel_bytes();
  const int64_t j = id % kPanelColumns, blocks = shape.blocks();
  alignas(64) float scales[2 * kPanelColumns * 2], mins[2 * kPanelColumns * 2];
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t begin = block * QuantizedShape::kBlock, count = smaller(QuantizedShape::kBlock, shape.k - begin);
    const int64_t first = begin / format.group, end = smaller(ceil_div(begin + count, format.group), shape.groups());
    reader.read_scales(panel, first, end, scales, mins);
    const char* units = panel + reader.integers_at + block * shape.block_bytes() + j * kUnitBytes;
    alignas(64) float values[QuantizedShape::kBlock];
    for (int64_t i = 0; i < count; ++i) {
      const int64_t half = format.bits < 8 ? i % (QuantizedShape::kBlock / 2) : i;
      int32_t integer = uint8_t(units[half / kUnitBytes * kUnitRowBytes + half % kUnitBytes]);
      if (format.bits < 8) integer = i == half ? integer & 15 : integer >> 4;
      if (format.bits == 5 || format.bits == 6) {
        const int64_t count = format.bits - 4, row = i / kUnitBytes, place = 4 + row * count / 8;
        const int32_t upper = uint8_t(units[place * kUnitRowBytes + i % kUnitBytes]) >> (row * count % 8);
        integer |= (upper & ((1 << count) - 1)) << 4;
      }
      if (format.table != nullptr) integer = format.table[integer];
      const int64_t at = ((begin + i) / format.group - first) * kPanelColumns + j;
      values[i] = float(integer - format.zero) * scales[at];
      if (format.min != Number::kNone) values[i] = values[i] - mins[at];
    }
    for_parts(count, [&](int64_t i, int64_t n) { store_some(out + begin + i, load_n(values + i, n), n); });
  }
}

// The same of a rotated weight, turned back.
template <typename T>
static void dequantize_rotated_row(const PanelReader& reader, const char* data, int64_t id, T* out) {
  alignas(64) float row[kMostQuantizedK];  // as much as is used is touched
  dequantize_row(reader, data, id, row);
  rotate_back(row, reinterpret_cast<const float*>(data + reader.shape.factors_at()), reader.shape.k, out);
}

// Rows `ids` of W, each in [0, n).
template <typename T>
static void gather_quantized(const QuantizedShape& shape, const int64_t* ids, int64_t count, const char* data,
                             void* out) {
  const PanelReader reader(shape);
  for_rows(count, shape.k, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      T* row = static_cast<T*>(out) + i * shape.k;
      if (shape.format.is_rotated) {
        dequantize_rotated_row(reader, data, ids[i], row);
      } else {
        dequantize_row(reader, data, ids[i], row);
      }
    }
  });
}

}  // namespace quire::QUIRE_ISA
