#include "binding.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

NB_MODULE(_native, module) {
  using namespace quire;
  module.def("isa", [] { return kernels().name; });
  module.def("available_isas", [] {
    const char* names[8];
    const int count = available_isas(names, 8);
    return std::vector<std::string>(names, names + count);
  });
  module.def("use_isa", [](const std::string& name) { return use_isa(name.c_str()); });
  module.def(
      "read_memory", [](Address data, int64_t bytes) { kernels().probe.read_memory(pointer(data), bytes); },
      Unlocked());
  module.def(
      "multiply_in_registers",
      [](int dtype, int64_t rounds) { return kernels().probe.multiply_in_registers[dtype](rounds); }, Unlocked());
  bind_pool(module);
  bind_graph(module);
  bind_matmul(module);
  bind_quantized(module);
  bind_norm(module);
  bind_attention(module);
  bind_kv_cache(module);
  bind_sampling(module);
  bind_activation(module);
  bind_rotary(module);
}
