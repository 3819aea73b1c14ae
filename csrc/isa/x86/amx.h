// Intel's Advanced Matrix Extensions (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter
// 18): eight tiles of up to 16 rows of 64 bytes, and products of tiles. With QUIRE_EMULATE_AMX each instruction is
// plain C++ that does, bit for bit, what volume 2 says, so that the kernels can be tested on any CPU with AVX-512.
//
// Tiles 0 to 3 are sums, of two blocks of rows times two vectors of columns; 4 and 5 are the blocks of rows, 6 and 7
// four-byte units of 16 columns each. Assembly instead of intrinsics: GCC's do not say which memory they read.
#pragma once

#include <cstring>

#include "base/common.h"

#if !defined(QUIRE_AMX)

namespace quire::QUIRE_ISA {

constexpr bool kAmx = false;

struct Tiles {
  QUIRE_MEMBER void release() {}
};

}  // namespace quire::QUIRE_ISA

#else

namespace quire::QUIRE_ISA {

constexpr bool kAmx = true;

constexpr int64_t kAmxRows = 16;      // of a tile
constexpr int64_t kAmxRowBytes = 64;  // of a row of a tile
constexpr int64_t kAmxUnits = 16;     // units of four bytes in a row: what a product of tiles adds up at once
constexpr int64_t kAmxMostRows = 32;  // of x in two tiles

struct SignedBytes;  // times signed bytes

struct alignas(64) AmxConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

// For `rows` rows of x, 1 to kAmxMostRows.
QUIRE_INLINE AmxConfig amx_config(int64_t rows) {
  AmxConfig config;
  std::memset(&config, 0, sizeof config);
  config.palette = 1;
  const uint8_t first = uint8_t(rows < kAmxRows ? rows : kAmxRows);
  const uint8_t second = uint8_t(rows > kAmxRows ? rows - kAmxRows : 1);
  for (int tile = 0; tile < 8; ++tile) {
    config.row_bytes[tile] = kAmxRowBytes;
    config.rows[tile] = tile >= 6 ? uint8_t(kAmxUnits) : tile == 2 || tile == 3 || tile == 5 ? second : first;
  }
  return config;
}

// For up to kAmxRows rows of x and groups of 16 or 32 of its values: sums in tiles 0 to 3, rows in 4 and 5.
QUIRE_INLINE AmxConfig amx_config_of_groups(int64_t rows, int64_t group) {
  AmxConfig config = amx_config(rows);
  for (int tile = 0; tile < 8; ++tile) {
    config.rows[tile] = tile >= 6 ? uint8_t(group / 4) : uint8_t(rows);
    if (tile == 4 || tile == 5) config.row_bytes[tile] = uint16_t(group);
  }
  return config;
}

#if !defined(QUIRE_EMULATE_AMX)

QUIRE_INLINE void load_config(const AmxConfig& config) { asm volatile("ldtilecfg %0" ::"m"(config) : "memory"); }
QUIRE_INLINE void release_tiles() { asm volatile("tilerelease" ::: "memory"); }

// Rows `stride` bytes apart.
template <int kTile>
QUIRE_INLINE void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kTile) : "memory");
}
// The same of what is not read again soon.
template <int kTile>
QUIRE_INLINE void stream_tile(const void* from, int64_t stride) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kTile) : "memory");
}
template <int kTile>
QUIRE_INLINE void store_tile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(kTile) : "memory");
}
template <int kTile>
QUIRE_INLINE void clear_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}

// sums += rows times units: of pairs of bf16, or of four signed bytes (rows) and four unsigned ones.
template <int kSums, int kRows, int kUnits>
QUIRE_INLINE void multiply_tiles(const bf16*) {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kRows), "i"(kUnits));
}
template <int kSums, int kRows, int kUnits>
QUIRE_INLINE void multiply_tiles(const int8_t*) {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kRows), "i"(kUnits));
}
template <int kSums, int kRows, int kUnits>
QUIRE_INLINE void multiply_tiles(const SignedBytes*) {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kRows), "i"(kUnits));
}

#else

struct EmulatedTile {
  int64_t rows, row_bytes;
  alignas(64) char data[kAmxRows][kAmxRowBytes];
};
static thread_local EmulatedTile emulated_tiles[8];

static void load_config(const AmxConfig& config) {
  for (int tile = 0; tile < 8; ++tile) {
    emulated_tiles[tile].rows = config.rows[tile];
    emulated_tiles[tile].row_bytes = config.row_bytes[tile];
    std::memset(emulated_tiles[tile].data, 0, sizeof emulated_tiles[tile].data);
  }
}
// What uses tiles before the next load_config finds none.
static void release_tiles() {
  for (EmulatedTile& tile : emulated_tiles) tile.rows = tile.row_bytes = 0;
}

