// Sharing the rows of a batch among the threads.
#pragma once

#include "simd.h"
#include "thread_pool.h"

namespace quire::QUIRE_ISA {

// Below this many elements a kernel is done before a sleeping worker would have woken.
constexpr int64_t kInlineElements = 16 * 1024;

// Calls rows(begin, end) for ranges that together cover [0, num_rows). Each row must be computed alone.
template <typename Rows>
static void for_rows(int64_t num_rows, int64_t elements_per_row, Rows rows) {
  if (num_rows * elements_per_row <= kInlineElements) {
    rows(int64_t{0}, num_rows);
    return;
  }
  const int64_t rows_per_task = 1 + kInlineElements / 4 / (elements_per_row + 1);
  auto task = [&](int64_t index, int) {
    const int64_t begin = index * rows_per_task, end = begin + rows_per_task;
    rows(begin, end < num_rows ? end : num_rows);
  };
  parallel_for((num_rows + rows_per_task - 1) / rows_per_task, task);
}

}  // namespace quire::QUIRE_ISA
