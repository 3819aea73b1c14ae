#include "attention/plan.h"
#include "base/binding.h"

namespace quire {

void bind_attention(nb::module_& module) {
  // After the dtype, the fields of AttentionArgs in their order.
  add_kernel(
      module, "paged_attention",
      +[](int dtype, const void* query, int64_t query_stride, bool int8_cache, const void* k_cache, const void* v_cache,
          int64_t k_block_stride, int64_t v_block_stride, const int32_t* query_start, const int32_t* seq_lens,
          const int32_t* block_tables, int64_t table_stride, int64_t table_width, int64_t num_tokens, int64_t num_seqs,
          int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t num_blocks, int64_t block_size,
          int64_t sliding_window, int64_t look_ahead, int64_t chunk_size, float scale, float softcap,
          const float* sinks, const float* slopes, int64_t reach, const float* bias, const float* of_query,
          const float* of_key, const int32_t* term, int64_t num_terms, void* out) {
        const RelativeTerms relative = {reach, bias, of_query, of_key, term, num_terms};
        paged_attention(DType(dtype),
                        {query,          query_stride, int8_cache,     k_cache,      v_cache,      k_block_stride,
                         v_block_stride, query_start,  seq_lens,       block_tables, table_stride, table_width,
                         num_tokens,     num_seqs,     num_heads,      num_kv_heads, head_dim,     head_dim,
                         num_blocks,     block_size,   sliding_window, look_ahead,   chunk_size,   scale,
                         softcap,        sinks,        slopes,         relative,     out});
      });
  add_kernel(
      module, "latent_attention",
      +[](int dtype, const void* query, const void* latents, int64_t block_stride, const int32_t* query_start,
          const int32_t* seq_lens, const int32_t* block_tables, int64_t table_stride, int64_t table_width,
          int64_t num_tokens, int64_t num_seqs, int64_t num_heads, int64_t width, int64_t value_dim, int64_t num_blocks,
          int64_t block_size, float scale, void* out) {
        AttentionArgs args = {};
        args.query = query;
        args.query_stride = num_heads * width;
        args.v_cache = latents;
        args.v_block_stride = block_stride;
        args.query_start = query_start;
        args.seq_lens = seq_lens;
        args.block_tables = block_tables;
        args.table_stride = table_stride;
        args.table_width = table_width;
        args.num_tokens = num_tokens;
        args.num_seqs = num_seqs;
        args.num_heads = num_heads;
        args.num_kv_heads = 1;
        args.head_dim = width;
        args.value_dim = value_dim;
        args.row_stride = state_row_stride(value_dim);
        args.num_blocks = num_blocks;
        args.block_size = block_size;
        args.sliding_window = args.chunk_size = INT64_MAX;
        args.scale = scale;
        args.out = out;
        paged_attention(DType(dtype), args);
      });
  module.def("attention_sections_read", &attention_sections_read);
}

}  // namespace quire
