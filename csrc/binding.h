// What the bind_<family>.cpp files share. The Python wrappers check every argument; nothing is checked again here.
#pragma once

#include <nanobind/nanobind.h>

#include "kernel_table.h"

namespace quire {

namespace nb = nanobind;

using Address = uintptr_t;                                // tensor.data_ptr()
using Unlocked = nb::call_guard<nb::gil_scoped_release>;  // every kernel runs without the interpreter lock

template <typename T = void>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

void bind_pool(nb::module_& module);
void bind_matmul(nb::module_& module);
void bind_quantized(nb::module_& module);
void bind_norm(nb::module_& module);
void bind_attention(nb::module_& module);
void bind_kv_cache(nb::module_& module);
void bind_sampling(nb::module_& module);
void bind_activation(nb::module_& module);
void bind_rotary(nb::module_& module);

}  // namespace quire
