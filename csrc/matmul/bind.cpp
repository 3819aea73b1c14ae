#include "base/binding.h"
#include "matmul/pack.h"

namespace quire {

void bind_matmul(nb::module_& module) {
  module.def("packed_bytes", &packed_bytes);
  add_function(module, "pack", &pack, Unlocked());
  add_function(module, "unpack", &unpack, Unlocked());
  add_kernel(module, "gather_packed", &gather_packed);
  add_kernel(module, "gather_rows", &gather_rows);
  add_kernel(
      module, "matmul",
      +[](int dtype, const void* x, int64_t x_stride, int64_t rows, const char* packed, int64_t n, int64_t k,
          const float* bias, void* out, int64_t out_stride, int out_dtype) {
        const ProductOut to = {n, out_stride, bias, out, DType(out_dtype)};
        kernels().matmul.matmul[dtype]({x, x_stride, rows, {packed, n, k}, to});
      });
  add_kernel(
      module, "multiply_heads",
      +[](int dtype, const void* x, int64_t x_stride, int64_t x_head_stride, int64_t rows, int64_t num_heads, int64_t n,
          int64_t k, int64_t tail, const char* weights, void* out) {
        kernels().matmul.of_heads[dtype]({x, x_stride, x_head_stride, rows, num_heads, n, k, tail, weights, out});
      });
}

}  // namespace quire
