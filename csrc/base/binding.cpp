#include "base/binding.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

NB_MODULE(_native, module) {
  using namespace quire;
  nb::set_leak_warnings(false);  // a command ends without collecting its objects
  module.def("isa", [] { return kernels().name; });
  module.def("available_isas", &available_isas);
  module.def("use_isa", &use_isa);
  add_function(
      module, "read_memory", +[](const void* data, int64_t bytes) { kernels().probe.read_memory(data, bytes); },
      Unlocked());
  add_function(
      module, "multiply_in_registers",
      +[](int dtype, int64_t rounds) { return kernels().probe.multiply_in_registers[dtype](rounds); }, Unlocked());
  bind_pool(module);
  bind_graph(module);
  bind_matmul(module);
  bind_quantized(module);
  bind_lora(module);
  bind_experts(module);
  bind_elementwise(module);
  bind_attention(module);
  bind_kv_cache(module);
  bind_sampling(module);
  bind_ranks(module);
}
