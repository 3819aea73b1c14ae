// Rows in a rotated basis, in which no column is far larger than the others (Ashkboos et al. 2024, QuaRot). Rounding to
// a byte loses as much everywhere as the largest value of a row demands, so outliers cost all others their precision.
//
// A row's blocks of columns are multiplied with Hadamard's matrices. Rows of W are rotated too: the products of rotated
// rows are those of the rows themselves. Only sums, differences and powers of two: every variant gives the same bits.
#pragma once

#include <utility>

#include "isa/rows.h"
#include "quantized/layout.h"

namespace quire::QUIRE_ISA {

template <int kStride, size_t... kLanes>
QUIRE_INLINE f32 partners(f32 v, std::index_sequence<kLanes...>) {
  return __builtin_shufflevector(v, v, (kLanes ^ kStride)...);
}

// Lanes whose index lacks the bit kStride become the sum with their partner, which has it and becomes the difference.
template <int kStride>
QUIRE_INLINE f32 add_partners(f32 v) {
  alignas(64) static constexpr int32_t kLanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const i32 is_second = (load_lanes(kLanes) & kStride) != 0;
  return partners<kStride>(v, std::make_index_sequence<W>()) + as_float(as_int(v) ^ (is_second & int32_t(0x80000000)));
}

template <int kStride = 1>
QUIRE_INLINE f32 rotate_lanes(f32 v) {
  if constexpr (kStride < W) return rotate_lanes<2 * kStride>(add_partners<kStride>(v));
  return v;
}

// kWidth values, times the matrix of Hadamard of this size.
template <int kWidth>
static void rotate_block(float* values) {
  if constexpr (kWidth < W) {
    for (int stride = 1; stride < kWidth; stride *= 2) {
      for (int i = 0; i < kWidth; ++i) {
        if ((i & stride) != 0) continue;
        const float a = values[i], b = values[i + stride];
        values[i] = a + b;
        values[i + stride] = a - b;
      }
    }
  } else {
    constexpr int kVectors = kWidth / W;
    f32 v[kVectors];
    QUIRE_UNROLL
    for (int i = 0; i < kVectors; ++i) v[i] = rotate_lanes(load(values + i * W));
    QUIRE_UNROLL
    for (int stride = 1; stride < kVectors; stride *= 2) {
      QUIRE_UNROLL
      for (int i = 0; i < kVectors; ++i) {
        if ((i & stride) != 0) continue;
        const f32 a = v[i], b = v[i + stride];
        v[i] = a + b;
        v[i + stride] = a - b;
      }
    }
    QUIRE_UNROLL
    for (int i = 0; i < kVectors; ++i) store(values + i * W, v[i]);
  }
}

// A row of k values in place, block after block (rotation_width).
static void rotate_row(float* row, int64_t k) {
  for (int64_t i = 0; i < k;) {
    const int64_t width = rotation_width(k - i);
    if (width == 256) {
      rotate_block<256>(row + i);
    } else if (width == 64) {
      rotate_block<64>(row + i);
    } else if (width == 16) {
      rotate_block<16>(row + i);
    } else if (width == 4) {
      rotate_block<4>(row + i);
    }
    i += width;
  }
}

// x times the factors, rotated -> out. The factors hold the matrices' own, so that lengths stay.
template <typename T>
static void rotate(const T* x, const float* factors, int64_t k, float* out) {
  for_parts(k, [&](int64_t i, int64_t n) { store_some(out + i, load_some(x + i, n) * load_some(factors + i, n), n); });
  rotate_row(out, k);
}

}  // namespace quire::QUIRE_ISA
