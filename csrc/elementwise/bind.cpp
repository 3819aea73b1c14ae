#include "binding.h"
#include "checks.h"

namespace quire {

void bind_elementwise(nb::module_& module) {
  add_kernel(module, "add", &KernelTable::norm, &NormTable::add);
  add_kernel(module, "rms_norm", &KernelTable::norm, &NormTable::rms_norm);
  add_kernel(module, "add_rms_norm", &KernelTable::norm, &NormTable::add_rms_norm);
  add_kernel(module, "layer_norm", &KernelTable::norm, &NormTable::layer_norm);
  add_kernel(module, "activation", &KernelTable::activation, &ActivationTable::activation);
  add_kernel(module, "gated_activation", &KernelTable::activation, &ActivationTable::gated_activation);
  add_kernel(
      module, "rotary",
      +[](int dtype, void* x, int64_t tokens, int64_t heads, int64_t token_stride, int64_t head_stride,
          const int64_t* positions, const float* cos_sin, int64_t max_positions, int64_t rotary_dim) {
        check_range("rotary_embedding: position", positions, tokens, max_positions);
        kernels().rotary.rotary[dtype](x, tokens, heads, token_stride, head_stride, positions, cos_sin, rotary_dim);
      });
}

}  // namespace quire
