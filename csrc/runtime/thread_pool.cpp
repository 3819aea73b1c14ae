#include "runtime/thread_pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/available_cpus.h"
#include "runtime/memory.h"

namespace quire {
namespace {

using Microseconds = std::chrono::microseconds;

// Long enough to bridge the gap between the kernels of one forward pass, short enough that an idle engine costs
// nothing.
constexpr Microseconds kSpin{50};
// Bridges the gap between the steps of a small model. A worker spins for that long only after a pause that was shorter:
// while steps follow each other, and once more after the last one.
constexpr Microseconds kLongSpin{500};

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins, looking at the clock now and then, until `done` or until the time is over. Yields the CPU to other threads
// that wait for it, such as one of the same region or of another engine on the machine.
template <typename Condition>
bool spin_until(Condition done, Microseconds spin = kSpin) {
  const auto deadline = std::chrono::steady_clock::now() + spin;
  do {
    for (int i = 0; i < 64; ++i) {
      if (done()) return true;
      pause();
    }
    std::this_thread::yield();
  } while (std::chrono::steady_clock::now() < deadline);
  return done();
}

thread_local int tls_thread = -1;                       // this thread's number while it runs a task
thread_local ThreadPool* tls_pool = nullptr;            // the pool this thread's kernels run on; null: the default one
thread_local std::vector<ThreadPool*> tls_outer_pools;  // what tls_pool was when each pool was entered

struct Running {
  explicit Running(int thread) { tls_thread = thread; }
  ~Running() { tls_thread = -1; }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;
};

// The worker threads of a pool. A region is one parallel_for. Each thread has a share of its tasks, one behind the
// other, in a cache line of its own; who has done its share goes on with what is left of the next threads'. A task is
// claimed by compare-and-swap on the share's `ticket`, which holds the region's number (upper half) and how many of the
// share's tasks are unclaimed (lower half). While any are left the caller is still in run(), so whatever a thread reads
// between seeing such a ticket and claiming from it belongs to that region. A worker that wakes late claims nothing,
// and the caller does not wait for it.
//
// A region should take little more than the ways of two cache lines: the ticket's to the worker, and back that of the
// worker's count. So the caller publishes its own share last and writes no other line that workers read, each worker
// counts in a line of its own, and does so before it looks at the shares of others.
class Team {
 public:
  // `cpus`: one for each thread, or none. Scratch memory that the workers ask for is that of `pool`.
  Team(ThreadPool* pool, int count, const std::vector<int>& cpus) : shares_(size_t(count)) {
    for (int thread = 1; thread < count; ++thread) {
      try {
        workers_.emplace_back([this, pool, thread] {
          tls_pool = pool;
          work(thread);
        });
      } catch (const std::system_error& error) {  // of a limit on threads, or on memory for their stacks
        end();
        throw TooFewThreads("only " + std::to_string(thread) + " of " + std::to_string(count) +
                            " threads could be started (" + error.what() + "): lower num_threads");
      }
      if (!cpus.empty()) pin_to_cpu(workers_.back(), cpus[size_t(thread)]);
    }
  }

  ~Team() { end(); }

  void run(int64_t num_tasks, Task task) {
    const uint32_t region = begin(num_tasks, &task);
    if (sleepers_.load() > 0) region_.notify_all();
    finished_ += uint32_t(num_tasks);
    for (size_t i = 0; i < shares_.size() && !is_finished(); ++i) finished_ -= take_from(shares_[i], region, 0);
    if (!spin_until([this] { return is_finished(); })) sleep_until_finished();
    if (has_error_.load(std::memory_order_relaxed)) {
      has_error_.store(false, std::memory_order_relaxed);
      std::rethrow_exception(std::exchange(error_, nullptr));
    }
  }

  bool is_awake() const { return sleepers_.load(std::memory_order_relaxed) == 0; }

  // Workers that sleep spin for a while, as after a region. Only while no region runs.
  void wake() {
    if (sleepers_.load() == 0) return;
    begin(0, nullptr);
    region_.notify_all();
  }

