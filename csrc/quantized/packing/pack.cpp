#include "quantized/packing/pack.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "runtime/thread_pool.h"

namespace quire {
namespace {

constexpr int64_t kSuper = 256;      // of k; ggml's longest block
constexpr int64_t kColumnsRead = 8;  // a divisor of kSuper

// Integers of kSuper along k of each of the 32 rows of a panel, a byte each.
struct RowPieces {
  uint8_t integers[kPanelColumns][kSuper];

  // Writes the blocks of 32 from k = `begin` (a multiple of kSuper) on as units, those of the rows from `first_row` on.
  void store_into(char* panel, const QuantizedShape& shape, int64_t begin, int64_t first_row) const {
    const int64_t first = begin / QuantizedShape::kBlock, block_bytes = shape.block_bytes();
    const int64_t end = std::min(shape.blocks(), first + kSuper / QuantizedShape::kBlock);
    const int64_t num_upper = shape.format.bits == 8 ? 0 : shape.format.bits - 4;
    const int64_t num_rows = shape.format.bits == 8 ? 8 : 4;
    for (int64_t block = first; block < end; ++block) {
      char* units = panel + shape.integers_at() + block * block_bytes;
      for (int64_t row = 0; row < num_rows; ++row, units += kUnitRowBytes) {
        const int64_t k = (block - first) * QuantizedShape::kBlock + row * kUnitBytes;
        for (int64_t j = first_row; j < kPanelColumns; ++j) {
          uint32_t unit, upper;
          std::memcpy(&unit, integers[j] + k, sizeof unit);
          if (num_rows == 4) {
            std::memcpy(&upper, integers[j] + k + QuantizedShape::kBlock / 2, sizeof upper);
            unit = (unit & 0x0f0f0f0f) | (upper & 0x0f0f0f0f) << 4;
          }
          std::memcpy(units + j * kUnitBytes, &unit, sizeof unit);
        }
      }
      for (int64_t i = 0; i < num_upper; ++i, units += kUnitRowBytes) {
        for (int64_t j = first_row; j < kPanelColumns; ++j) {
          const uint8_t* of_row = integers[j] + (block - first) * QuantizedShape::kBlock;
          const uint32_t upper = upper_bits(of_row, i, num_upper);
          std::memcpy(units + j * kUnitBytes, &upper, sizeof upper);
        }
      }
    }
  }

 private:
  // The bits above the lower four of those rows of units that lie in row `index` of `count`.
  static uint32_t upper_bits(const uint8_t* integers, int64_t index, int64_t count) {
    const int64_t rows = 8 / count;
    uint32_t found = 0, unit;
    for (int64_t row = 0; row < rows; ++row) {
      std::memcpy(&unit, integers + (index * rows + row) * kUnitBytes, sizeof unit);
      found |= ((unit >> 4) & (count == 1 ? 0x01010101 : 0x03030303)) << (row * count);
    }
    return found;
  }
};

// Where one row of a panel keeps its numbers.
struct RowFields {
  char* panel;
  const QuantizedShape& shape;
  int64_t j;

  void set_scale(int64_t base, const uint8_t* bytes) const { set(0, base, bytes, bytes_of(shape.format.scale)); }
  void set_min(int64_t base, const uint8_t* bytes) const {
    set(shape.mins_at(), base, bytes, bytes_of(shape.format.min));
  }
  void set_step(int64_t group, int step) const { panel[shape.steps_at() + group * kPanelColumns + j] = char(step); }
  void set_min_step(int64_t group, int step) const {
    panel[shape.min_steps_at() + group * kPanelColumns + j] = char(step);
  }

