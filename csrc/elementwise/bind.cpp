#include "base/binding.h"
#include "base/checks.h"

namespace quire {

void bind_elementwise(nb::module_& module) {
  add_kernel(module, "add", &KernelTable::norm, &NormTable::add);
  add_kernel(module, "rms_norm", &KernelTable::norm, &NormTable::rms_norm);
  // The norm of x, or of residual += x, which a product that is recorded next may take over.
  add_function(
      module, "norm",
      +[](int dtype, const void* x, void* residual, const float* weight, const float* bias, float eps, void* out,
          int64_t rows, int64_t width, bool is_rms) {
        const NormArgs args = {x, residual, weight, bias, eps, out, rows, width, is_rms};
        record_or_run([=] { kernels().norm.norm[dtype](args); });
        if (KernelGraph* graph = KernelGraph::recording()) graph->offer_norm(args);
      },
      Unlocked());
  add_kernel(module, "head_layer_norm", &KernelTable::norm, &NormTable::head_layer_norm);
  // A table after the other: its address, how many rows it has, and the ids of the rows wanted.
  add_kernel(
      module, "embedding_norm",
      +[](int dtype, int64_t num_tables, const void* table0, int64_t count0, const int64_t* ids0, const void* table1,
          int64_t count1, const int64_t* ids1, const void* table2, int64_t count2, const int64_t* ids2,
          const float* weight, const float* bias, float eps, void* out, int64_t rows, int64_t width) {
        const EmbeddingNormArgs args = {
            num_tables, {table0, table1, table2}, {ids0, ids1, ids2}, weight, bias, eps, out, rows, width};
        const int64_t counts[kMaxTables] = {count0, count1, count2};
        for (int64_t t = 0; t < num_tables; ++t) {
          if (args.ids[t] != nullptr) check_range("embedding_norm: row", args.ids[t], rows, counts[t]);
        }
        kernels().norm.embedding_norm[dtype](args);
      });
  add_kernel(module, "pool_rows", &KernelTable::pooling, &PoolingTable::pool_rows);
  // After the dtype, the fields of ActivationKind in their order.
  add_kernel(
      module, "activation",
      +[](int dtype, int kind, float a, float b, float c, const void* x, int64_t rows, int64_t width, void* out) {
        kernels().activation.activation[dtype]({kind, {a, b, c}}, x, rows, width, out);
      });
  add_kernel(
      module, "gated_activation",
      +[](int dtype, int kind, float a, float b, float c, const void* x, int64_t rows, int64_t width, void* out,
          int64_t out_stride) {
        kernels().activation.gated_activation[dtype]({kind, {a, b, c}}, x, rows, width, out, out_stride);
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
