#include "binding.h"
#include "matmul/pack.h"

namespace quire {

void bind_matmul(nb::module_& module) {
  module.def("packed_bytes", &packed_bytes);
  module.def(
      "pack",
      [](Address rows, int64_t row_stride_bytes, int64_t n, int64_t k, int64_t element_bytes, Address packed) {
        pack(pointer<char>(rows), row_stride_bytes, n, k, element_bytes, pointer<char>(packed));
      },
      Unlocked());
  module.def(
      "unpack",
      [](Address packed, int64_t n, int64_t k, int64_t element_bytes, Address rows) {
        unpack({pointer<char>(packed), n, k}, element_bytes, pointer<char>(rows));
      },
      Unlocked());
  module.def(
      "gather_packed",
      kernel(+[](Address ids, int64_t count, Address packed, int64_t n, int64_t k, int64_t element_bytes, Address out) {
        check_range("embedding: token id", pointer<int64_t>(ids), count, 1, n);
        gather_packed(pointer<int64_t>(ids), count, {pointer<char>(packed), n, k}, element_bytes, pointer<char>(out));
      }),
      Unlocked());
  module.def("gather_rows",
             kernel(+[](Address ids, int64_t count, Address table, int64_t n, int64_t row_bytes, Address out) {
               check_range("embedding: token id", pointer<int64_t>(ids), count, 1, n);
               gather_rows(pointer<int64_t>(ids), count, pointer<char>(table), row_bytes, pointer<char>(out));
             }),
             Unlocked());
  module.def("matmul",
             kernel(+[](int dtype, Address x, int64_t x_stride, int64_t rows, Address packed, int64_t n, int64_t k,
                        Address bias, Address out, int out_dtype) {
               kernels().matmul.matmul[dtype]({pointer(x),
                                               x_stride,
                                               rows,
                                               {pointer<char>(packed), n, k},
                                               {n, pointer<float>(bias), pointer(out), DType(out_dtype)}});
             }),
             Unlocked());
}

}  // namespace quire