 private:
  // Only while no region runs.
  void end() {
    stop_.store(true);
    begin(0, nullptr);
    region_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  struct Share {
    alignas(64) std::atomic<uint64_t> ticket{0};
    std::atomic<const Task*> task{nullptr};
    std::atomic<int64_t> end{0};                    // the number behind that of its last task
    alignas(64) std::atomic<uint32_t> finished{0};  // tasks, of any share and region, that this worker has run
  };

  // The next region, of tasks that are ready; null: none.
  uint32_t begin(int64_t num_tasks, const Task* task) {
    const uint32_t region = region_.load(std::memory_order_relaxed) + 1;
    const int64_t count = int64_t(shares_.size());
    for (int64_t i = count - 1; i >= 0; --i) {
      const int64_t start = num_tasks * i / count, end = num_tasks * (i + 1) / count;
      Share& share = shares_[size_t(i)];
      share.task.store(task, std::memory_order_relaxed);
      share.end.store(end, std::memory_order_relaxed);
      share.ticket.store(uint64_t{region} << 32 | uint64_t(end - start), std::memory_order_release);
    }
    region_.store(region);
    return region;
  }

  bool is_finished() const {
    uint32_t finished = 0;
    for (size_t i = 1; i < shares_.size(); ++i) finished += shares_[i].finished.load();
    return finished == finished_;
  }

  void sleep_until_finished() {
    is_waiting_.store(true);
    for (uint32_t seen = calls_.load(); !is_finished(); seen = calls_.load()) calls_.wait(seen);
    is_waiting_.store(false);
  }

  // The caller may leave, and the task object with it, as soon as all tasks are counted.
  void take_tasks(uint32_t region, int thread) {
    for (size_t i = 0; i < shares_.size(); ++i) {
      const uint32_t num_done = take_from(shares_[(size_t(thread) + i) % shares_.size()], region, thread);
      if (num_done == 0) continue;
      shares_[size_t(thread)].finished.fetch_add(num_done);
      if (is_waiting_.load()) {
        calls_.fetch_add(1);
        calls_.notify_one();
      }
    }
  }

  // Returns how many tasks it has run.
  uint32_t take_from(Share& share, uint32_t region, int thread) {
    uint32_t num_done = 0;
    uint64_t ticket = share.ticket.load(std::memory_order_acquire);
    while (uint32_t(ticket >> 32) == region && uint32_t(ticket) != 0) {
      const Task* task = share.task.load(std::memory_order_relaxed);
      const int64_t index = share.end.load(std::memory_order_relaxed) - int64_t(uint32_t(ticket));
      if (!share.ticket.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel,
                                              std::memory_order_acquire)) {
        continue;
      }
      try {
        const Running running(thread);
        (*task)(index, thread);
      } catch (...) {
        if (!has_error_.exchange(true)) error_ = std::current_exception();
      }
      ++num_done;
      ticket = share.ticket.load(std::memory_order_acquire);
    }
    return num_done;
  }

  void work(int thread) {
    const Share& own = shares_[size_t(thread)];
    uint32_t seen = 0;
    Microseconds spin = kSpin;
    while (true) {
      const auto current = [&] { return uint32_t(own.ticket.load(std::memory_order_acquire) >> 32); };
      const auto changed = [&] { return current() != seen; };
      if (!spin_until(changed, spin)) {
        const auto asleep = std::chrono::steady_clock::now();
        sleepers_.fetch_add(1);
        while (!changed()) region_.wait(seen);
        sleepers_.fetch_sub(1);
        spin = std::chrono::steady_clock::now() - asleep < kLongSpin ? kLongSpin : kSpin;
      }
      seen = current();
      if (own.task.load(std::memory_order_relaxed) == nullptr && stop_.load()) return;
      take_tasks(seen, thread);
    }
  }

  std::vector<Share> shares_;  // of each thread
  uint32_t finished_ = 0;      // what the workers' counts add up to once the last region's tasks are done
  std::exception_ptr error_;   // the first of the region, written by the task that set has_error_
  std::vector<std::thread> workers_;
  alignas(64) std::atomic<uint32_t> region_{0};
  std::atomic<int> sleepers_{0};
  alignas(64) std::atomic<bool> stop_{false};  // this line is written when something rare happens
  std::atomic<bool> has_error_{false};
  std::atomic<bool> is_waiting_{false};  // the caller sleeps, or will
  std::atomic<uint32_t> calls_{0};       // to the caller, which sleeps
};

struct Scratch {
  void* memory = nullptr;
  int64_t bytes = 0;
};

// The default pool: for threads that have not entered another one. Never destroyed, as its workers run until the
// process ends.
ThreadPool& default_pool() {
  static ThreadPool& pool = *new ThreadPool(0);
  return pool;
}

ThreadPool& current_pool() { return tls_pool != nullptr ? *tls_pool : default_pool(); }

std::atomic<int> g_num_forks{0};  // from the first process to this one

const int g_at_fork = pthread_atfork(nullptr, nullptr, [] {
  tls_thread = -1;
  g_num_forks.fetch_add(1);
});

}  // namespace

// What a forked child must not inherit, since the threads do not exist there and the mutex may be locked.
struct ThreadPool::State {
  const int num_forks = g_num_forks.load();
  std::mutex mutex;
  std::unique_ptr<Team> team;    // started by the first region that needs it
  std::vector<Scratch> scratch;  // one per thread; each element is its thread's own while tasks run

