#include "binding.h"
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
  module.def(
      "quantize",
      [](int format, int dtype, Address weight, int64_t stride, int64_t n, int64_t k, Address out) {
        ask_for_large_pages(pointer<char>(out), quantized_bytes(format, n, k));
        return kernels().quantized.quantize[format][dtype](pointer(weight), stride, n, k, pointer<char>(out));
      },
      Unlocked());
  module.def("quantized_matmul",
             kernel(+[](int format, int dtype, Address x, int64_t x_stride, int64_t rows, Address weight, int64_t n,
                        int64_t k, Address bias, Address out, int out_dtype, Address rows_of_x) {
               kernels().quantized.matmul[format][dtype]({pointer(x),
                                                          x_stride,
                                                          rows,
                                                          k,
                                                          pointer<char>(weight),
                                                          pointer<char>(rows_of_x),
                                                          {n, pointer<float>(bias), pointer(out), DType(out_dtype)}});
             }),
             Unlocked());
  module.def(
      "gather_quantized",
      kernel(+[](int format, int dtype, Address ids, int64_t count, Address weight, int64_t n, int64_t k, Address out) {
        check_range("embedding: token id", pointer<int64_t>(ids), count, 1, n);
        kernels().quantized.gather[format][dtype](pointer<int64_t>(ids), count, pointer<char>(weight), n, k,
                                                  pointer(out));
      }),
      Unlocked());
}

}  // namespace quire
