// Walking along rows in vectors, and sharing the rows of a batch among the threads.
#pragma once

#include "isa/simd.h"
#include "runtime/thread_pool.h"

namespace quire::QUIRE_ISA {

// load and store of n <= W elements. The loops below pass a constant W wherever a whole vector is left.
template <typename T>
QUIRE_INLINE f32 load_some(const T* p, int64_t n) {
  return n == W ? load(p) : load_n(p, n);
}
template <typename T>
QUIRE_INLINE void store_some(T* p, f32 v, int64_t n) {
  if (n == W) {
    store(p, v);
  } else {
    store_n(p, v, n);
  }
}

// Calls part(i, n) for the parts [i, i + n) of [0, width), all W wide but the last.
template <typename Part>
QUIRE_INLINE void for_parts(int64_t width, const Part& part) {
  int64_t i = 0;
  for (; i + W <= width; i += W) part(i, W);
  if (i < width) part(i, width - i);
}

// to[i, i + n) = make(i, n) for the parts of a row, two vectors at a time: their operations overlap.
template <typename T, typename Make>
QUIRE_INLINE void make_row(T* to, int64_t width, const Make& make) {
  int64_t i = 0;
  for (; i + 2 * W <= width; i += 2 * W) {
    const f32 first = make(i, W);
    store_two(to + i, first, make(i + W, W));
  }
  for_parts(width - i,
            [&](int64_t j, int64_t n) __attribute__((always_inline)) { store_some(to + i + j, make(i + j, n), n); });
}

// The sum of all lanes of part(i, n) over the parts of a row: in an order that only `width` decides.
template <typename Part>
QUIRE_INLINE float sum_parts(int64_t width, const Part& part) {
  f32 even = set1(0), odd = set1(0);
  int64_t i = 0;
  for (; i + 2 * W <= width; i += 2 * W) {
    even = even + part(i, W);
    odd = odd + part(i + W, W);
  }
  for (; i + W <= width; i += W) even = even + part(i, W);
  if (i < width) odd = odd + part(i, width - i);
  return reduce_add(even + odd);
}

// The same place of R rows, `stride` apart: of each three rows one address, which the compiler keeps in a register. Of
// a dozen it would keep some in vector registers, and take them out by the ports that multiply. Elsewhere it chooses.
template <int R>
struct RowAddresses {
  const char* first[(R + 2) / 3];
  int64_t stride;

  QUIRE_MEMBER RowAddresses(const char* at, int64_t stride) : stride(stride) {
    QUIRE_UNROLL
    for (int i = 0; i < (R + 2) / 3; ++i) {
      first[i] = at + 3 * i * stride;
#if defined(__AVX512VNNI__) || defined(QUIRE_SIMD_AVX2)
      asm("" : "+r"(first[i]));
#endif
    }
  }
  QUIRE_MEMBER const char* operator[](int r) const { return first[r / 3] + r % 3 * stride; }
  QUIRE_MEMBER void operator+=(int64_t bytes) {
    QUIRE_UNROLL
    for (int i = 0; i < (R + 2) / 3; ++i) first[i] += bytes;
  }
};

#if defined(QUIRE_SIMD_AVX2)
// acc[r][v] += x[r] . pair, of the pairs of bf16 at panels[v] + offset and two floats of each row: the earlier elements
// of all pairs first, and of wide tiles two vectors at a time, so that few registers hold them and twelve sums stay in
// the others. Without the barriers GCC would load more at once, and move sums.
template <int R, int V, typename T>
QUIRE_INLINE void add_pairs_apart(f32 (&acc)[R][V], const T* const (&panels)[V], int64_t offset,
                                  const RowAddresses<R>& x) {
  constexpr int kAtOnce = R * V + V <= 14 ? V : 2;
  static_assert(V % kAtOnce == 0);
  QUIRE_UNROLL
  for (int i = 0; i < 2; ++i) {
    QUIRE_UNROLL
    for (int begin = 0; begin < V; begin += kAtOnce) {
      f32 elements[kAtOnce];
      QUIRE_UNROLL
      for (int v = 0; v < kAtOnce; ++v) {
        const pairs both = load_lanes(reinterpret_cast<const char*>(panels[begin + v]) + offset);
        elements[v] = i == 0 ? lower(both) : upper(both);
      }
      QUIRE_UNROLL
      for (int r = 0; r < R; ++r) {
        const f32 factor = set1(reinterpret_cast<const float*>(x[r])[i]);
        QUIRE_UNROLL
        for (int v = 0; v < kAtOnce; ++v) acc[r][begin + v] = fma(factor, elements[v], acc[r][begin + v]);
        QUIRE_UNROLL
        for (int v = 0; v < kAtOnce; ++v) asm("" : "+x"(acc[r][begin + v]));
      }
      keep_order();
    }
  }
}
#endif

// Up to this many elements a kernel is done before a sleeping worker would have woken, or one that is awake has begun.
constexpr int64_t kInlineElements = 16 * 1024, kInlineElementsAwake = 8 * 1024;

// Calls rows(begin, end) for ranges that together cover [0, num_rows). Each row must be computed alone.
template <typename Rows>
static void for_rows(int64_t num_rows, int64_t elements_per_row, const Rows& rows) {
  const int64_t elements = num_rows * elements_per_row;
  const bool is_small = elements <= kInlineElements;
  if (elements <= kInlineElementsAwake || (is_small && !workers_are_awake())) {
    rows(int64_t{0}, num_rows);
    return;
  }
  const int64_t rows_per_task = 1 + (is_small ? kInlineElementsAwake : kInlineElements) / 4 / (elements_per_row + 1);
  auto task = [&](int64_t index, int) {
    const int64_t begin = index * rows_per_task, end = begin + rows_per_task;
    rows(begin, end < num_rows ? end : num_rows);
  };
  parallel_for((num_rows + rows_per_task - 1) / rows_per_task, task);
}

}  // namespace quire::QUIRE_ISA
