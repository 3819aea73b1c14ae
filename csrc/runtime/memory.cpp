#include "runtime/memory.h"

#include <atomic>
#include <cstdlib>
#include <new>

namespace quire {
namespace {

std::atomic<int64_t> g_asks_left{-1};

}  // namespace

void ask_for_memory() {
  if (g_asks_left.load(std::memory_order_relaxed) >= 0 && g_asks_left.fetch_sub(1) == 0) throw std::bad_alloc();
}

void* aligned_memory(int64_t bytes) {
  void* memory = std::aligned_alloc(64, static_cast<size_t>(bytes + 63) / 64 * 64);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

bool refuse_memory(int64_t after) { return g_asks_left.exchange(after) < 0; }

}  // namespace quire
