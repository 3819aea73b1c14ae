#include "binding.h"
#include "checks.h"
#include "matmul/pack.h"

namespace quire {
namespace {

int64_t quantized_bytes(int format, int64_t n, int64_t k) {
  return format == kInt8 ? QuantizedShape<Int8>{n, k}.bytes() : QuantizedShape<Int4>{n, k}.bytes();
}

}  // namespace

void bind_quantized(nb::module_& module) {
  module.def("quantized_bytes", &quantized_bytes);
  module.def("quantized_rows_bytes",
             [](int format, int64_t rows, int64_t k) { return kernels().quantized.rows_bytes[format](rows, k); });
  add_function(
      module, "quantize",
      +[](int format, int dtype, const void* weight, int64_t stride, int64_t n, int64_t k, char* out) {
        ask_for_large_pages(out, quantized_bytes(format, n, k));
        return kernels().quantized.quantize[format][dtype](weight, stride, n, k, out);
      },
      Unlocked());
  add_kernel(
      module, "quantized_matmul",
      +[](int format, int dtype, const void* x, int64_t x_stride, int64_t rows, const char* weight, int64_t n,
          int64_t k, const float* bias, void* out, int out_dtype, char* rows_of_x) {
        kernels().quantized.matmul[format][dtype](
            {x, x_stride, rows, k, weight, rows_of_x, {n, bias, out, DType(out_dtype)}});
      });
  add_kernel(
      module, "gather_quantized",
      +[](int format, int dtype, const int64_t* ids, int64_t count, const char* weight, int64_t n, int64_t k,
          void* out) {
        check_range("embedding: token id", ids, count, n);
        kernels().quantized.gather[format][dtype](ids, count, weight, n, k, out);
      });
}

}  // namespace quire
