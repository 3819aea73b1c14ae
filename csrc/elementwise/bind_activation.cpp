#include "binding.h"

namespace quire {

void bind_activation(nb::module_& module) {
  module.def("activation", kernel(+[](int dtype, int kind, Address x, int64_t rows, int64_t width, Address out) {
               kernels().activation.activation[dtype](Activation(kind), pointer(x), rows, width, pointer(out));
             }),
             Unlocked());
  module.def("gated_activation", kernel(+[](int dtype, int kind, Address x, int64_t rows, int64_t width, Address out) {
               kernels().activation.gated_activation[dtype](Activation(kind), pointer(x), rows, width, pointer(out));
             }),
             Unlocked());
}

}  // namespace quire
