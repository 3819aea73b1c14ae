#include "attention/plan.h"
#include "binding.h"

namespace quire {

void bind_attention(nb::module_& module) {
  module.def("paged_attention",
             kernel(+[](int dtype, Address query, int64_t query_stride, bool int8_cache, Address k_cache,
                        Address v_cache, int64_t k_block_stride, int64_t v_block_stride, Address query_start,
                        Address seq_lens, Address block_tables, int64_t table_stride, int64_t table_width,
                        int64_t num_tokens, int64_t num_seqs, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                        int64_t num_blocks, int64_t block_size, int64_t sliding_window, float scale, Address out) {
               paged_attention(DType(dtype), {
                                                 .query = pointer(query),
                                                 .query_stride = query_stride,
                                                 .int8_cache = int8_cache,
                                                 .k_cache = pointer(k_cache),
                                                 .v_cache = pointer(v_cache),
                                                 .k_block_stride = k_block_stride,
                                                 .v_block_stride = v_block_stride,
                                                 .query_start = pointer<int32_t>(query_start),
                                                 .seq_lens = pointer<int32_t>(seq_lens),
                                                 .block_tables = pointer<int32_t>(block_tables),
                                                 .table_stride = table_stride,
                                                 .table_width = table_width,
                                                 .num_tokens = num_tokens,
                                                 .num_seqs = num_seqs,
                                                 .num_heads = num_heads,
                                                 .num_kv_heads = num_kv_heads,
                                                 .head_dim = head_dim,
                                                 .num_blocks = num_blocks,
                                                 .block_size = block_size,
                                                 .sliding_window = sliding_window,
                                                 .scale = scale,
                                                 .out = pointer(out),
                                                 .row_stride = (head_dim + 15) / 16 * 16 + 16,
                                             });
             }),
             Unlocked());
  module.def("attention_sections_read", &attention_sections_read);
}

}  // namespace quire
