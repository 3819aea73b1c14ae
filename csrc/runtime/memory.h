// Memory that kernels work in, and a way for tests to have it refused.
#pragma once

#include <cstdint>

namespace quire {

// To be called wherever a kernel is about to use memory of its own, taken now or kept from an earlier call. Throws
// std::bad_alloc where a test wants it to.
void ask_for_memory();

// Memory of a mapped file.
struct FileRange {
  const char* data;
  int64_t bytes;
};

// Asks the system to read the range where it is not in memory, and does not wait for it.
void read_ahead(const FileRange& range);

// Whether a core's first-level cache of data has 48 KiB or more.
bool has_large_nearest_cache();

// Whether the processor is Intel's, on which requests into the first-level cache take what reading needs.
bool is_intel();

// 64-byte aligned, to be freed by std::free. Throws std::bad_alloc.
void* aligned_memory(int64_t bytes);

// After `after` more calls of ask_for_memory one throws; negative: none will. Returns whether none is due any more from
// the call of this before: one has thrown, or none was to.
bool refuse_memory(int64_t after);

}  // namespace quire
