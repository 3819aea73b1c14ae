#include "binding.h"

namespace quire {

void bind_norm(nb::module_& module) {
  module.def("add", kernel(+[](int dtype, Address x, Address residual, int64_t rows, int64_t width) {
               kernels().norm.add[dtype](pointer(x), pointer(residual), rows, width);
             }),
             Unlocked());
  module.def("rms_norm",
             kernel(+[](int dtype, Address x, Address weight, float eps, Address out, int64_t outer, int64_t inner,
                        int64_t outer_stride, int64_t inner_stride, int64_t width) {
               kernels().norm.rms_norm[dtype](pointer(x), pointer<float>(weight), eps, pointer(out),
                                              {outer, inner, outer_stride, inner_stride, width});
             }),
             Unlocked());
  module.def("add_rms_norm",
             kernel(+[](int dtype, Address x, Address residual, Address weight, float eps, Address out, int64_t rows,
                        int64_t width) {
               kernels().norm.add_rms_norm[dtype](pointer(x), pointer(residual), pointer<float>(weight), eps,
                                                  pointer(out), rows, width);
             }),
             Unlocked());
  module.def("layer_norm",
             kernel(+[](int dtype, Address x, Address residual, Address weight, Address bias, float eps, Address out,
                        int64_t rows, int64_t width) {
               kernels().norm.layer_norm[dtype](pointer(x), pointer(residual), pointer<float>(weight),
                                                pointer<float>(bias), eps, pointer(out), rows, width);
             }),
             Unlocked());
}

}  // namespace quire
