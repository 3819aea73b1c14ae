#include "base/binding.h"
#include "base/checks.h"
#include "matmul/pack.h"
#include "quantized/packing/factors.h"
#include "quantized/packing/pack.h"
#include "quantized/packing/take_rows.h"

namespace quire {

// A format is its index in kQuantizedFormats and the range of k of a scale, which only some formats need.
void bind_quantized(nb::module_& module) {
  module.def("num_quantized_formats", [] { return std::size(kQuantizedFormats); });
  module.def("quantized_bytes", [](int format, int64_t base_group, int64_t n, int64_t k) {
    return QuantizedShape(format, base_group, n, k).bytes();
  });
  module.def("quantized_rows_bytes", [](int format, int64_t base_group, int64_t rows, int64_t k) {
    return kernels().quantized.rows_bytes(QuantizedShape(format, base_group, 0, k), rows);
  });
  add_function(
      module, "quantize",
      +[](int format, int dtype, const void* weight, int64_t stride, int64_t n, int64_t k, char* out) {
        const QuantizedShape shape(format, 0, n, k);
        ask_for_large_pages(out, shape.bytes());
        std::vector<float> factors;
        if (shape.format.is_rotated) factors = choose_factors(shape, DType(dtype), weight, stride, out);
        const float* given = shape.format.is_rotated ? factors.data() : nullptr;
        return kernels().quantized.quantize[format][dtype](weight, stride, shape, given, out);
      },
      Unlocked());
  add_function(
      module, "pack_blocks",
      +[](int format, const uint8_t* rows, int64_t row_bytes, int64_t n, int64_t k, char* out) {
        const QuantizedShape shape(format, 0, n, k);
        ask_for_large_pages(out, shape.bytes());
        return pack_blocks(format, rows, row_bytes, shape, out);
      },
      Unlocked());
  add_function(
      module, "pack_integers",
      +[](int format, int64_t base_group, const uint8_t* bytes, const int64_t* rows, const int64_t* columns,
          int64_t first, int64_t count, const char* scales, const uint8_t* zeros, int64_t n, int64_t k, char* out) {
        const QuantizedShape shape(format, base_group, n, k);
        ask_for_large_pages(out, shape.bytes());
        return pack_integers(shape, {bytes, rows, columns, first, count}, scales, zeros, out);
      },
      Unlocked());
  add_function(module, "take_packed_rows", &take_packed_rows, Unlocked());
  add_function(
      module, "take_quantized_rows",
      +[](int format, int64_t base_group, int64_t n, int64_t k, const char* weight, const int64_t* rows, int64_t count,
          char* out) { take_quantized_rows(QuantizedShape(format, base_group, n, k), weight, rows, count, out); },
      Unlocked());
  add_function(
      module, "quantized_matmul",
      +[](int format, int64_t base_group, int dtype, const void* x, int64_t x_stride, int64_t rows, const char* weight,
          int64_t n, int64_t k, const float* bias, void* out, int64_t out_stride, int out_dtype, char* rows_of_x,
          const int32_t* order, int activation, float a, float b, float c, bool is_gated) {
        const QuantizedShape shape(format, base_group, n, k);
        const ActivationKind kind = {activation, {a, b, c}};
        const ProductOut to = {n, out_stride, bias, out, DType(out_dtype)};
        const auto run = [=](const NormArgs* norm) {
          kernels().quantized.matmul[dtype]({shape, x, x_stride, rows, weight, rows_of_x, order, to,
                                             activation < 0 ? nullptr : &kind, is_gated, norm});
        };
        KernelGraph* graph = KernelGraph::recording();
        if (graph == nullptr || graph->runs()) run(nullptr);
        if (graph == nullptr) return;
        const auto bytes = [](int of) { return int64_t(of == kFloat32 ? sizeof(float) : sizeof(bf16)); };
        const Memory written[] = {{out, rows * out_stride * bytes(out_dtype)},
                                  {rows_of_x, kernels().quantized.rows_bytes(shape, rows)}};
        std::optional<NormArgs> norm;
        if (x_stride == k) norm = graph->take_norm({x, rows * k * bytes(dtype)}, rows, k, written);
        graph->add([=] { run(norm ? &*norm : nullptr); });
      },
      Unlocked());
  add_kernel(
      module, "gather_quantized",
      +[](int format, int64_t base_group, int dtype, const int64_t* ids, int64_t count, const char* weight, int64_t n,
          int64_t k, void* out) {
        check_range("embedding: token id", ids, count, n);
        kernels().quantized.gather[dtype](QuantizedShape(format, base_group, n, k), ids, count, weight, out);
      });
}

}  // namespace quire
