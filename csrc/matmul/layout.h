// The layout matmul streams its weights in, and which no ISA variant changes: panels of 32 rows of W (32 outputs), each
// panel [num_units][32] units of four bytes. A unit is one float32 or two bf16 that follow each other along k. What the
// last panel and the last unit have beyond the matrix is zero.
#pragma once

#include "base/common.h"

namespace quire {

constexpr int64_t kPanelColumns = 32;
constexpr int64_t kUnitBytes = 4;
constexpr int64_t kUnitRowBytes = kPanelColumns * kUnitBytes;  // one unit of each column of a panel

// W of y = x W^T: n outputs, k inputs.
struct PackedWeight {
  const char* data;  // 64-byte aligned
  int64_t n, k;
};

template <typename T>
inline constexpr int64_t kPerUnit = kUnitBytes / int64_t(sizeof(T));

}  // namespace quire
