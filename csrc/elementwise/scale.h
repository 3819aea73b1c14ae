// Multiplying by a number, and capping, softly or not, in place.
#pragma once

#include "base/kernel_table.h"
#include "isa/rows.h"

namespace quire::QUIRE_ISA {

template <typename T, typename Change>
static void change_rows(T* x, int64_t rows, int64_t width, const Change& change) {
  for_rows(rows, width, [&](int64_t begin, int64_t end) {
    T* from = x + begin * width;
    for_parts((end - begin) * width, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
      store_some(from + i, change(load_some(from + i, n)), n);
    });
  });
}

template <typename T>
static void scale(void* x, int64_t rows, int64_t width, float factor) {
  change_rows(static_cast<T*>(x), rows, width, [=](f32 v) __attribute__((always_inline)) { return v * set1(factor); });
}

template <typename T>
static void clip(void* x, int64_t rows, int64_t width, int64_t stride, float limit) {
  for_rows(rows, width, [&](int64_t begin, int64_t end) {
    for (T* row = static_cast<T*>(x) + begin * stride; begin < end; ++begin, row += stride) {
      for_parts(width, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
        const f32 v = load_some(row + i, n);
        const f32 low = select(v < set1(-limit), set1(-limit), v);  // NaN stays NaN
        store_some(row + i, select(low > set1(limit), set1(limit), low), n);
      });
    }
  });
}

static void softcap(float* x, int64_t rows, int64_t width, float cap) {
  const float inverse = 1.0f / cap;
  change_rows(x, rows, width,
              [=](f32 v) __attribute__((always_inline)) { return set1(cap) * tanh(v * set1(inverse)); });
}

static constexpr ScaleTable kScale = {
    .scale = {scale<float>, scale<bf16>},
    .clip = {clip<float>, clip<bf16>},
    .softcap = softcap,
};

}  // namespace quire::QUIRE_ISA
