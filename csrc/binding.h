// What the bindings of all families share. The Python wrappers have checked shapes, strides and dtypes; a binding
// checks only values, such as ids, since these change from one replay of a recording to the next.
#pragma once

#include <nanobind/nanobind.h>

#include <stdexcept>
#include <string>

#include "kernel_table.h"
#include "runtime/kernel_graph.h"

namespace quire {

namespace nb = nanobind;

using Address = uintptr_t;                                // tensor.data_ptr()
using Unlocked = nb::call_guard<nb::gil_scoped_release>;  // every kernel runs without the interpreter lock

template <typename T = void>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

// What Python calls to run a kernel: runs it, and adds it to the graph where one is being recorded.
template <typename... Args>
auto kernel(void (*run)(Args...)) {
  return [run](Args... args) {
    run(args...);
    if (KernelGraph* graph = KernelGraph::recording()) graph->add([=] { run(args...); });
  };
}

// Throws unless each of `count` ids, `stride` apart, is in [0, limit).
inline void check_range(const char* what, const int64_t* ids, int64_t count, int64_t stride, int64_t limit) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t id = ids[i * stride];
    if (id < 0 || id >= limit) {
      throw std::invalid_argument(std::string(what) + " " + std::to_string(id) + " is not in [0, " +
                                  std::to_string(limit) + ")");
    }
  }
}

void bind_pool(nb::module_& module);
void bind_graph(nb::module_& module);
void bind_matmul(nb::module_& module);
void bind_quantized(nb::module_& module);
void bind_norm(nb::module_& module);
void bind_attention(nb::module_& module);
void bind_kv_cache(nb::module_& module);
void bind_sampling(nb::module_& module);
void bind_activation(nb::module_& module);
void bind_rotary(nb::module_& module);

}  // namespace quire
