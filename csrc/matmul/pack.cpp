#include "matmul/pack.h"

#include <algorithm>
#include <cstring>

#include "base/checks.h"
#include "runtime/thread_pool.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace quire {
namespace {

constexpr int64_t kBlockUnits = 256;  // of each of a panel's 32 rows: read in whole cache lines, written in 32 KiB

int64_t num_units(int64_t k, int64_t element_bytes) { return (k * element_bytes + kUnitBytes - 1) / kUnitBytes; }

int64_t panel_bytes(int64_t k, int64_t element_bytes) { return num_units(k, element_bytes) * kUnitRowBytes; }

// Units [begin, end) of up to 32 rows -> their place in a panel. The last unit may be half a one.
void pack_block(const char* rows, int64_t row_stride, int64_t num_rows, int64_t row_bytes, int64_t begin, int64_t end,
                char* panel) {
  constexpr int64_t kLineUnits =
      64 / kUnitBytes;  // a cache line of each row at a time: rows may share the cache's sets
  if (num_rows < kPanelColumns) std::memset(panel + begin * kUnitRowBytes, 0, size_t((end - begin) * kUnitRowBytes));
  const int64_t whole_end = std::min(end, row_bytes / kUnitBytes);
  for (int64_t line = begin; line < whole_end; line += kLineUnits) {
    const int64_t count = std::min(kLineUnits, whole_end - line);
    for (int64_t j = 0; j < num_rows; ++j) {
      const char* from = rows + j * row_stride + line * kUnitBytes;
      char* to = panel + line * kUnitRowBytes + j * kUnitBytes;
      for (int64_t unit = 0; unit < count; ++unit) {
        std::memcpy(to + unit * kUnitRowBytes, from + unit * kUnitBytes, kUnitBytes);
      }
    }
  }
  if (whole_end == end) return;
  char* to = panel + whole_end * kUnitRowBytes;
  std::memset(to, 0, kUnitRowBytes);
  for (int64_t j = 0; j < num_rows; ++j) {
    std::memcpy(to + j * kUnitBytes, rows + j * row_stride + whole_end * kUnitBytes, size_t(row_bytes % kUnitBytes));
  }
}

// Row `id` of a packed matrix.
void unpack_row(const char* packed, int64_t id, int64_t k, int64_t element_bytes, char* row) {
  const char* column = packed + id / kPanelColumns * panel_bytes(k, element_bytes) + id % kPanelColumns * kUnitBytes;
  const int64_t row_bytes = k * element_bytes, whole = row_bytes / kUnitBytes;
  for (int64_t unit = 0; unit < whole; ++unit) {
    std::memcpy(row + unit * kUnitBytes, column + unit * kUnitRowBytes, kUnitBytes);
  }
  std::memcpy(row + whole * kUnitBytes, column + whole * kUnitRowBytes, size_t(row_bytes % kUnitBytes));
}

// Calls range(begin, end) over [0, count) in parallel, in ranges of about `bytes_per_task`.
template <typename Range>
void for_ranges(int64_t count, int64_t bytes_each, Range range) {
  if (bytes_each == 0) return;  // nothing to move, and pointers may be null
  constexpr int64_t kBytesPerTask = 128 * 1024;
  const int64_t per_task = 1 + kBytesPerTask / (bytes_each + 1);
  auto task = [&](int64_t index, int) { range(index * per_task, std::min(count, (index + 1) * per_task)); };
  parallel_for((count + per_task - 1) / per_task, task);
}

}  // namespace

void ask_for_large_pages([[maybe_unused]] char* begin, [[maybe_unused]] int64_t bytes) {
#if defined(__linux__)
  constexpr uintptr_t kLargePage = 2 << 20;
  const uintptr_t from = (reinterpret_cast<uintptr_t>(begin) + kLargePage - 1) / kLargePage * kLargePage;
  const uintptr_t to = (reinterpret_cast<uintptr_t>(begin) + uintptr_t(bytes)) / kLargePage * kLargePage;
  if (from < to) madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);  // a hint: failure changes nothing
#endif
}

int64_t packed_bytes(int64_t n, int64_t k, int64_t element_bytes) {
  return (n + kPanelColumns - 1) / kPanelColumns * panel_bytes(k, element_bytes);
}

void pack(const char* rows, int64_t row_stride_bytes, int64_t n, int64_t k, int64_t element_bytes, char* packed) {
  ask_for_large_pages(packed, packed_bytes(n, k, element_bytes));
  const int64_t panels = (n + kPanelColumns - 1) / kPanelColumns, units = num_units(k, element_bytes);
  const int64_t blocks = (units + kBlockUnits - 1) / kBlockUnits;
  for_ranges(panels * blocks, std::min(units, kBlockUnits) * kUnitRowBytes, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) {
      const int64_t panel = index / blocks, unit = index % blocks * kBlockUnits;
      pack_block(rows + panel * kPanelColumns * row_stride_bytes, row_stride_bytes,
                 std::min(kPanelColumns, n - panel * kPanelColumns), k * element_bytes, unit,
                 std::min(units, unit + kBlockUnits), packed + panel * units * kUnitRowBytes);
    }
  });
}

void unpack(const char* packed, int64_t n, int64_t k, int64_t element_bytes, char* rows) {
  const int64_t row_bytes = k * element_bytes;
  for_ranges(n, row_bytes, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) unpack_row(packed, row, k, element_bytes, rows + row * row_bytes);
  });
}

void gather_packed(const int64_t* ids, int64_t count, const char* packed, int64_t n, int64_t k, int64_t element_bytes,
                   char* out) {
  check_range("embedding: token id", ids, count, n);
  const int64_t row_bytes = k * element_bytes;
  for_ranges(count, row_bytes * 4, [&](int64_t begin, int64_t end) {  // each row is strewn over many cache lines
    for (int64_t i = begin; i < end; ++i) unpack_row(packed, ids[i], k, element_bytes, out + i * row_bytes);
  });
}

void gather_rows(const int64_t* ids, int64_t count, const char* table, int64_t n, int64_t row_bytes, char* out) {
  check_range("embedding: token id", ids, count, n);
  for_ranges(count, row_bytes, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      std::memcpy(out + i * row_bytes, table + ids[i] * row_bytes, size_t(row_bytes));
  });
}

}  // namespace quire
