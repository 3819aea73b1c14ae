#include "base/binding.h"
#include "kv_cache/kv_cache.h"

namespace quire {

void bind_kv_cache(nb::module_& module) {
  nb::class_<KvCache>(module, "KvCache");
  add_function(
      module, "kv_cache",
      +[](uint8_t* keys, uint8_t* values, int64_t key_block_stride, int64_t value_block_stride, int64_t num_blocks,
          int64_t num_kv_heads, int64_t key_bytes, int64_t value_bytes, int64_t block_size) {
        return KvCache{keys,         values,    key_block_stride, value_block_stride, num_blocks,
                       num_kv_heads, key_bytes, value_bytes,      block_size};
      });
  add_kernel(module, "write_kv", &write_kv);
  add_kernel(module, "write_latents", &write_latents);
  add_kernel(
      module, "quantize_kv",
      +[](const KvCache& cache, int dtype, const void* key, int64_t key_stride, const void* value, int64_t value_stride,
          const int64_t* slots, int64_t num_tokens) {
        (dtype == kFloat32 ? &quantize_kv<float> : &quantize_kv<bf16>)(cache, key, key_stride, value, value_stride,
                                                                       slots, num_tokens);
      });
  add_function(module, "gather_kv", &gather_kv, Unlocked());
  add_function(module, "copy_slots", &copy_slots, Unlocked());
  add_function(module, "copy_blocks", &copy_blocks, Unlocked());
}

}  // namespace quire
