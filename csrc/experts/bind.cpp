#include "base/binding.h"
#include "base/checks.h"
#include "experts/grouping.h"
#include "runtime/memory.h"

namespace quire {

void bind_experts(nb::module_& module) {
  module.attr("most_experts") = kMostExperts;
  module.def("expert_work_bytes", [](int64_t rows, int64_t num_experts, int64_t row_bytes) {
    return kernels().experts.work_bytes(rows, num_experts, row_bytes);
  });
  add_kernel(
      module, "route",
      +[](const float* logits, int64_t rows, int64_t num_experts, int64_t top_k, int scoring, const float* bias,
          int64_t num_groups, int64_t top_groups, bool has_pairs, bool is_normalized, float scale, float jitter,
          int32_t* ids, float* weights) {
        kernels().experts.route({logits, rows, num_experts, top_k, scoring, bias, num_groups, top_groups, has_pairs,
                                 is_normalized, scale, jitter, ids, weights});
      });
  add_kernel(module, "group_by_expert", &group_by_expert);
  add_kernel(
      module, "read_ahead", +[](const FileRange* ranges, int64_t num_experts, int64_t matrices, const int32_t* starts) {
        for (int64_t e = 0; e < num_experts; ++e) {
          if (starts[e] == starts[e + 1]) continue;
          for (int64_t i = 0; i < matrices; ++i) read_ahead(ranges[e * matrices + i]);
        }
      });
  add_kernel(
      module, "expert_matmul",
      +[](int dtype, const void* x, int64_t x_stride, const int32_t* pairs, int64_t top_k, int64_t rows,
          const int32_t* starts, const ExpertEntry* table, int64_t num_experts, int64_t n, int64_t k, char* work,
          int64_t row_bytes, void* out, int64_t out_stride, int out_dtype) {
        kernels().experts.matmul[dtype]({x, x_stride, pairs, top_k, rows, starts, table, num_experts, n, k, work,
                                         row_bytes, out, out_stride, DType(out_dtype)});
      });
  add_kernel(
      module, "combine_experts",
      +[](int dtype, const void* y, const float* weights, const int32_t* places, int64_t rows, int64_t top_k,
          int64_t width, const void* shared, const float* gate, void* out) {
        kernels().experts.combine[dtype]({y, weights, places, rows, top_k, width, shared, gate, out});
      });
}

}  // namespace quire
