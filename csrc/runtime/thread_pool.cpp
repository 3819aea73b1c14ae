#include "runtime/thread_pool.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/available_cpus.h"
#include "runtime/memory.h"

namespace quire {
namespace {

// Long enough to bridge the gap between the kernels of one forward pass, short enough that an idle engine costs
// nothing.
constexpr std::chrono::microseconds kSpin{50};

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins, looking at the clock now and then, until `done` or until kSpin is over. Gives its CPU up to whoever waits for
// it, such as a thread of this very region or of another engine on the machine.
template <typename Condition>
bool spin_until(Condition done) {
  const auto deadline = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 64; ++i) {
      if (done()) return true;
      pause();
    }
    std::this_thread::yield();
  } while (std::chrono::steady_clock::now() < deadline);
  return done();
}

thread_local int tls_thread = -1;  // this thread's number while it runs a task

struct Running {
  explicit Running(int thread) { tls_thread = thread; }
  ~Running() { tls_thread = -1; }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;
};

// A region is one parallel_for. Its tasks are claimed by compare-and-swap on `ticket_`, which holds the region's number
// (upper half) and how many of its tasks nobody has claimed (lower half). While any are left the caller is still in
// run(), so whatever a worker reads between seeing such a ticket and claiming from it belongs to that region. A worker
// that wakes late claims nothing and is not waited for.
class Pool {
 public:
  // `cpus`: one for each thread, or none.
  Pool(int count, const std::vector<int>& cpus) {
    for (int thread = 1; thread < count; ++thread) {
      workers_.emplace_back([this, thread] { work(thread); });
      if (!cpus.empty()) pin_to_cpu(workers_.back(), cpus[size_t(thread)]);
    }
  }

  // Only on a pool with no region running.
  ~Pool() {
    stop_.store(true);
    region_.fetch_add(1);
    region_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  void run(int64_t num_tasks, Task task) {
    task_.store(&task, std::memory_order_relaxed);
    num_tasks_.store(num_tasks, std::memory_order_relaxed);
    pending_.store(uint32_t(num_tasks), std::memory_order_relaxed);
    has_error_.store(false, std::memory_order_relaxed);
    const uint32_t region = region_.load(std::memory_order_relaxed) + 1;
    ticket_.store(uint64_t{region} << 32 | uint64_t(num_tasks), std::memory_order_release);
    region_.store(region);
    if (sleepers_.load() > 0) region_.notify_all();
    take_tasks(region, 0);
    wait();
    if (has_error_.load(std::memory_order_relaxed)) std::rethrow_exception(std::exchange(error_, nullptr));
  }

 private:
  void wait() {
    if (spin_until([this] { return pending_.load(std::memory_order_acquire) == 0; })) return;
    for (uint32_t left = pending_.load(std::memory_order_acquire); left != 0;
         left = pending_.load(std::memory_order_acquire)) {
      pending_.wait(left, std::memory_order_acquire);
    }
  }

  void take_tasks(uint32_t region, int thread) {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    while (uint32_t(ticket >> 32) == region && uint32_t(ticket) != 0) {
      const Task* task = task_.load(std::memory_order_relaxed);
      const int64_t index = num_tasks_.load(std::memory_order_relaxed) - int64_t(uint32_t(ticket));
      if (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
        continue;
      }
      try {
        const Running running(thread);
        (*task)(index, thread);
      } catch (...) {
        if (!has_error_.exchange(true)) error_ = std::current_exception();
      }
      // The caller may leave, and the task object with it, as soon as this reaches 0.
      if (pending_.fetch_sub(1, std::memory_order_acq_rel) == 1 && thread != 0) pending_.notify_one();
      ticket = ticket_.load(std::memory_order_acquire);
    }
  }

  void work(int thread) {
    uint32_t seen = 0;
    while (true) {
      const auto changed = [this, &seen] { return region_.load(std::memory_order_acquire) != seen; };
      if (!spin_until(changed)) {
        sleepers_.fetch_add(1);
        while (!changed()) region_.wait(seen);
        sleepers_.fetch_sub(1);
      }
      if (stop_.load()) return;
      seen = region_.load(std::memory_order_acquire);
      take_tasks(seen, thread);
    }
  }

  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<uint32_t> region_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
  alignas(64) std::atomic<uint32_t> pending_{0};
  std::atomic<const Task*> task_{nullptr};
  std::atomic<int64_t> num_tasks_{0};
  std::atomic<bool> has_error_{false};
  std::exception_ptr error_;  // the first of the region, written by the task that set has_error_
  std::vector<std::thread> workers_;
};

// Everything a fork must not inherit. Never destroyed: its threads run until the process ends, and a forked child, in
// which they do not exist, leaves the parent's behind and starts its own when it first needs them.
struct Scratch {
  void* memory = nullptr;
  int64_t bytes = 0;
};

struct State {
  std::mutex mutex;
  Pool* pool = nullptr;
  std::vector<Scratch> scratch;  // one per thread; each element is its thread's own while tasks run
};

std::atomic<State*> g_state{new State};
// These a fork does inherit.
std::atomic<int> g_num_threads{0};                                    // 0: not yet known
std::atomic<const std::vector<int>*> g_cpus{new std::vector<int>{}};  // read and replaced under the mutex

const int g_at_fork = pthread_atfork(nullptr, nullptr, [] {
  tls_thread = -1;
  g_state.store(new State);
});

}  // namespace

void parallel_for(int64_t num_tasks, Task task) {
  if (tls_thread >= 0) {
    for (int64_t i = 0; i < num_tasks; ++i) task(i, tls_thread);
    return;
  }
  State& state = *g_state.load();
  const std::lock_guard lock(state.mutex);
  const int count = num_threads();
  if (int(state.scratch.size()) < count) state.scratch.resize(size_t(count));
  if (num_tasks <= 1 || count == 1) {
    const Running running(0);
    for (int64_t i = 0; i < num_tasks; ++i) task(i, 0);
    return;
  }
  if (state.pool == nullptr) state.pool = new Pool(count, *g_cpus.load());
  state.pool->run(num_tasks, task);
}

void* thread_scratch(int thread, int64_t bytes) {
  ask_for_memory();
  Scratch& scratch = g_state.load()->scratch[size_t(thread)];
  if (scratch.bytes < bytes) {
    std::free(std::exchange(scratch.memory, nullptr));
    scratch.bytes = 0;
    scratch.memory = aligned_memory(bytes);
    scratch.bytes = bytes;
  }
  return scratch.memory;
}

int num_threads() {
  int count = g_num_threads.load(std::memory_order_relaxed);
  if (count == 0) {
    count = available_cpus();
    g_num_threads.store(count);
  }
  return count;
}

void set_num_threads(int count, const std::vector<int>& cpus) {
  State& state = *g_state.load();
  const std::lock_guard lock(state.mutex);
  if (count == g_num_threads.load() && cpus == *g_cpus.load()) return;
  delete state.pool;
  state.pool = nullptr;
  g_num_threads.store(count);
  delete g_cpus.exchange(new std::vector<int>(cpus));
}

}  // namespace quire
