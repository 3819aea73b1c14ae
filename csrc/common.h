// Types and macros shared by every translation unit. Holds no functions: see the note on the one-definition rule in
// simd.h.
#pragma once

#include <cstdint>

#define QUIRE_INLINE static inline __attribute__((always_inline))
#define QUIRE_MEMBER inline __attribute__((always_inline))

namespace quire {

// The upper half of a float32. Arithmetic is always float32.
struct bf16 {
  uint16_t bits;
};

// Index of the element type in a kernel family's pair of function pointers; the values are known to the Python side.
enum DType : int { kFloat32 = 0, kBFloat16 = 1, kNumDTypes = 2 };

}  // namespace quire
