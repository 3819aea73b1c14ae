// The one thread pool of the process: all kernels share it, so that the cores are never oversubscribed.
#pragma once

#include <cstdint>
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

// Runs task(i, thread) once for each i in [0, num_tasks), on the calling thread and the workers; returns when all are
// done. `thread` is in [0, num_threads()) and belongs to one running task at a time. What a task throws is thrown here,
// of several exceptions the first; other tasks may have run or not. A call from inside a task, and a call with one task
// or one thread, runs inline. Calls from several threads take turns.
void parallel_for(int64_t num_tasks, Task task);

// Threads that take part, the caller included. Until set: the CPUs this process may use (cpuset and cgroup quota).
int num_threads();

// At least 1. Takes effect before the next parallel_for. `cpus`: empty, or `count` CPUs this process may use. Worker i
// is pinned to cpus[i]; the calling thread, which has number 0, is not.
void set_num_threads(int count, const std::vector<int>& cpus = {});

// 64-byte aligned memory of at least `bytes` for the task running as `thread`, until that task ends. Contents are
// undefined. Kept between calls, so that kernels do not allocate; a nested parallel_for must not use its task's. Throws
// std::bad_alloc.
void* thread_scratch(int thread, int64_t bytes);

}  // namespace quire
