#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <memory>

#include "base/binding.h"
#include "runtime/available_cpus.h"
#include "runtime/memory.h"
#include "runtime/thread_pool.h"

namespace quire {
namespace {

// A test of the pool from within, as kernels are too slow to meet its races: `num_regions` tiny regions of varying
// size, in quick succession. Returns how many tasks did not run exactly once, or not before their region ended.
int64_t exercise_pool(int64_t num_regions) {
  constexpr int64_t kMostTasks = 41;
  int64_t wrong = 0;
  for (int64_t region = 0; region < num_regions; ++region) {
    const int64_t num_tasks = 1 + region * 7 % kMostTasks;
    const auto runs = std::make_unique<std::atomic<int>[]>(kMostTasks);
    auto task = [&](int64_t index, int thread) {
      static_cast<char*>(thread_scratch(thread, 64))[0] = char(index);
      runs[index].fetch_add(1);
    };
    parallel_for(num_tasks, task);
    for (int64_t index = 0; index < kMostTasks; ++index) wrong += runs[index].load() != (index < num_tasks);
  }
  return wrong;
}

}  // namespace

void bind_pool(nb::module_& module) {
  nb::class_<ThreadPool>(module, "ThreadPool")
      .def(nb::init<int, std::vector<int>>(), nb::arg("count"), nb::arg("cpus"))
      .def("__enter__", &ThreadPool::enter)
      .def("__exit__", [](ThreadPool&, const nb::args&) { ThreadPool::leave(); })
      .def_prop_ro("num_threads", &ThreadPool::num_threads);
  module.def("num_threads", &num_threads);
  module.def("set_num_threads", &set_num_threads, nb::arg("count"), nb::arg("cpus") = std::vector<int>{}, Unlocked());
  module.def("available_cpus", &available_cpus);
  module.def("cpu_quota", &cpu_quota);
  module.def("refuse_memory", &refuse_memory);
  module.def("exercise_pool", &exercise_pool, Unlocked());
}

}  // namespace quire