  ~State() {
    team.reset();
    for (const Scratch& one : scratch) std::free(one.memory);
  }
};

ThreadPool::ThreadPool(int count, std::vector<int> cpus) : count_(count), cpus_(std::move(cpus)) {}

ThreadPool::~ThreadPool() {
  State* state = state_.load();
  if (state != nullptr && state->num_forks == g_num_forks.load()) delete state;
}

// A forked child leaves the parent's state behind, and makes its own when it first needs one.
ThreadPool::State& ThreadPool::state() {
  State* state = state_.load(std::memory_order_acquire);
  if (state != nullptr && state->num_forks == g_num_forks.load(std::memory_order_relaxed)) return *state;
  auto fresh = std::make_unique<State>();
  return state_.compare_exchange_strong(state, fresh.get()) ? *fresh.release() : *state;
}

int ThreadPool::num_threads() {
  int count = count_.load(std::memory_order_relaxed);
  if (count == 0) {
    const int available = available_cpus();
    if (count_.compare_exchange_strong(count, available)) count = available;
  }
  return count;
}

void ThreadPool::resize(int count, const std::vector<int>& cpus) {
  State& own = state();
  const std::lock_guard lock(own.mutex);
  if (count == count_.load() && cpus == cpus_) return;
  own.team.reset();
  count_.store(count);
  cpus_ = cpus;
}

void ThreadPool::run(int64_t num_tasks, Task task) {
  State& own = state();
  const std::lock_guard lock(own.mutex);
  const int count = num_threads();
  if (int(own.scratch.size()) < count) own.scratch.resize(size_t(count));
  if (num_tasks <= 1 || count == 1) {
    const Running running(0);
    for (int64_t i = 0; i < num_tasks; ++i) task(i, 0);
    return;
  }
  if (own.team == nullptr) own.team = std::make_unique<Team>(this, count, cpus_);
  own.team->run(num_tasks, task);
}

bool ThreadPool::is_awake() {
  State& own = state();
  const std::unique_lock lock(own.mutex, std::try_to_lock);  // else a region runs
  return lock.owns_lock() && own.team != nullptr && own.team->is_awake();
}

void* ThreadPool::scratch(int thread, int64_t bytes) {
  ask_for_memory();
  Scratch& scratch = state().scratch[size_t(thread)];
  if (scratch.bytes < bytes) {
    std::free(std::exchange(scratch.memory, nullptr));
    scratch.bytes = 0;
    scratch.memory = aligned_memory(bytes);
    scratch.bytes = bytes;
  }
  return scratch.memory;
}

void ThreadPool::enter() {
  tls_outer_pools.push_back(tls_pool);
  tls_pool = this;
  State* state = state_.load(std::memory_order_acquire);
  if (state == nullptr || state->num_forks != g_num_forks.load(std::memory_order_relaxed)) return;
  const std::unique_lock lock(state->mutex, std::try_to_lock);  // else a region runs
  if (lock.owns_lock() && state->team != nullptr) state->team->wake();
}

void ThreadPool::leave() {
  tls_pool = tls_outer_pools.back();
  tls_outer_pools.pop_back();
}

void parallel_for(int64_t num_tasks, Task task) {
  if (tls_thread >= 0) {
    for (int64_t i = 0; i < num_tasks; ++i) task(i, tls_thread);
    return;
  }
  current_pool().run(num_tasks, task);
}

void Preparation::finish(FunctionRef<void(int64_t part)> part) {
  const auto is_done = [this] { return done_.load(std::memory_order_acquire) == num_parts_; };
  if (is_done()) return;
  int64_t num_done = 0;
  for (Claim own; (own = claim(claims_.fetch_add(1, std::memory_order_relaxed))).count > 0; num_done += own.count) {
    for (int64_t i = own.first; i < own.first + own.count; ++i) part(i);
  }
  if (num_done > 0) done_.fetch_add(num_done, std::memory_order_release);
  while (!spin_until(is_done)) {
  }
}

// The parts of a claim: as many claims as threads share half of the parts, as many again half of what is left. A line
// that all threads write to goes from core to core with each claim.
Preparation::Claim Preparation::claim(int64_t index) const {
  int64_t first = 0, size;
  while (true) {
    size = (num_parts_ - first + 2 * num_threads_ - 1) / (2 * num_threads_);
    if (size <= 0) return {0, 0};
    if (index < num_threads_) break;
    index -= num_threads_;
    first += num_threads_ * size;
  }
  first += index * size;
  return {first, std::max<int64_t>(0, std::min(size, num_parts_ - first))};
}

void* thread_scratch(int thread, int64_t bytes) { return current_pool().scratch(thread, bytes); }

bool workers_are_awake() { return current_pool().is_awake(); }

int num_threads() { return current_pool().num_threads(); }

void set_num_threads(int count, const std::vector<int>& cpus) { default_pool().resize(count, cpus); }

}  // namespace quire
