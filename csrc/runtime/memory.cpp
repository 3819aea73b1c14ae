#include "runtime/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>
#include <vector>

namespace quire {
namespace {

std::atomic<int64_t> g_asks_left{-1};

// mincore says of files that are not this user's that all of them is in memory. It is believed once it has said of
// anything that it is not.
std::atomic<bool> g_sees_absence{false};

#ifdef __linux__
using Presence = unsigned char;
#else
using Presence = char;
#endif

}  // namespace

void ask_for_memory() {
  if (g_asks_left.load(std::memory_order_relaxed) >= 0 && g_asks_left.fetch_sub(1) == 0) throw std::bad_alloc();
}

void read_ahead(const FileRange& range) {
  static const int64_t page = sysconf(_SC_PAGESIZE);
  const int64_t skipped = int64_t(reinterpret_cast<uintptr_t>(range.data) % uintptr_t(page));
  char* start = const_cast<char*>(range.data) - skipped;
  const int64_t bytes = range.bytes + skipped;
  thread_local std::vector<Presence> pages;
  pages.resize(size_t((bytes + page - 1) / page));
  if (mincore(start, size_t(bytes), pages.data()) == 0) {
    const bool is_absent = std::any_of(pages.begin(), pages.end(), [](Presence each) { return (each & 1) == 0; });
    if (is_absent) g_sees_absence.store(true, std::memory_order_relaxed);
    if (!is_absent && g_sees_absence.load(std::memory_order_relaxed)) return;
  }
  madvise(start, size_t(bytes), MADV_WILLNEED);  // if it is refused, products read the pages themselves
}

bool has_large_nearest_cache() {
#ifdef _SC_LEVEL1_DCACHE_SIZE
  static const bool is_large = sysconf(_SC_LEVEL1_DCACHE_SIZE) >= 48 * 1024;
  return is_large;
#else
  return false;
#endif
}

#if defined(__x86_64__)
bool is_intel() { return __builtin_cpu_is("intel"); }
#else
bool is_intel() { return false; }
#endif

void* aligned_memory(int64_t bytes) {
  void* memory = std::aligned_alloc(64, static_cast<size_t>(bytes + 63) / 64 * 64);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

bool refuse_memory(int64_t after) { return g_asks_left.exchange(after) < 0; }

}  // namespace quire
