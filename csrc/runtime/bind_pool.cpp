#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <exception>
#include <memory>

#include "base/binding.h"
#include "runtime/available_cpus.h"
#include "runtime/memory.h"
#include "runtime/thread_pool.h"

namespace quire {
namespace {

// A test of the pool from within, as kernels are too slow to meet its races: `num_regions` tiny regions of varying
// size, in quick succession. Returns how many tasks did not run exactly once, or not before their region ended, or
// found a part of what they need missing or done twice.
int64_t exercise_pool(int64_t num_regions) {
  constexpr int64_t kMostTasks = 41, kMostParts = 23;
  int64_t wrong = 0;
  for (int64_t region = 0; region < num_regions; ++region) {
    const int64_t num_tasks = 1 + region * 7 % kMostTasks;
    const auto runs = std::make_unique<std::atomic<int>[]>(kMostTasks);
    const int64_t num_parts = 1 + region % kMostParts;
    int64_t parts[kMostParts] = {};
    std::atomic<int64_t> num_unprepared{0};
    Preparation prepared(num_parts, num_threads());
    auto prepare = [&](int64_t part) { parts[part] += part + 1; };
    auto task = [&](int64_t index, int thread) {
      prepared.finish(prepare);
      for (int64_t part = 0; part < kMostParts; ++part) {
        if (parts[part] != (part < num_parts ? part + 1 : 0)) num_unprepared.fetch_add(1);
      }
      static_cast<char*>(thread_scratch(thread, 64))[0] = char(index);
      runs[index].fetch_add(1);
    };
    parallel_for(num_tasks, task);
    wrong += num_unprepared.load();
    for (int64_t index = 0; index < kMostTasks; ++index) wrong += runs[index].load() != (index < num_tasks);
  }
  return wrong;
}

// The package's own error, which a command shows as a line.
void translate(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const TooFewThreads& error) {
    PyErr_SetString(nb::module_::import_("quire.common.errors").attr("ConfigError").ptr(), error.what());
  }
}

}  // namespace

void bind_pool(nb::module_& module) {
  nb::register_exception_translator(translate);
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