template <int kTile>
static void load_tile(const void* from, int64_t stride) {
  EmulatedTile& tile = emulated_tiles[kTile];
  for (int64_t r = 0; r < tile.rows; ++r) {
    std::memcpy(tile.data[r], static_cast<const char*>(from) + r * stride, size_t(tile.row_bytes));
  }
}
template <int kTile>
static void stream_tile(const void* from, int64_t stride) {
  load_tile<kTile>(from, stride);
}
template <int kTile>
static void store_tile(void* to, int64_t stride) {
  const EmulatedTile& tile = emulated_tiles[kTile];
  for (int64_t r = 0; r < tile.rows; ++r) {
    std::memcpy(static_cast<char*>(to) + r * stride, tile.data[r], size_t(tile.row_bytes));
  }
}
template <int kTile>
static void clear_tile() {
  std::memset(emulated_tiles[kTile].data, 0, sizeof emulated_tiles[kTile].data);
}

// Denormals are zeros, before and after each operation.
static float flushed(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, 4);
  if ((bits & 0x7f800000) == 0) bits &= 0x80000000;
  std::memcpy(&v, &bits, 4);
  return v;
}
static float element(const char* unit, int64_t index, const bf16*) {
  uint16_t upper;
  std::memcpy(&upper, unit + 2 * index, 2);
  const uint32_t bits = uint32_t{upper} << 16;
  float v;
  std::memcpy(&v, &bits, 4);
  return flushed(v);
}

template <int kSums, int kRows, int kUnits>
static void multiply_tiles(const bf16* type) {
  EmulatedTile &sums = emulated_tiles[kSums], &rows = emulated_tiles[kRows], &units = emulated_tiles[kUnits];
  for (int64_t r = 0; r < sums.rows; ++r) {
    for (int64_t column = 0; column < sums.row_bytes / 4; ++column) {
      float even = 0.0f, odd = 0.0f, sum;
      for (int64_t u = 0; u < rows.row_bytes / 4; ++u) {
        const char *x = rows.data[r] + 4 * u, *w = units.data[u] + 4 * column;
        even = flushed(__builtin_fmaf(element(x, 0, type), element(w, 0, type), even));
        odd = flushed(__builtin_fmaf(element(x, 1, type), element(w, 1, type), odd));
      }
      std::memcpy(&sum, sums.data[r] + 4 * column, 4);
      sum = flushed(flushed(sum) + flushed(even + odd));
      std::memcpy(sums.data[r] + 4 * column, &sum, 4);
    }
  }
}

template <int kSums, int kRows, int kUnits, typename Weight>
static void multiply_bytes() {
  EmulatedTile &sums = emulated_tiles[kSums], &rows = emulated_tiles[kRows], &units = emulated_tiles[kUnits];
  for (int64_t r = 0; r < sums.rows; ++r) {
    for (int64_t column = 0; column < sums.row_bytes / 4; ++column) {
      int32_t sum;
      std::memcpy(&sum, sums.data[r] + 4 * column, 4);
      for (int64_t i = 0; i < rows.row_bytes; ++i) {
        sum += int32_t(int8_t(rows.data[r][i])) * int32_t(Weight(units.data[i / 4][4 * column + i % 4]));
      }
      std::memcpy(sums.data[r] + 4 * column, &sum, 4);
    }
  }
}
template <int kSums, int kRows, int kUnits>
static void multiply_tiles(const int8_t*) {
  multiply_bytes<kSums, kRows, kUnits, uint8_t>();
}
template <int kSums, int kRows, int kUnits>
static void multiply_tiles(const SignedBytes*) {
  multiply_bytes<kSums, kRows, kUnits, int8_t>();
}

#endif

// How a thread's tiles are configured. No destructor releases them: that would be exception handling, which a variant's
// object file must not have (tools/check_isa_symbols.sh).
class Tiles {
 public:
  // For rows of x as amx_config takes them.
  QUIRE_MEMBER void configure(int64_t rows) {
    if (rows == rows_) return;
    load_config(amx_config(rows));
    rows_ = rows;
  }
  // The same for groups; tiles serve either these or whole rows.
  QUIRE_MEMBER void configure_groups(int64_t rows, int64_t group) {
    if (rows == rows_) return;
    load_config(amx_config_of_groups(rows, group));
    rows_ = rows;
  }

  // To be called in the end: the system saves tiles that are in use when it switches threads.
  QUIRE_MEMBER void release() {
    if (rows_ != 0) release_tiles();
    rows_ = 0;
  }

 private:
  int64_t rows_ = 0;
};

}  // namespace quire::QUIRE_ISA

#endif
