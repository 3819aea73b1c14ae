// Rotary position embedding (Su et al. 2021) in the half-split pairing, in place.
#pragma once

#include "isa/rows.h"
#include "kernel_table.h"

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

static constexpr RotaryTable kRotary = {
    .rotary = {rotary<float>, rotary<bf16>},
};

}  // namespace quire::QUIRE_ISA
