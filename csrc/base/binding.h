// What the bindings of all families share. The Python wrappers have checked shapes, strides and dtypes; what a binding
// calls checks only values (checks.h).
#pragma once

#include <nanobind/nanobind.h>

#include <type_traits>

#include "base/kernel_table.h"
#include "runtime/kernel_graph.h"

namespace quire {

namespace nb = nanobind;

using Unlocked = nb::call_guard<nb::gil_scoped_release>;  // every kernel runs without the interpreter lock

// What Python passes for a parameter of type T: for a pointer an address, tensor.data_ptr().
template <typename T>
using Passed = std::conditional_t<std::is_pointer_v<T>, uintptr_t, T>;

template <typename T>
T received(Passed<T> value) {
  if constexpr (std::is_pointer_v<T>) {
    return reinterpret_cast<T>(value);
  } else {
    return value;
  }
}

// Adds a function that Python calls with addresses in the place of pointers.
template <typename Result, typename... Args, typename... Extra>
void add_function(nb::module_& module, const char* name, Result (*run)(Args...), const Extra&... extra) {
  module.def(name, [run](Passed<Args>... args) { return run(received<Args>(args)...); }, extra...);
}

// Runs a kernel, or adds it to the graph that is being recorded.
template <typename Call>
void record_or_run(const Call& call) {
  KernelGraph* graph = KernelGraph::recording();
  if (graph == nullptr || graph->runs()) call();
  if (graph != nullptr) graph->add(call);
}

// Adds such a function, of a kernel.
template <typename... Args, typename Run>
void add_recorded(nb::module_& module, const char* name, Run run) {
  module.def(name, [run](Passed<Args>... args) { record_or_run([=] { run(received<Args>(args)...); }); }, Unlocked());
}

template <typename... Args>
void add_kernel(nb::module_& module, const char* name, void (*run)(Args...)) {
  add_recorded<Args...>(module, name, run);
}

// The same for a kernel that the variants have for each dtype. Python passes the dtype first.
template <typename Family, typename... Args>
void add_kernel(nb::module_& module, const char* name, Family KernelTable::* family,
                void (*(Family::*of_dtype)[kNumDTypes])(Args...)) {
  add_recorded<int, Args...>(module, name,
                             [=](int dtype, Args... args) { (kernels().*family.*of_dtype)[dtype](args...); });
}

void bind_pool(nb::module_& module);
void bind_graph(nb::module_& module);
void bind_matmul(nb::module_& module);
void bind_quantized(nb::module_& module);
void bind_lora(nb::module_& module);
void bind_experts(nb::module_& module);
void bind_elementwise(nb::module_& module);
void bind_attention(nb::module_& module);
void bind_kv_cache(nb::module_& module);
void bind_sampling(nb::module_& module);
void bind_ranks(nb::module_& module);

}  // namespace quire
