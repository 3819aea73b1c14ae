#include "base/binding.h"
#include "base/checks.h"

namespace quire {

void bind_lora(nb::module_& module) {
  add_kernel(
      module, "add_lora",
      +[](int dtype, const void* x, int64_t x_stride, int64_t rows, int64_t k, const int64_t* slots,
          const LoraEntry* table, int64_t num_slots, int64_t n0, int64_t n1, int64_t n2, void* y, int64_t y_stride,
          void* work, int64_t work_stride) {
        check_range("add_lora: adapter slot", slots, rows, num_slots, 1, -1);
        kernels().lora.add_lora[dtype](
            {x, x_stride, rows, k, slots, table, num_slots, {n0, n1, n2}, y, y_stride, work, work_stride});
      });
}

}  // namespace quire
