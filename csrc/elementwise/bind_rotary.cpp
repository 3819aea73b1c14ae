#include "binding.h"

namespace quire {

void bind_rotary(nb::module_& module) {
  module.def("rotary",
             kernel(+[](int dtype, Address x, int64_t tokens, int64_t heads, int64_t token_stride, int64_t head_stride,
                        Address positions, Address cos_sin, int64_t max_positions, int64_t rotary_dim) {
               const int64_t* at = pointer<int64_t>(positions);
               check_range("rotary_embedding: position", at, tokens, 1, max_positions);
               kernels().rotary.rotary[dtype](pointer(x), tokens, heads, token_stride, head_stride, at,
                                              pointer<float>(cos_sin), rotary_dim);
             }),
             Unlocked());
}

}  // namespace quire
