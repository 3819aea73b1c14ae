// Tiles of a product of bf16 that multiply matrices of 2 x 4 by 4 x 2 (bfmmla of FEAT_BF16).
#pragma once

#include "matmul/tiles/tile.h"

namespace quire::QUIRE_ISA {

// Sums of R rows and G vectors of columns. One register holds those of two columns and two rows, the rows of a column
// side by side. A last row without another is multiplied twice, as each row has the same instructions for its sums.
template <int R, int G>
struct MatrixSums {
  static constexpr int kPairs = (R + 1) / 2;
  f32 acc[kPairs][2 * G];

  QUIRE_MEMBER static int other(int pair) { return 2 * pair + 1 < R ? 2 * pair + 1 : 2 * pair; }

  // Of rows `stride` apart; null: zeros.
  QUIRE_MEMBER void begin(const float* sums, int64_t stride) {
    QUIRE_UNROLL
    for (int p = 0; p < kPairs; ++p) {
      QUIRE_UNROLL
      for (int g = 0; g < G; ++g) {
        const f32 first = sums == nullptr ? set1(0) : load(sums + 2 * p * stride + g * W);
        const f32 second = sums == nullptr ? set1(0) : load(sums + other(p) * stride + g * W);
        acc[p][2 * g] = as_float(interleave<0>(as_int(first), as_int(second)));
        acc[p][2 * g + 1] = as_float(interleave<1>(as_int(first), as_int(second)));
      }
    }
  }

  QUIRE_MEMBER void end(float* sums, int64_t stride) const {
    QUIRE_UNROLL
    for (int p = 0; p < kPairs; ++p) {
      QUIRE_UNROLL
      for (int g = 0; g < G; ++g) {
        const i32 low = as_int(acc[p][2 * g]), high = as_int(acc[p][2 * g + 1]);
        store(sums + 2 * p * stride + g * W, as_float(every_other<0>(low, high)));
        if (2 * p + 1 < R) store(sums + (2 * p + 1) * stride + g * W, as_float(every_other<1>(low, high)));
      }
    }
  }

  // += four values of each row times two units of each column; or (kIsHalf) two values and one unit, and zeros.
  template <bool kIsHalf>
  QUIRE_MEMBER void add(const bf16* x, int64_t x_stride, const char* units) {
    i32 rows[kPairs];
    QUIRE_UNROLL
    for (int p = 0; p < kPairs; ++p) {
      rows[p] = side_by_side(load_row<kIsHalf>(x + 2 * p * x_stride), load_row<kIsHalf>(x + other(p) * x_stride));
    }
    QUIRE_UNROLL
    for (int g = 0; g < G; ++g) {
      const i32 first = load_lanes(units + g * W * kUnitBytes);
      const i32 second = kIsHalf ? i32{} : load_lanes(units + kUnitRowBytes + g * W * kUnitBytes);
      const i32 low = interleave<0>(first, second), high = interleave<1>(first, second);
      QUIRE_UNROLL
      for (int p = 0; p < kPairs; ++p) {
        acc[p][2 * g] = add_matrices(acc[p][2 * g], low, rows[p]);
        acc[p][2 * g + 1] = add_matrices(acc[p][2 * g + 1], high, rows[p]);
      }
    }
  }

 private:
  template <bool kIsHalf>
  QUIRE_MEMBER static Eight load_row(const bf16* x) {
    std::conditional_t<kIsHalf, uint32_t, uint64_t> bits;
    std::memcpy(&bits, x, sizeof bits);
    return eight_of(bits);
  }
};

// PackedTile of matmul/matmul.h for bf16, within a panel. Blocks of k must begin at even units: then the same units are
// multiplied together for any number of rows.
struct MatrixTile {
  static constexpr TileShape kShape = kTileShape;
  static_assert(kShape.most <= kVectorsPerPanel);

  template <int R, int G>
  static void run(const bf16* x, int64_t x_stride, const char* weight, int64_t, int64_t units, float* parked,
                  int64_t parked_stride, bool from_zero, Prefetch prefetch) {
    MatrixSums<R, G> sums;
    sums.begin(from_zero ? nullptr : parked, parked_stride);
    int64_t unit = 0;
    for (; unit + 2 <= units; unit += 2, x += 4, weight += 2 * kUnitRowBytes) {
      if constexpr (R > kUnfetchedRows) {
        QUIRE_UNROLL
        for (int g = 0; g < G; ++g) ask_for(Ask::kNext, prefetch.at + g * prefetch.vector_gap);
        prefetch.at += prefetch.step;
        QUIRE_UNROLL
        for (int g = 0; g < G; ++g) ask_for(Ask::kNext, prefetch.at + g * prefetch.vector_gap);
        prefetch.at += prefetch.step;
      }
      sums.template add<false>(x, x_stride, weight);
    }
    if (unit < units) sums.template add<true>(x, x_stride, weight);
    sums.end(parked, parked_stride);
  }
};

}  // namespace quire::QUIRE_ISA
