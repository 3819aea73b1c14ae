// Rotary position embedding (Su et al. 2021), in place: of pairs (i, i + rotary_dim / 2), or (2 i, 2 i + 1).
#pragma once

#include "base/kernel_table.h"
#include "isa/rows.h"

namespace quire::QUIRE_ISA {

template <typename T>
QUIRE_INLINE void rotate_head(T* head, const float* cos, const float* sin, int64_t half) {
  for_parts(half, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    const f32 c = load_some(cos + i, n), s = load_some(sin + i, n);
    const f32 first = load_some(head + i, n), second = load_some(head + half + i, n);
    store_some(head + i, first * c - second * s, n);
    store_some(head + half + i, second * c + first * s, n);
  });
}

template <typename T>
static void rotary(void* x, int64_t tokens, int64_t heads, int64_t token_stride, int64_t head_stride,
                   const int64_t* positions, const float* cos_sin, int64_t rotary_dim) {
  const int64_t half = rotary_dim / 2;
  for_rows(tokens, heads * rotary_dim, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const float* cos = cos_sin + positions[token] * rotary_dim;
      for (int64_t head = 0; head < heads; ++head) {
        rotate_head(static_cast<T*>(x) + token * token_stride + head * head_stride, cos, cos + half, half);
      }
    }
  });
}

// Neighbours: cos is that of both lanes of a pair, sin is negative for the first one.
template <typename T>
QUIRE_INLINE void rotate_neighbours(T* head, const float* cos, const float* sin, int64_t dim) {
  for_parts(dim, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    const f32 v = load_some(head + i, n);
    store_some(head + i, v * load_some(cos + i, n) + swap_neighbours(v) * load_some(sin + i, n), n);
  });
}

template <typename T>
static void interleaved_rotary(void* x, int64_t tokens, int64_t heads, int64_t token_stride, int64_t head_stride,
                               const int64_t* positions, const float* cos_sin, int64_t rotary_dim) {
  constexpr int64_t kDims = 256;  // of a head, at once
  for_rows(tokens, heads * rotary_dim, [&](int64_t begin, int64_t end) {
    float cos[kDims], sin[kDims];
    for (int64_t token = begin; token < end; ++token) {
      const float* table = cos_sin + positions[token] * rotary_dim;
      for (int64_t dim = 0; dim < rotary_dim; dim += kDims) {
        const int64_t dims = rotary_dim - dim < kDims ? rotary_dim - dim : kDims;
        for (int64_t i = 0; i < dims; ++i) {
          cos[i] = table[(dim + i) / 2];
          sin[i] = i % 2 == 0 ? -table[(rotary_dim + dim + i) / 2] : table[(rotary_dim + dim + i) / 2];
        }
        T* first = static_cast<T*>(x) + token * token_stride + dim;
        for (int64_t head = 0; head < heads; ++head) rotate_neighbours(first + head * head_stride, cos, sin, dims);
      }
    }
  });
}

static constexpr RotaryTable kRotary = {
    .rotary = {rotary<float>, rotary<bf16>},
    .interleaved_rotary = {interleaved_rotary<float>, interleaved_rotary<bf16>},
};

}  // namespace quire::QUIRE_ISA
