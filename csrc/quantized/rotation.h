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
  const i32 sign = (load_lanes(kLanes) & kStride) != 0 ? i32{} + int32_t(0xbf800000) : i32{} + 0x3f800000;
  return fma(v, as_float(sign), partners<kStride>(v, std::make_index_sequence<W>()));  // the product is exact
}

template <int kStride = 1>
QUIRE_INLINE f32 rotate_lanes(f32 v) {
  if constexpr (kStride < W) return rotate_lanes<2 * kStride>(add_partners<kStride>(v));
  return v;
}

// kWidth values from index `begin` on, load(i, n), times the matrix of Hadamard of this size -> out + begin.
template <int kWidth, typename Load>
static void rotate_block(int64_t begin, const Load& load, float* out) {
  out += begin;
  if constexpr (kWidth < W) {
    store_n(out, load(begin, kWidth), kWidth);
    for (int stride = 1; stride < kWidth; stride *= 2) {
      for (int i = 0; i < kWidth; ++i) {
        if ((i & stride) != 0) continue;
        const float a = out[i], b = out[i + stride];
        out[i] = a + b;
        out[i + stride] = a - b;
      }
    }
  } else {
    constexpr int kVectors = kWidth / W;
    f32 v[kVectors];
    QUIRE_UNROLL
    for (int i = 0; i < kVectors; ++i) v[i] = rotate_lanes(load(begin + i * W, W));
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
    for (int i = 0; i < kVectors; ++i) store(out + i * W, v[i]);
  }
}

// k values load(i, n), rotated block after block (rotation_width) -> out, which may be where they are.
template <typename Load>
QUIRE_INLINE void rotate_values(int64_t k, const Load& load, float* out) {
  for (int64_t i = 0, width; i < k; i += width) {
    width = rotation_width(k - i);
    const auto block = width == 256  ? rotate_block<256, Load>
                       : width == 64 ? rotate_block<64, Load>
                       : width == 16 ? rotate_block<16, Load>
                       : width == 4  ? rotate_block<4, Load>
                                     : rotate_block<1, Load>;
    block(i, load, out);
  }
}

// A row times its factors, rotated. The factors hold those of the matrices, so that lengths stay.
template <typename T>
static void rotate(const T* x, const float* factors, int64_t k, float* out) {
  rotate_values(k, [=](int64_t i, int64_t n) { return load_some(x + i, n) * load_some(factors + i, n); }, out);
}

// A row of a rotated weight as it was. `factors` are those of x, so that those of the matrices cancel out.
template <typename T>
static void rotate_back(float* row, const float* factors, int64_t k, T* out) {
  rotate_values(k, [=](int64_t i, int64_t n) { return load_some(row + i, n); }, row);
  for_parts(k,
            [&](int64_t i, int64_t n) { store_some(out + i, load_some(row + i, n) * load_some(factors + i, n), n); });
}

}  // namespace quire::QUIRE_ISA
