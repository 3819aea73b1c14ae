// Moving keys and values between tokens, slots and blocks. The same code serves every instruction set.
//
// One block of one layer: keys [num_kv_heads, head_dim / pack, block_size, pack], where pack elements fill four bytes,
// and values [num_kv_heads, block_size, head_dim]. An int8 key is rotated, and has two lanes more: the float32 scales
// of the key and of the value. Latents are values of one head without keys. Both caches may be views into one buffer,
// so the stride from block to block is free; within a block everything is contiguous. All sizes here are in bytes; a
// "lane" is four bytes of a key. Slots and blocks that the cache does not have are refused with std::invalid_argument.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "base/checks.h"
#include "base/common.h"
#include "quantized/layout.h"
#include "runtime/memory.h"
#include "runtime/thread_pool.h"

namespace quire {

struct KvCache {
  uint8_t* keys;
  uint8_t* values;
  int64_t key_block_stride;
  int64_t value_block_stride;
  int64_t num_blocks;
  int64_t num_kv_heads;
  int64_t key_bytes;  // of one head, scales included
  int64_t value_bytes;
  int64_t block_size;

  int64_t num_slots() const { return num_blocks * block_size; }
  int64_t lanes() const { return key_bytes / 4; }
  int64_t lane_stride() const { return 4 * block_size; }
  uint8_t* key(int64_t slot, int64_t head) const {
    return keys + slot / block_size * key_block_stride + head * key_bytes * block_size + slot % block_size * 4;
  }
  uint8_t* value(int64_t slot, int64_t head) const {
    return values + slot / block_size * value_block_stride + (head * block_size + slot % block_size) * value_bytes;
  }
};

// Copy `count` four-byte lanes from and to addresses `from_stride` and `to_stride` bytes apart.
inline void copy_lanes(const uint8_t* from, int64_t from_stride, uint8_t* to, int64_t to_stride, int64_t count) {
  for (int64_t i = 0; i < count; ++i) std::memcpy(to + i * to_stride, from + i * from_stride, 4);
}

// Tokens one task moves: enough bytes to be worth a thread's wake-up, or the few microseconds of one that is awake.
inline int64_t tokens_per_task(const KvCache& cache) {
  const int64_t bytes = workers_are_awake() ? 4096 : 32768;
  const int64_t tokens = bytes / (cache.num_kv_heads * (cache.key_bytes + cache.value_bytes));
  return tokens < 1 ? 1 : tokens;
}

// `move(token)` for every token, in parallel.
template <class Move>
void for_each_token(const KvCache& cache, int64_t num_tokens, Move move) {
  const int64_t step = tokens_per_task(cache);
  auto task = [&](int64_t index, int) {
    const int64_t end = (index + 1) * step < num_tokens ? (index + 1) * step : num_tokens;
    for (int64_t token = index * step; token < end; ++token) move(token);
  };
  parallel_for((num_tokens + step - 1) / step, task);
}

// key and value: token t's heads lie together, at `key + t * key_stride`.
inline void write_kv(const KvCache& cache, const uint8_t* key, int64_t key_stride, const uint8_t* value,
                     int64_t value_stride, const int64_t* slots, int64_t num_tokens) {
  check_range("write_kv: slot", slots, num_tokens, cache.num_slots());
  for_each_token(cache, num_tokens, [&](int64_t t) {
    for (int64_t head = 0; head < cache.num_kv_heads; ++head) {
      const int64_t offset = head * cache.value_bytes;
      copy_lanes(key + t * key_stride + offset, 4, cache.key(slots[t], head), cache.lane_stride(), cache.lanes());
      std::memcpy(cache.value(slots[t], head), value + t * value_stride + offset,
                  static_cast<size_t>(cache.value_bytes));
    }
  });
}

// Latents, each followed by its rotary part, as the values of a cache without keys.
inline void write_latents(const KvCache& cache, const uint8_t* latents, int64_t latent_stride, int64_t latent_bytes,
                          const uint8_t* rotary, int64_t rotary_stride, const int64_t* slots, int64_t num_tokens) {
  check_range("write_latents: slot", slots, num_tokens, cache.num_slots());
  for_each_token(cache, num_tokens, [&](int64_t t) {
    uint8_t* to = cache.value(slots[t], 0);
    std::memcpy(to, latents + t * latent_stride, static_cast<size_t>(latent_bytes));
    std::memcpy(to + latent_bytes, rotary + t * rotary_stride, static_cast<size_t>(cache.value_bytes - latent_bytes));
  });
}

QUIRE_INLINE float to_float(float v) { return v; }
QUIRE_INLINE float to_float(bf16 v) {
  const uint32_t bits = uint32_t{v.bits} << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

// to[i] = from[i] / scale to nearest even, for the largest |from[i]| 127; returns scale. NaN makes the scale NaN.
template <typename T>
float quantize_head(const T* from, int64_t count, int8_t* to) {
  int32_t most_bits = 0;  // of the largest absolute value: they are in the order of the floats, NaN last
  for (int64_t i = 0; i < count; ++i) {
    const float v = to_float(from[i]);
    int32_t bits;
    std::memcpy(&bits, &v, sizeof bits);
    bits &= 0x7fffffff;
    most_bits = bits > most_bits ? bits : most_bits;
  }
  float most;
  std::memcpy(&most, &most_bits, sizeof most);
  const float inverse = most > 1e-30f ? 127.0f / most : 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    const float shifted = to_float(from[i]) * inverse + 12582912.0f;  // 1.5 * 2^23: the integer is in the lowest bits
    int32_t bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    to[i] = static_cast<int8_t>(bits);
  }
  return most / 127.0f;
}

// A key as it is rounded: rotated (quantized/rotation.h), so that a channel that is far larger than the others does not
// cost them their precision. Queries are rotated too.
template <typename T>
void rotate_key(const T* from, int64_t count, float* to) {
  for (int64_t begin = 0, width; begin < count; begin += width, from += width, to += width) {
    width = rotation_width(count - begin);
    const float factor = 1 / rotation_root(width);
    for (int64_t i = 0; i < width; ++i) to[i] = to_float(from[i]) * factor;
    for (int64_t stride = 1; stride < width; stride *= 2) {
      for (int64_t first = 0; first < width; first += 2 * stride) {
        for (int64_t i = first; i < first + stride; ++i) {
          const float a = to[i], b = to[i + stride];
          to[i] = a + b;
          to[i + stride] = a - b;
        }
      }
    }
  }
}

// As write_kv into an int8 cache, each head of each token with its own scales. Strides in elements.
template <typename T>
void quantize_kv(const KvCache& cache, const void* key, int64_t key_stride, const void* value, int64_t value_stride,
                 const int64_t* slots, int64_t num_tokens) {
  check_range("write_kv: slot", slots, num_tokens, cache.num_slots());
  const int64_t head_dim = cache.value_bytes;
  for_each_token(cache, num_tokens, [&](int64_t t) {
    static thread_local std::vector<uint8_t> packed;
    static thread_local std::vector<float> rotated;
    ask_for_memory();
    packed.resize(static_cast<size_t>(cache.key_bytes));
    rotated.resize(static_cast<size_t>(head_dim));
    for (int64_t head = 0; head < cache.num_kv_heads; ++head) {
      rotate_key(static_cast<const T*>(key) + t * key_stride + head * head_dim, head_dim, rotated.data());
      const float scales[2] = {quantize_head(rotated.data(), head_dim, reinterpret_cast<int8_t*>(packed.data())),
                               quantize_head(static_cast<const T*>(value) + t * value_stride + head * head_dim,
                                             head_dim, reinterpret_cast<int8_t*>(cache.value(slots[t], head)))};
      std::memcpy(packed.data() + head_dim, scales, sizeof scales);
      copy_lanes(packed.data(), 4, cache.key(slots[t], head), cache.lane_stride(), cache.lanes());
    }
  });
}

// key and value [num_tokens, num_kv_heads, head_dim], contiguous.
inline void gather_kv(const KvCache& cache, const int64_t* slots, int64_t num_tokens, uint8_t* key, uint8_t* value) {
  check_range("gather_kv: slot", slots, num_tokens, cache.num_slots());
  for_each_token(cache, num_tokens, [&](int64_t t) {
    for (int64_t head = 0; head < cache.num_kv_heads; ++head) {
      const int64_t offset = (t * cache.num_kv_heads + head) * cache.value_bytes;
      copy_lanes(cache.key(slots[t], head), cache.lane_stride(), key + offset, 4, cache.lanes());
      std::memcpy(value + offset, cache.value(slots[t], head), static_cast<size_t>(cache.value_bytes));
    }
  });
}

// No slot may be both read and written.
inline void copy_slots(const KvCache& cache, const int64_t* src_slots, const int64_t* dst_slots, int64_t num_tokens) {
  check_range("copy_slots: source slot", src_slots, num_tokens, cache.num_slots());
  check_range("copy_slots: destination slot", dst_slots, num_tokens, cache.num_slots());
  for_each_token(cache, num_tokens, [&](int64_t t) {
    for (int64_t head = 0; head < cache.num_kv_heads; ++head) {
      if (cache.key_bytes > 0) {
        copy_lanes(cache.key(src_slots[t], head), cache.lane_stride(), cache.key(dst_slots[t], head),
                   cache.lane_stride(), cache.lanes());
      }
      std::memcpy(cache.value(dst_slots[t], head), cache.value(src_slots[t], head),
                  static_cast<size_t>(cache.value_bytes));
    }
  });
}

// Copy past the caches: the destination's old lines are not read first, and nothing else is evicted.
inline void stream_copy(uint8_t* to, const uint8_t* from, int64_t bytes) {
#if defined(__x86_64__)
  constexpr int64_t kLine = 64;
  if (reinterpret_cast<uintptr_t>(to) % kLine == 0) {
    const int64_t whole = bytes / kLine * kLine;
    for (int64_t i = 0; i < whole; i += kLine) {
      for (int64_t j = 0; j < kLine; j += 16) {
        const __m128i part = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i + j));
        _mm_stream_si128(reinterpret_cast<__m128i*>(to + i + j), part);
      }
    }
    _mm_sfence();
    to += whole, from += whole, bytes -= whole;
  }
