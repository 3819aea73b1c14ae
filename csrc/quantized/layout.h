// The layouts of quantized weights, which no ISA variant changes. As in matmul/layout.h, panels of 32 rows of W; along
// k a panel is made of groups, each of rows of 32 units of four bytes, then the scales of the 32 rows.
#pragma once

#include "matmul/layout.h"

namespace quire {

// One group, so one scale for each row of W. A byte is a value in [-127, 127] + 128; a unit holds four that follow each
// other along k. What the last unit has beyond the matrix multiplies zeros.
struct Int8 {
  using Scale = float;
  static constexpr int32_t kBits = 8, kZero = 128;
  static constexpr int64_t kGroup = 0;  // all of k
};

// Groups of 32 along k. A byte holds two values in [-8, 7], each + 8: unit u has k = 4 u to 4 u + 3 of its group in the
// lower halves of its bytes, and those 16 further on in the upper halves.
struct Int4 {
  using Scale = bf16;
  static constexpr int32_t kBits = 4, kZero = 8;
  static constexpr int64_t kGroup = 32;
};

enum QuantizedFormat : int { kInt8 = 0, kInt4 = 1, kNumQuantizedFormats = 2 };

template <typename Format>
struct QuantizedShape {
  static constexpr int64_t kBlock = Format::kGroup == 0 ? 4 : Format::kGroup;
  int64_t n, k;

  QUIRE_MEMBER int64_t panels() const { return (n + kPanelColumns - 1) / kPanelColumns; }
  QUIRE_MEMBER int64_t groups() const {
    if constexpr (Format::kGroup == 0) return 1;
    return (k + kBlock - 1) / kBlock;
  }
  QUIRE_MEMBER int64_t group_k() const { return Format::kGroup == 0 ? (k + 3) / 4 * 4 : kBlock; }
  QUIRE_MEMBER int64_t unit_rows() const { return group_k() * Format::kBits / (8 * kUnitBytes); }
  QUIRE_MEMBER int64_t group_bytes() const {
    return unit_rows() * kUnitRowBytes + kPanelColumns * int64_t(sizeof(typename Format::Scale));
  }
  QUIRE_MEMBER int64_t panel_bytes() const { return groups() * group_bytes(); }
  QUIRE_MEMBER int64_t bytes() const { return panels() * panel_bytes(); }
};

}  // namespace quire
