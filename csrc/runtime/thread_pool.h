// Pools of threads that kernels run on. Each thread that calls kernels has a current pool: the one it has entered last,
// or the default pool of the process, which all threads share that have entered none.
#pragma once

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <vector>

namespace quire {

template <typename Signature>
class FunctionRef;

// A borrowed callable, two pointers wide. Everything is always_inline: an out-of-line copy compiled with one ISA
// variant's flags could otherwise be merged into the others.
template <typename Result, typename... Args>
class FunctionRef<Result(Args...)> {
 public:
  template <typename Callable>
  __attribute__((always_inline)) inline FunctionRef(Callable& callable)
      : context_(&callable),
        call_([](void* context, Args... args) -> Result { return (*static_cast<Callable*>(context))(args...); }) {}
  __attribute__((always_inline)) inline Result operator()(Args... args) const { return call_(context_, args...); }

 private:
  void* context_;
  Result (*call_)(void*, Args...);
};

using Task = FunctionRef<void(int64_t task, int thread)>;

// The system does not let as many threads be started as a pool has.
struct TooFewThreads : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Threads, and memory for each to work in. Workers are started by the first call that needs them. Safe to call from
// several threads, whose regions then run one at a time; a forked child starts workers of its own.
class ThreadPool {
 public:
  // `count`: threads that take part, the caller included; 0: the CPUs that this process may use (cpuset and cgroup
  // quota). `cpus`: empty, or `count` CPUs that this process may use. Worker i is pinned to cpus[i]; the calling
  // thread, which has number 0, is not pinned.
  explicit ThreadPool(int count, std::vector<int> cpus = {});
  ~ThreadPool();  // only while no region runs
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads();
  void resize(int count, const std::vector<int>& cpus);

  // What parallel_for and thread_scratch do while this pool is current.
  void run(int64_t num_tasks, Task task);
  void* scratch(int thread, int64_t bytes);
  bool is_awake();

  // From enter() to leave() this is the calling thread's current pool, and must live. Calls may be nested. Workers that
  // sleep wake up meanwhile, which takes longer than most kernels, and spin until the first region.
  void enter();
  static void leave();

 private:
  struct State;
  State& state();

  std::atomic<State*> state_{nullptr};
  std::atomic<int> count_;
  std::vector<int> cpus_;  // read and replaced under the state's mutex
};

// These four use the calling thread's current pool.
//
// Runs task(i, thread) once for each i in [0, num_tasks), on the calling thread and the workers; returns when all are
// done. `thread` is in [0, num_threads()) and belongs to one running task at a time. What a task throws is thrown here,
// of several exceptions the first; other tasks may have run or not. A call from inside a task, and a call with one task
// or one thread, runs inline.
void parallel_for(int64_t num_tasks, Task task);

// What the tasks of a region need done first, in parts, which must not throw: by whichever of its threads come, so that
// it takes no region of its own.
class Preparation {
 public:
  __attribute__((always_inline)) inline Preparation(int64_t num_parts, int num_threads)
      : num_parts_(num_parts), num_threads_(num_threads) {}
  // Does parts that nobody has begun, and returns when all are done. Each task calls it, with the same parts.
  void finish(FunctionRef<void(int64_t part)> part);

 private:
  struct Claim {
    int64_t first, count;
  };
  Claim claim(int64_t index) const;

  const int64_t num_parts_, num_threads_;
  alignas(64) std::atomic<int64_t> claims_{0};
  std::atomic<int64_t> done_{0};
};

// Threads that take part, the caller included.
int num_threads();

// Whether no worker sleeps, as a rule since a region ended or the pool was entered a moment ago: then tasks of a
// microsecond are worth sharing.
bool workers_are_awake();

// 64-byte aligned memory of at least `bytes` for the task running as `thread`, until that task ends. Contents are
// undefined. Kept between calls, so that kernels do not allocate; a nested parallel_for must not use its task's. Throws
// std::bad_alloc.
void* thread_scratch(int thread, int64_t bytes);

// Resizes the default pool, whose size is at first that of ThreadPool(0). Takes effect before the next parallel_for.
void set_num_threads(int count, const std::vector<int>& cpus = {});

}  // namespace quire
