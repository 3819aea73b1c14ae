#include "binding.h"
#include "checks.h"

namespace quire {

void bind_elementwise(nb::module_& module) {
  add_kernel(module, "add", &KernelTable::norm, &NormTable::add);
  add_kernel(module, "rms_norm", &KernelTable::norm, &NormTable::rms_norm);
  add_kernel(module, "add_rms_norm", &KernelTable::norm, &NormTable::add_rms_norm);
  add_kernel(module, "layer_norm", &KernelTable::norm, &NormTable::layer_norm);
  add_kernel(module, "head_layer_norm", &KernelTable::norm, &NormTable::head_layer_norm);
  // After the dtype, the fields of ActivationKind in their order.
  add_kernel(
      module, "activation",
      +[](int dtype, int kind, float a, float b, float c, const void* x, int64_t rows, int64_t width, void* out) {
        kernels().activation.activation[dtype]({kind, {a, b, c}}, x, rows, width, out);
      });
  add_kernel(
      module, "gated_activation",
      +[](int dtype, int kind, float a, float b, float c, const void* x, int64_t rows, int64_t width, void* out) {
        kernels().activation.gated_activation[dtype]({kind, {a, b, c}}, x, rows, width, out);
      });
  add_kernel(module, "scale", &KernelTable::scale, &ScaleTable::scale);
  add_kernel(module, "clip", &KernelTable::scale, &ScaleTable::clip);
  add_kernel(
      module, "softcap",
      +[](float* x, int64_t rows, int64_t width, float cap) { kernels().scale.softcap(x, rows, width, cap); });
  add_kernel(
      module, "rotary",
      +[](int dtype, void* x, int64_t tokens, int64_t heads, int64_t token_stride, int64_t head_stride,
          const int64_t* positions, const float* cos_sin, int64_t max_positions, int64_t rotary_dim, bool interleaved) {
        check_range("rotary_embedding: position", positions, tokens, max_positions);
        const RotaryTable& table = kernels().rotary;
        (interleaved ? table.interleaved_rotary : table.rotary)[dtype](x, tokens, heads, token_stride, head_stride,
                                                                       positions, cos_sin, rotary_dim);
      });
}

}  // namespace quire
