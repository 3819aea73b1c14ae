#include "binding.h"

namespace quire {

void bind_rotary(nb::module_& module) {
  // Returns the index of the first position that is not in the table, before anything is written; or -1.
  module.def(
      "rotary",
      [](int dtype, Address x, int64_t tokens, int64_t heads, int64_t token_stride, int64_t head_stride,
         Address positions, Address cos_sin, int64_t max_positions, int64_t rotary_dim) -> int64_t {
        const int64_t* at = pointer<int64_t>(positions);
        for (int64_t token = 0; token < tokens; ++token) {
          if (at[token] < 0 || at[token] >= max_positions) return token;
        }
        kernels().rotary.rotary[dtype](pointer(x), tokens, heads, token_stride, head_stride, at,
                                       pointer<float>(cos_sin), rotary_dim);
        return -1;
      },
      Unlocked());
}

}  // namespace quire
