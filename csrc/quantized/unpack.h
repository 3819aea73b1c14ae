// Pieces of a quantized panel as the products read them: integers of 8 bits, scales and mins in float32.
#pragma once

#include "isa/simd.h"
#include "quantized/layout.h"

namespace quire::QUIRE_ISA {

constexpr int64_t kPieceK = 256;  // of k; a multiple of all groups
constexpr int64_t kPieceGroups = kPieceK / 16;

// IEEE's binary16, as W lanes of 16 bits in 32.
QUIRE_INLINE f32 half_to_float(i32 half) {
  // Moved to float32's place, exponents are off by 112; denormals come right by the multiplication, too.
  const f32 magnitude = as_float((half & 0x7fff) << 13) * set1(0x1p112f);
  const i32 special = (i32)((half & 0x7c00) == 0x7c00) & 0x7f800000;
  return as_float(as_int(magnitude) | special | (half & 0x8000) << 16);
}

// W numbers from `p` on. `scales` are what zero points count.
QUIRE_INLINE f32 load_numbers(Number number, const char* p, f32 scales) {
  switch (number) {
    case Number::kHalf:
      return half_to_float(load_integers<u16_lanes>(p));
    case Number::kBFloat:
      return load(reinterpret_cast<const bf16*>(p));
    case Number::kFloat:
      return load(reinterpret_cast<const float*>(p));
    case Number::kExponent: {
      const i32 e = load_integers<u8_lanes>(p);  // 2^(e - 128): denormal where e < 2
      const i32 is_denormal = (i32)(e < 2);
      return as_float((((e - 1) << 23) & ~is_denormal) | ((0x00200000 + 0x00200000 * e) & is_denormal));
    }
    case Number::kZeroPoint:
      return __builtin_convertvector(load_integers<u8_lanes>(p), f32) * scales;
    case Number::kNone:
      break;
  }
  return set1(0);
}

// Where a panel's fields are, for one format.
struct PanelReader {
  QuantizedShape shape;
  int64_t steps_at, mins_at, min_steps_at, integers_at;

  QUIRE_MEMBER explicit PanelReader(QuantizedShape shape)
      : shape(shape),
        steps_at(shape.steps_at()),
        mins_at(shape.mins_at()),
        min_steps_at(shape.min_steps_at()),
        integers_at(shape.integers_at()) {}

  // Scales and mins of groups [begin, end) -> [end - begin][32] each.
  QUIRE_MEMBER void read_scales(const char* panel, int64_t begin, int64_t end, float* scales, float* mins) const {
    const QuantizedFormat& format = shape.format;
    const int64_t scale_bytes = bytes_of(format.scale), min_bytes = bytes_of(format.min);
    const bool has_mins = format.min != Number::kNone;
    for (int64_t group = begin; group < end; ++group, scales += kPanelColumns, mins += kPanelColumns) {
      const int64_t base = group * format.group / format.base_group * kPanelColumns, step = group * kPanelColumns;
      for (int64_t j = 0; j < kPanelColumns; j += W) {
        const f32 number = load_numbers(format.scale, panel + (base + j) * scale_bytes, set1(0));
        f32 scale = number;
        if (format.has_steps) {
          scale = scale * __builtin_convertvector(load_integers<i8_lanes>(panel + steps_at + step + j), f32);
        }
        store(scales + j, scale);
        if (!has_mins) continue;
        f32 min = load_numbers(format.min, panel + mins_at + (base + j) * min_bytes, number);
        if (format.has_steps) {
          min = min * __builtin_convertvector(load_integers<u8_lanes>(panel + min_steps_at + step + j), f32);
        }
        store(mins + j, min);
      }
    }
  }

  // The units of blocks [begin, end) with a byte for each integer: in the panel itself, or in `piece`.
  QUIRE_MEMBER const char* read_units(const char* panel, int64_t begin, int64_t end, char* piece) const {
    const char* units = panel + integers_at + begin * shape.block_bytes();
    if (shape.format.bits == 8) return units;
    constexpr int64_t kHalf = QuantizedShape::kBlock / 2 / kUnitBytes * kUnitRowBytes;
    const auto each = [&](auto&& value) __attribute__((always_inline)) {
      char* to = piece;
      for (int64_t block = begin; block < end; ++block, units += kHalf, to += 2 * kHalf) {
        for (int64_t i = 0; i < kHalf; i += W * kUnitBytes) {
          const i32 bits = load_lanes(units + i);
          store_lanes(to + i, value(bits & 0x0f0f0f0f));
          store_lanes(to + kHalf + i, value((bits >> 4) & 0x0f0f0f0f));
        }
      }
    };
    if (shape.format.table == nullptr) {
      each([](i32 v) __attribute__((always_inline)) { return v; });
    } else {
      const ByteTable table(shape.format.table);
      each([&](i32 v) __attribute__((always_inline)) { return table.look_up(v); });
    }
    return piece;
  }
};

}  // namespace quire::QUIRE_ISA