 private:
  void set(int64_t field, int64_t range, const uint8_t* bytes, int64_t size) const {
    std::memcpy(panel + field + (range * kPanelColumns + j) * size, bytes, size_t(size));
  }
};

// Lower halves of 16 bytes, then the upper ones.
void read_halves(const uint8_t* bytes, uint8_t* out) {
  for (int i = 0; i < 16; ++i) {
    out[i] = bytes[i] & 15;
    out[16 + i] = bytes[i] >> 4;
  }
}

// One block of each type: its integers -> out, its numbers -> fields; `index` is its place in the row.
// The layouts are those of ggml-common.h of https://github.com/ggml-org/ggml.
using ReadBlock = void (*)(const uint8_t* block, int64_t index, const RowFields& fields, uint8_t* out);

void read_q8_0(const uint8_t* block, int64_t index, const RowFields& fields, uint8_t* out) {
  fields.set_scale(index, block);
  for (int i = 0; i < 32; ++i) out[i] = block[2 + i] ^ 128;
}

void read_q4_0(const uint8_t* block, int64_t index, const RowFields& fields, uint8_t* out) {
  fields.set_scale(index, block);
  read_halves(block + 2, out);
}

// A min is subtracted here and added there.
void set_negated_min(const RowFields& fields, int64_t index, const uint8_t* half) {
  const uint8_t negated[2] = {half[0], uint8_t(half[1] ^ 128)};
  fields.set_min(index, negated);
}

void read_q4_1(const uint8_t* block, int64_t index, const RowFields& fields, uint8_t* out) {
  fields.set_scale(index, block);
  set_negated_min(fields, index, block + 2);
  read_halves(block + 4, out);
}

void add_fifth_bits(const uint8_t* bits, uint8_t* out) {
  for (int i = 0; i < 32; ++i) out[i] |= (bits[i / 8] >> (i % 8) & 1) << 4;
}

void read_q5_0(const uint8_t* block, int64_t index, const RowFields& fields, uint8_t* out) {
  fields.set_scale(index, block);
  read_halves(block + 6, out);
  add_fifth_bits(block + 2, out);
}

void read_q5_1(const uint8_t* block, int64_t index, const RowFields& fields, uint8_t* out) {
  fields.set_scale(index, block);
  set_negated_min(fields, index, block + 2);
  read_halves(block + 8, out);
  add_fifth_bits(block + 4, out);
}

// Four integers of two bits lie 32 apart in each byte of 64.
void read_two_bits(const uint8_t* bytes, uint8_t* out) {
  for (int i = 0; i < kSuper; ++i) out[i] = bytes[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
}

void read_q2_k(const uint8_t* block, int64_t index, const RowFields& fields, uint8_t* out) {
  fields.set_scale(index, block + 80);
  fields.set_min(index, block + 82);
  for (int i = 0; i < 16; ++i) {
    fields.set_step(index * 16 + i, block[i] & 15);
    fields.set_min_step(index * 16 + i, block[i] >> 4);
  }
  read_two_bits(block + 16, out);
}

void read_q3_k(const uint8_t* block, int64_t index, const RowFields& fields, uint8_t* out) {
  const uint8_t* scales = block + 96;
  fields.set_scale(index, block + 108);
  for (int i = 0; i < 16; ++i) {
    const int lower = scales[i % 8] >> (i / 8 * 4) & 15, upper = scales[8 + i % 4] >> (i / 4 * 2) & 3;
    fields.set_step(index * 16 + i, (lower | upper << 4) - 32);
  }
  read_two_bits(block + 32, out);
  for (int i = 0; i < kSuper; ++i) out[i] |= (block[i % 32] >> (i / 32) & 1) << 2;
}

// Scales and mins of six bits, of eight groups in twelve bytes.
void read_six_bits(const uint8_t* bytes, int64_t index, const RowFields& fields) {
  for (int i = 0; i < 8; ++i) {
    int scale = bytes[i] & 63, min = bytes[i + 4] & 63;
    if (i >= 4) {
      scale = (bytes[i + 4] & 15) | bytes[i - 4] >> 6 << 4;
      min = bytes[i + 4] >> 4 | bytes[i] >> 6 << 4;
    }
    fields.set_step(index * 8 + i, scale);
    fields.set_min_step(index * 8 + i, min);
  }
}

// Two integers of four bits lie 32 apart in each byte of 128.
void read_four_bits(const uint8_t* bytes, uint8_t* out) {
  for (int i = 0; i < kSuper; ++i) out[i] = bytes[i / 64 * 32 + i % 32] >> (i % 64 / 32 * 4) & 15;
}

void read_q4_k(const uint8_t* block, int64_t index, const RowFields& fields, uint8_t* out) {
  fields.set_scale(index, block);
  fields.set_min(index, block + 2);
  read_six_bits(block + 4, index, fields);
  read_four_bits(block + 16, out);
}

void read_q5_k(const uint8_t* block, int64_t index, const RowFields& fields, uint8_t* out) {
  fields.set_scale(index, block);
  fields.set_min(index, block + 2);
  read_six_bits(block + 4, index, fields);
  read_four_bits(block + 48, out);
  for (int i = 0; i < kSuper; ++i) out[i] |= (block[16 + i % 32] >> (i / 32) & 1) << 4;
}

void read_q6_k(const uint8_t* block, int64_t index, const RowFields& fields, uint8_t* out) {
  const uint8_t* upper = block + 128;
  fields.set_scale(index, block + 208);
  for (int i = 0; i < 16; ++i) fields.set_step(index * 16 + i, int8_t(block[192 + i]));
  for (int i = 0; i < kSuper; ++i) {
    const int lower = block[i / 128 * 64 + i % 64] >> (i % 128 / 64 * 4) & 15;
    out[i] = uint8_t(lower | (upper[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3) << 4);
  }
}

void read_iq4_xs(const uint8_t* block, int64_t index, const RowFields& fields, uint8_t* out) {
  const int upper = block[2] | block[3] << 8;
  fields.set_scale(index, block);
  for (int i = 0; i < 8; ++i) {
    fields.set_step(index * 8 + i, ((block[4 + i / 2] >> (i % 2 * 4) & 15) | (upper >> (2 * i) & 3) << 4) - 32);
    read_halves(block + 8 + 16 * i, out + 32 * i);
  }
}

void read_mxfp4(const uint8_t* block, int64_t index, const RowFields& fields, uint8_t* out) {
  fields.set_scale(index, block);
  read_halves(block + 1, out);
}

struct BlockType {
  int64_t elements, bytes;
  ReadBlock read;
};

constexpr int kFirstBlockType = 2;  // q8_0 in kQuantizedFormats
constexpr BlockType kBlockTypes[] = {
    {32, 34, read_q8_0},      {32, 18, read_q4_0},      {32, 20, read_q4_1},      {32, 22, read_q5_0},
    {32, 24, read_q5_1},      {kSuper, 84, read_q2_k},  {kSuper, 110, read_q3_k}, {kSuper, 144, read_q4_k},
    {kSuper, 176, read_q5_k}, {kSuper, 210, read_q6_k}, {32, 18, read_q4_0},      {kSuper, 136, read_iq4_xs},
    {32, 17, read_mxfp4},
};

// Whether `count` numbers of a field are finite.
template <typename Bits>
bool are_finite(const char* field, int64_t count, Bits exponent) {
  const Bits* numbers = reinterpret_cast<const Bits*>(field);
  bool is_finite = true;
  for (int64_t i = 0; i < count; ++i) is_finite &= Bits(numbers[i] & exponent) != exponent;
  return is_finite;
}

bool is_finite_field(Number number, const char* field, int64_t count) {
  switch (number) {
    case Number::kHalf:
      return are_finite<uint16_t>(field, count, 0x7c00);
    case Number::kBFloat:
      return are_finite<uint16_t>(field, count, 0x7f80);
    case Number::kFloat:
      return are_finite<uint32_t>(field, count, 0x7f800000);
    case Number::kExponent:
      return are_finite<uint8_t>(field, count, 255);
    default:
      return true;
  }
}

// Some rows of a panel, of which row 0 is the first of W's rows there.
struct PanelRows {
  char* panel;
  int64_t row, begin, end;
};

// Calls read(rows, begin, pieces) for the rows [first, first + count) of W, those of a panel and a piece of kSuper
// along k at a time, and writes what it gives. Rows of the last panel behind them become zero. Whether all numbers are
// finite.
template <typename Read>
bool pack_panels(const QuantizedShape& shape, int64_t first, int64_t count, char* out, const Read& read) {
  std::atomic<bool> is_finite{true};
  const int64_t first_panel = first / kPanelColumns, numbers = shape.bases() * kPanelColumns;
  auto task = [&](int64_t index, int) {
    const int64_t row = (first_panel + index) * kPanelColumns;
    char* panel = out + (first_panel + index) * shape.panel_bytes();
    const PanelRows rows = {panel, row, std::max<int64_t>(first - row, 0),
                            std::min(kPanelColumns, first + count - row)};
    if (rows.begin == 0) std::memset(panel, 0, size_t(shape.integers_at()));
    RowPieces pieces;
    std::memset(pieces.integers, 0, sizeof pieces.integers);
    for (int64_t begin = 0; begin < shape.k; begin += kSuper) {
      if (shape.k - begin < kSuper) std::memset(pieces.integers, 0, sizeof pieces.integers);
      read(rows, begin, pieces);
      pieces.store_into(panel, shape, begin, rows.begin);
    }
    if (!is_finite_field(shape.format.scale, panel, numbers) ||
        !is_finite_field(shape.format.min, panel + shape.mins_at(), numbers)) {
      is_finite.store(false, std::memory_order_relaxed);
    }
  };
  parallel_for((first + count + kPanelColumns - 1) / kPanelColumns - first_panel, task);
  return is_finite.load();
}

}  // namespace

bool pack_blocks(int code, const uint8_t* rows, int64_t row_bytes, const QuantizedShape& shape, char* out) {
  const BlockType& type = kBlockTypes[code - kFirstBlockType];
  return pack_panels(shape, 0, shape.n, out, [&](const PanelRows& of, int64_t begin, RowPieces& pieces) {
    for (int64_t j = 0; j < of.end; ++j) {
      for (int64_t k = begin; k < std::min(begin + kSuper, shape.k); k += type.elements) {
        const int64_t index = k / type.elements;
        const uint8_t* block = rows + (of.row + j) * row_bytes + index * type.bytes;
        type.read(block, index, RowFields{of.panel, shape, j}, pieces.integers[j] + (k - begin));
      }
    }
  });
}

bool pack_integers(const QuantizedShape& shape, const PlacedIntegers& from, const char* scales, const uint8_t* zeros,
                   char* out) {
  const int64_t bases = shape.bases(), scale_bytes = bytes_of(shape.format.scale);
  return pack_panels(shape, from.first, from.count, out, [&](const PanelRows& of, int64_t begin, RowPieces& pieces) {
    // A few columns of all rows at a time: which of the two lie beside each other depends on the tool.
    const int64_t end = std::min(kSuper, shape.k - begin);
    for (int64_t k = 0; k < end; k += kColumnsRead) {
      for (int64_t j = of.begin; j < of.end; ++j) {
        from.read(of.row + j, begin + k, std::min(kColumnsRead, end - k), shape.format.bits, pieces.integers[j] + k);
      }
    }
    if (begin > 0) return;
    for (int64_t j = of.begin; j < of.end; ++j) {
      const RowFields fields = {of.panel, shape, j};
      for (int64_t base = 0; base < bases; ++base) {
        const int64_t at = (of.row + j) * bases + base;
        fields.set_scale(base, reinterpret_cast<const uint8_t*>(scales) + at * scale_bytes);
        if (zeros != nullptr) fields.set_min(base, zeros + at);
      }
    }
  });
}

}  // namespace quire
