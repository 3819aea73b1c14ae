#include "binding.h"
#include "kv_cache/kv_cache.h"

namespace quire {
namespace {

KvCache make_cache(Address k_cache, Address v_cache, int64_t k_block_bytes, int64_t v_block_bytes, int64_t num_blocks,
                   int64_t num_kv_heads, int64_t key_bytes, int64_t value_bytes, int64_t block_size) {
  return {pointer<uint8_t>(k_cache),
          pointer<uint8_t>(v_cache),
          k_block_bytes,
          v_block_bytes,
          num_blocks,
          num_kv_heads,
          key_bytes,
          value_bytes,
          block_size};
}

}  // namespace

void bind_kv_cache(nb::module_& module) {
  nb::class_<KvCache>(module, "KvCache");
  module.def("kv_cache", &make_cache);
  module.def("write_kv",
             kernel(+[](const KvCache& cache, Address key, int64_t key_bytes, Address value, int64_t value_bytes,
                        Address slots, int64_t num_tokens) {
               check_range("write_kv: slot", pointer<int64_t>(slots), num_tokens, 1, cache.num_slots());
               write_kv(cache, pointer<uint8_t>(key), key_bytes, pointer<uint8_t>(value), value_bytes,
                        pointer<int64_t>(slots), num_tokens);
             }),
             Unlocked());
  module.def(
      "quantize_kv",
      kernel(+[](const KvCache& cache, int dtype, Address key, int64_t key_stride, Address value, int64_t value_stride,
                 Address slots, int64_t num_tokens) {
        const auto* ids = pointer<int64_t>(slots);
        check_range("write_kv: slot", ids, num_tokens, 1, cache.num_slots());
        if (dtype == kFloat32) {
          quantize_kv(cache, pointer<float>(key), key_stride, pointer<float>(value), value_stride, ids, num_tokens);
        } else {
          quantize_kv(cache, pointer<bf16>(key), key_stride, pointer<bf16>(value), value_stride, ids, num_tokens);
        }
      }),
      Unlocked());
  module.def(
      "gather_kv",
      [](const KvCache& cache, Address slots, int64_t num_tokens, Address key, Address value) {
        check_range("gather_kv: slot", pointer<int64_t>(slots), num_tokens, 1, cache.num_slots());
        gather_kv(cache, pointer<int64_t>(slots), num_tokens, pointer<uint8_t>(key), pointer<uint8_t>(value));
      },
      Unlocked());
  module.def(
      "copy_slots",
      [](const KvCache& cache, Address src_slots, Address dst_slots, int64_t num_tokens) {
        check_range("copy_slots: source slot", pointer<int64_t>(src_slots), num_tokens, 1, cache.num_slots());
        check_range("copy_slots: destination slot", pointer<int64_t>(dst_slots), num_tokens, 1, cache.num_slots());
        copy_slots(cache, pointer<int64_t>(src_slots), pointer<int64_t>(dst_slots), num_tokens);
      },
      Unlocked());
  module.def(
      "copy_blocks",
      [](Address src, int64_t num_src, Address dst, int64_t num_dst, int64_t block_bytes, Address pairs,
         int64_t num_pairs) {
        const auto* ids = pointer<int64_t>(pairs);
        check_range("copy_blocks: source block", ids, num_pairs, 2, num_src);
        check_range("copy_blocks: destination block", ids + 1, num_pairs, 2, num_dst);
        copy_blocks(pointer<uint8_t>(src), pointer<uint8_t>(dst), block_bytes, ids, num_pairs);
      },
      Unlocked());
}

}  // namespace quire