#endif
  std::memcpy(to, from, static_cast<size_t>(bytes));
}

// pairs [num_pairs, 2] of (source, destination) block; no block may be both read and written.
inline void copy_blocks(const uint8_t* src, int64_t num_src, uint8_t* dst, int64_t num_dst, int64_t block_bytes,
                        const int64_t* pairs, int64_t num_pairs) {
  check_range("copy_blocks: source block", pairs, num_pairs, num_src, 2);
  check_range("copy_blocks: destination block", pairs + 1, num_pairs, num_dst, 2);
  constexpr int64_t kPieceBytes = 1 << 17;
  // Few blocks are copied for a fork that reads them at once; many are swapped, more than the caches would keep.
  constexpr int64_t kStreamBytes = 1 << 21;
  const bool stream = num_pairs * block_bytes >= kStreamBytes;
  const int64_t pieces = (block_bytes + kPieceBytes - 1) / kPieceBytes;
  auto task = [&](int64_t index, int) {
    const int64_t* pair = pairs + index / pieces * 2;
    const int64_t begin = index % pieces * kPieceBytes;
    const int64_t bytes = block_bytes - begin < kPieceBytes ? block_bytes - begin : kPieceBytes;
    uint8_t* to = dst + pair[1] * block_bytes + begin;
    const uint8_t* from = src + pair[0] * block_bytes + begin;
    if (stream) {
      stream_copy(to, from, bytes);
    } else {
      std::memcpy(to, from, static_cast<size_t>(bytes));
    }
  };
  parallel_for(num_pairs * pieces, task);
}

}  // namespace quire
