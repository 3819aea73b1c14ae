// What this machine can do at best, measured: the two limits that benchmarks are read against.
#pragma once

#include "base/kernel_table.h"
#include "isa/simd.h"
#include "isa/x86/amx.h"
#include "quantized/tiles/quads.h"
#include "runtime/thread_pool.h"

namespace quire::QUIRE_ISA {

// Reads all of [data, data + bytes) once, on all threads.
static void read_memory(const void* data, int64_t bytes) {
  constexpr int64_t kChunkFloats = 64 * 1024;
  const int64_t count = bytes / int64_t(sizeof(float));
  auto task = [&](int64_t index, int) {
    const float* from = static_cast<const float*>(data) + index * kChunkFloats;
    const int64_t size = count - index * kChunkFloats < kChunkFloats ? count - index * kChunkFloats : kChunkFloats;
    f32 sum[4] = {set1(0), set1(0), set1(0), set1(0)};
    for (int64_t i = 0; i + 4 * W <= size; i += 4 * W) {
      QUIRE_UNROLL
      for (int j = 0; j < 4; ++j) sum[j] = sum[j] + load(from + i + j * W);
    }
    QUIRE_UNROLL
    for (int j = 0; j < 4; ++j) keep_in_register(sum[j]);
  };
  parallel_for((count + kChunkFloats - 1) / kChunkFloats, task);
}

QUIRE_INLINE f32 multiply_ones(f32 acc, f32 factor, const float*) { return fma(factor, factor, acc); }
QUIRE_INLINE f32 multiply_ones(f32 acc, f32 factor, const bf16*) { return dot2(acc, (pairs)factor, (pairs)factor); }
// Products of bytes; kSteps: those of weights of 4 bits, a group at a time.
template <typename Sums, int kSteps>
QUIRE_INLINE f32 multiply_quads(f32 acc, f32& factor) {
  i32 sum = kSteps == 1 ? as_int(acc) : i32{};
  QUIRE_UNROLL
  for (int step = 0; step < kSteps * Sums::kParts; ++step) {
    keep_in_register(factor);  // equal products would be computed once
    sum = Sums::add(sum, Sums::weights(as_int(set1(1))), as_int(factor));
  }
  return as_float(kSteps == 1 ? sum : as_int(acc) + Sums::total(sum, i32{}));
}
struct Nibble {
  char bits;
};
QUIRE_INLINE f32 multiply_ones(f32 acc, f32& factor, const int8_t*) { return multiply_quads<ByteSums, 1>(acc, factor); }
QUIRE_INLINE f32 multiply_ones(f32 acc, f32& factor, const Nibble*) {
  return multiply_quads<SumsOf<4, false>, 8>(acc, factor);
}

// Runs `rounds` rounds of independent multiply-adds in registers on every thread; returns how many operations that is
// (an add and a multiply count two) per thread and round.
template <typename T>
static int64_t multiply_in_registers(int64_t rounds) {
  constexpr int kChains = W == 16 ? 16 : 10;  // enough to hide the latency, few enough to stay in registers
  auto task = [&](int64_t, int) {
    f32 acc[kChains];
    QUIRE_UNROLL
    for (int i = 0; i < kChains; ++i) {
      acc[i] = set1(0);
      keep_in_register(acc[i]);  // equal chains would be computed once
    }
    f32 factor = sizeof(T) == 2 ? as_float(i32{} + 0x3f803f80) : set1(1);  // ones, or some bytes
    for (int64_t round = 0; round < rounds; ++round) {
      keep_in_register(factor);
      QUIRE_UNROLL
      for (int i = 0; i < kChains; ++i) {
        acc[i] = multiply_ones(acc[i], factor, static_cast<const T*>(nullptr));
      }
    }
    QUIRE_UNROLL
    for (int i = 0; i < kChains; ++i) keep_in_register(acc[i]);
  };
  parallel_for(num_threads(), task);
  return int64_t{kChains} * W * 8 / int64_t(sizeof(T)) * (std::is_same_v<T, Nibble> ? 8 : 1);
}

#if defined(QUIRE_AMX)
// The same on tiles.
template <typename T>
static int64_t multiply_on_tiles(int64_t rounds) {
  const T* type = nullptr;
  auto task = [&](int64_t, int) {
    Tiles tiles;
    tiles.configure(kAmxMostRows);
    for (int64_t round = 0; round < rounds; ++round) {
      multiply_tiles<0, 4, 6>(type);
      multiply_tiles<1, 4, 7>(type);
      multiply_tiles<2, 5, 6>(type);
      multiply_tiles<3, 5, 7>(type);
    }
    tiles.release();
  };
  parallel_for(num_threads(), task);
  return 4 * 2 * kAmxRows * kAmxUnits * kAmxRowBytes / int64_t(sizeof(T));
}
#else
template <typename T>
static int64_t multiply_on_tiles(int64_t rounds) {
  return multiply_in_registers<T>(rounds);
}
#endif

static constexpr ProbeTable kProbe = {
    .read_memory = read_memory,
    .multiply_in_registers = {multiply_in_registers<float>, multiply_on_tiles<bf16>, multiply_on_tiles<int8_t>,
                              multiply_in_registers<Nibble>},
};

}  // namespace quire::QUIRE_ISA
