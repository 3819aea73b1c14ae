// Quantized weights: integers of 4 or 8 bits, and what turns them into numbers. One layout for all formats, which no
// ISA variant changes.
//
// A weight is `integer * scale - min`. Scale and min belong to a row of W and a range of k. Each is a number, or a
// number for a long range times a small integer for a short one, as the formats of https://github.com/ggml-org/ggml
// have them.
#pragma once

#include "matmul/layout.h"

namespace quire {

enum class Number : int8_t { kNone, kHalf, kBFloat, kFloat, kExponent, kZeroPoint };
// kExponent: a byte e that means 2^(e - 128). kZeroPoint: a byte that means itself times the scale.

struct QuantizedFormat {
  int bits;  // of a stored integer: 4, 5, 6 or 8
  // 16 or 32 along k, or 0 for all of k: x is quantized in these groups, a scale holds for all. Where the weight says
  // how many share a scale, and these are a multiple of 128 as k is, integers of 4 bits have groups of 128.
  int group;
  int zero;  // what a stored integer has too much
  Number scale, min;
  bool has_steps;           // whether a group's scale (and min) is that number times a byte: signed (unsigned)
  int base_group;           // the range of k of such a number; 0: the weight says it
  const uint8_t* table;     // what the 4 bits stand for, + zero; null: themselves
  bool is_rotated = false;  // whether W's rows, and x's, are rotated before they are quantized (quantized/rotation.h)
};

// The integers of the "non-linear" formats of ggml, and twice the values of MXFP4 (Open Compute Project, Microscaling
// Formats 1.0), + 128. Not inline: each variant has a copy of its own, which the linker does not merge.
constexpr uint8_t kNonLinear[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
constexpr uint8_t kFloat4[16] = {128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116};

consteval QuantizedFormat plain_format(int bits, Number scale, bool has_zero_points) {
  return {bits,
          32,
          has_zero_points ? 0 : 1 << (bits - 1),
          scale,
          has_zero_points ? Number::kZeroPoint : Number::kNone,
          false,
          0,
          nullptr};
}

// The order is that of FORMATS in src/quire/kernels/weights.py.
constexpr QuantizedFormat kQuantizedFormats[] = {
    {8, 0, 128, Number::kFloat, Number::kNone, false, 0, nullptr, true},  // int8
    {4, 32, 8, Number::kBFloat, Number::kNone, false, 32, nullptr},       // int4
    {8, 32, 128, Number::kHalf, Number::kNone, false, 32, nullptr},       // q8_0
    {4, 32, 8, Number::kHalf, Number::kNone, false, 32, nullptr},         // q4_0
    {4, 32, 0, Number::kHalf, Number::kHalf, false, 32, nullptr},         // q4_1
    {5, 32, 16, Number::kHalf, Number::kNone, false, 32, nullptr},        // q5_0
    {5, 32, 0, Number::kHalf, Number::kHalf, false, 32, nullptr},         // q5_1
    {4, 16, 0, Number::kHalf, Number::kHalf, true, 256, nullptr},         // q2_k
    {4, 16, 4, Number::kHalf, Number::kNone, true, 256, nullptr},         // q3_k
    {4, 32, 0, Number::kHalf, Number::kHalf, true, 256, nullptr},         // q4_k
    {5, 32, 0, Number::kHalf, Number::kHalf, true, 256, nullptr},         // q5_k
    {6, 16, 32, Number::kHalf, Number::kNone, true, 256, nullptr},        // q6_k
    {4, 32, 128, Number::kHalf, Number::kNone, false, 32, kNonLinear},    // iq4_nl
    {4, 32, 128, Number::kHalf, Number::kNone, true, 256, kNonLinear},    // iq4_xs
    {4, 32, 128, Number::kExponent, Number::kNone, false, 32, kFloat4},   // mxfp4
    plain_format(4, Number::kHalf, false),                                // u4_half
    plain_format(4, Number::kHalf, true),                                 // u4_half_zeros
    plain_format(4, Number::kBFloat, false),                              // u4_bfloat
    plain_format(4, Number::kBFloat, true),                               // u4_bfloat_zeros
    plain_format(4, Number::kFloat, false),                               // u4_float
    plain_format(4, Number::kFloat, true),                                // u4_float_zeros
    plain_format(8, Number::kHalf, false),                                // u8_half
    plain_format(8, Number::kHalf, true),                                 // u8_half_zeros
    plain_format(8, Number::kBFloat, false),                              // u8_bfloat
    plain_format(8, Number::kBFloat, true),                               // u8_bfloat_zeros
    plain_format(8, Number::kFloat, false),                               // u8_float
    plain_format(8, Number::kFloat, true),                                // u8_float_zeros
};

// The most columns of a quantized weight. A sum of that many products of bytes fits an int32.
inline constexpr int64_t kMostQuantizedK = 65536;

// How many columns are rotated together where `rest` are left: powers of four, whose roots are powers of two.
QUIRE_INLINE constexpr int64_t rotation_width(int64_t rest) {
  return rest >= 256 ? 256 : rest >= 64 ? 64 : rest >= 16 ? 16 : rest >= 4 ? 4 : 1;
}
// What Hadamard's matrix of that size is divided by, so that a rotation keeps lengths.
QUIRE_INLINE constexpr float rotation_root(int64_t width) {
  return width == 256 ? 16 : width == 64 ? 8 : width == 16 ? 4 : width == 4 ? 2 : 1;
}

QUIRE_INLINE constexpr int64_t bytes_of(Number number) {
  if (number == Number::kNone) return 0;
  if (number == Number::kFloat) return 4;
  return number == Number::kExponent || number == Number::kZeroPoint ? 1 : 2;
}

// Panels of 32 rows of W. A panel is four fields and its integers, each field an array [ranges of k][32 rows], filled
// up to a multiple of 64 bytes. Integers lie in blocks of 32 along k, each of rows of 32 units of four bytes. 8 bits: a
// unit holds four integers that follow each other along k. 4 bits: unit u holds k = 4 u to 4 u + 3 of its block in the
// lower halves of its bytes, and those 16 further on in the upper halves. 5 and 6 bits: the lower four as 4 bits, and
// behind them one or two rows of units with the upper ones: each has those of 8 or 4 rows of units of 8 bits, the first
// row's lowest. What a panel has beyond the matrix is zero, or multiplies zeros. Behind the panels of a rotated weight
// lie its factors: a float32 for each column, which x is multiplied with before it is rotated.
struct QuantizedShape {
  static constexpr int64_t kBlock = 32;
  static constexpr int kLongGroup = 128;

  QuantizedFormat format;
  int64_t n, k;
  bool is_whole = false;  // whether a group is all of k, and more than a block

  QUIRE_MEMBER QuantizedShape(int code, int64_t base_group, int64_t n, int64_t k)
      : format(kQuantizedFormats[code]), n(n), k(k) {
    if (format.group == 0) {
      format.group = k == 0 ? int(kBlock) : int((k + kBlock - 1) / kBlock * kBlock);
      base_group = format.group;
      is_whole = format.group > kBlock;
    }
    if (format.base_group == 0) {
      const bool is_long = format.bits == 4 && base_group % kLongGroup == 0 && k % kLongGroup == 0;
      if (is_long) format.group = kLongGroup;
      format.base_group = int(base_group);
    }
  }

  QUIRE_MEMBER bool has_long_groups() const { return format.group == kLongGroup && !is_whole; }
  QUIRE_MEMBER int64_t panels() const { return (n + kPanelColumns - 1) / kPanelColumns; }
  QUIRE_MEMBER int64_t groups() const { return ranges(format.group); }
  QUIRE_MEMBER int64_t padded_k() const { return groups() * format.group; }
  QUIRE_MEMBER int64_t blocks() const { return (padded_k() + kBlock - 1) / kBlock; }
  QUIRE_MEMBER int64_t bases() const { return ranges(format.base_group); }
  QUIRE_MEMBER int64_t block_bytes() const { return kBlock * format.bits / (8 * kUnitBytes) * kUnitRowBytes; }

  // Where the fields of a panel begin.
  QUIRE_MEMBER int64_t steps_at() const { return field(bases(), bytes_of(format.scale)); }
  QUIRE_MEMBER int64_t mins_at() const { return steps_at() + field(groups(), format.has_steps); }
  QUIRE_MEMBER int64_t min_steps_at() const { return mins_at() + field(bases(), bytes_of(format.min)); }
  QUIRE_MEMBER int64_t integers_at() const {
    return min_steps_at() + field(groups(), format.has_steps && format.min != Number::kNone);
  }
  QUIRE_MEMBER int64_t panel_bytes() const { return integers_at() + blocks() * block_bytes(); }
  QUIRE_MEMBER int64_t factors_at() const { return panels() * panel_bytes(); }
  QUIRE_MEMBER int64_t bytes() const { return factors_at() + (format.is_rotated ? (4 * k + 63) / 64 * 64 : 0); }

 private:
  QUIRE_MEMBER int64_t ranges(int64_t length) const { return k == 0 ? 0 : (k + length - 1) / length; }
  QUIRE_MEMBER static int64_t field(int64_t ranges, int64_t bytes) {
    return (ranges * kPanelColumns * bytes + 63) / 64 * 64;
  }
};

}  // namespace quire
