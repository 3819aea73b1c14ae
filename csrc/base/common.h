// Types and macros shared by every translation unit. Holds no functions: see the note on the one-definition rule in
// isa/simd.h.
#pragma once

#include <cstddef>
#include <cstdint>

// GCC's sanitizers do not see what masked intrinsics touch; before each it is said.
#if defined(__SANITIZE_ADDRESS__)
extern "C" void __asan_loadN(const void* data, size_t bytes);
extern "C" void __asan_storeN(void* data, size_t bytes);
#define QUIRE_MASKED_READ __asan_loadN
#define QUIRE_MASKED_WRITE __asan_storeN
#elif defined(__SANITIZE_THREAD__)
extern "C" void __tsan_read_range(const void* data, size_t bytes);
extern "C" void __tsan_write_range(void* data, size_t bytes);
#define QUIRE_MASKED_READ __tsan_read_range
#define QUIRE_MASKED_WRITE __tsan_write_range
#else
#define QUIRE_MASKED_READ(data, bytes) (void)0
#define QUIRE_MASKED_WRITE(data, bytes) (void)0
#endif

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
