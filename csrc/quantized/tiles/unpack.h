// Pieces of a quantized panel as the products read them: integers of 8 bits, scales and mins in float32.
#pragma once

#include "isa/simd.h"
#include "matmul/tiles/tile.h"
#include "quantized/layout.h"

namespace quire::QUIRE_ISA {

// Of k, a multiple of all groups but those that are all of k: of a piece, the integers (unpacked, where they are not
// read as they lie in the panel) and a tile's rows of x stay in the nearest cache. One tile alone takes longer pieces,
// unless its rows are so few that reading a piece's mins would keep it waiting.
constexpr int64_t kPieceK = 512, kLongPieceK = W == 16 ? 1024 : kPieceK, kFewestLongPieceRows = 3;
constexpr int64_t kPieceGroups = kPieceK / 16, kMostPieceGroups = kLongPieceK / 16;

// As kBytesAhead, in one panel.
constexpr int64_t kPanelAhead = kIsAvx2 ? 2 * kBytesAhead : kBytesAhead;

// Whether small groups' tiles ask for a panel's fields and integers in the order in which they lie, some with each
// group, instead of all fields at once, which keeps what is multiplied waiting; and how far ahead of the integers.
#if defined(QUIRE_AMX) || defined(__AVX512VNNI__)
QUIRE_INLINE constexpr bool asks_in_line() { return true; }
#elif defined(QUIRE_SIMD_AVX2)
QUIRE_INLINE bool asks_in_line() { return is_intel(); }
#else
QUIRE_INLINE constexpr bool asks_in_line() { return false; }
#endif
QUIRE_INLINE int64_t line_ahead(int64_t rows) { return !is_intel() ? kPanelAhead : rows <= 2 ? 2048 : 4096; }

// What is read so soon is asked for once more, into the nearest cache, where integers are not read in one sweep.
constexpr int64_t kBytesSoon = 1024;

// W of IEEE's binary16 from p on.
#if defined(QUIRE_SIMD_AVX512)
constexpr bool kHasHalves = true;
QUIRE_INLINE f32 load_halves(const char* p) { return (f32)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
#elif defined(QUIRE_SIMD_AVX2)
constexpr bool kHasHalves = true;
QUIRE_INLINE f32 load_halves(const char* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
#elif defined(QUIRE_SIMD_NEON)
constexpr bool kHasHalves = true;
QUIRE_INLINE f32 load_halves(const char* p) {
  uint16x4_t halves;
  std::memcpy(&halves, p, sizeof halves);
  return (f32)vcvt_f32_f16(vreinterpret_f16_u16(halves));
}
#elif defined(QUIRE_SIMD_SVE)
constexpr bool kHasHalves = true;
QUIRE_INLINE f32 load_halves(const char* p) {
  const svint32_t halves = (svint32_t)load_integers<u16_lanes>(p);
  return (f32)svcvt_f32_f16_x(all_lanes(), svreinterpret_f16_s32(halves));
}
#else
constexpr bool kHasHalves = false;
QUIRE_INLINE f32 load_halves(const char* p) {
  const i32 half = load_integers<u16_lanes>(p);
  // Moved to float32's place, exponents are off by 112; denormals come right by the multiplication, too.
  const f32 magnitude = as_float((half & 0x7fff) << 13) * set1(0x1p112f);
  const i32 special = (i32)((half & 0x7c00) == 0x7c00) & 0x7f800000;
  return as_float(as_int(magnitude) | special | (half & 0x8000) << 16);
}
#endif

template <Number kNumber>
QUIRE_INLINE f32 load_numbers(const char* p) {
  if constexpr (kNumber == Number::kHalf) {
    return load_halves(p);
  } else if constexpr (kNumber == Number::kBFloat) {
    return load(reinterpret_cast<const bf16*>(p));
  } else if constexpr (kNumber == Number::kFloat) {
    return load(reinterpret_cast<const float*>(p));
  } else if constexpr (kNumber == Number::kExponent) {
    const i32 e = load_integers<u8_lanes>(p);  // 2^(e - 128): denormal where e < 2
    const i32 is_denormal = (i32)(e < 2);
    return as_float((((e - 1) << 23) & ~is_denormal) | ((0x00200000 + 0x00200000 * e) & is_denormal));
  } else {
    return __builtin_convertvector(load_integers<u8_lanes>(p), f32);
  }
}

// Groups of a panel, and where their scales (or mins) come from.
struct NumberField {
  const char *numbers, *steps;  // steps may be null
  int64_t groups_per_number, begin, end;

  // -> out [end - begin][32]. Zero points count `scales`.
  template <Number kNumber, typename Steps>
  QUIRE_MEMBER void read(const float* scales, float* out) const {
    constexpr int64_t kVectors = kPanelColumns / W, kBytes = bytes_of(kNumber);
    if (groups_per_number == 1 && steps == nullptr && kNumber != Number::kZeroPoint) {
      for (int64_t i = begin * kPanelColumns; i < end * kPanelColumns; i += W, out += W) {
        store(out, load_numbers<kNumber>(numbers + i * kBytes));
      }
      return;
    }
    int64_t index = begin / groups_per_number, next = index * groups_per_number;
    f32 number[kVectors];
    for (int64_t group = begin; group < end; ++group, out += kPanelColumns, scales += kPanelColumns) {
      if (group >= next || group == begin) {
        QUIRE_UNROLL
        for (int64_t v = 0; v < kVectors; ++v) {
          number[v] = load_numbers<kNumber>(numbers + (index * kPanelColumns + v * W) * kBytes);
        }
        next = ++index * groups_per_number;
      }
      QUIRE_UNROLL
      for (int64_t v = 0; v < kVectors; ++v) {
        f32 value = number[v];
        if constexpr (kNumber == Number::kZeroPoint) value = value * load(scales + v * W);
        if (steps != nullptr) {
          value = value * __builtin_convertvector(load_integers<Steps>(steps + group * kPanelColumns + v * W), f32);
        }
        store(out + v * W, value);
      }
    }
  }
};

// Scales of a panel as they are stored: a half or bfloat16 for 2^shift groups, times a step for each group if there are
// steps. Without numbers it is none.
struct StoredScales {
  const char *numbers = nullptr, *steps = nullptr;
  bool are_halves = false;
  int shift = 0;

  QUIRE_MEMBER f32 of_group(int64_t group, int64_t column) const {
    const char* from = numbers + 2 * ((group >> shift) * kPanelColumns + column);
    const f32 number = are_halves ? load_halves(from) : load(reinterpret_cast<const bf16*>(from));
    if (steps == nullptr) return number;
    return number * __builtin_convertvector(load_integers<i8_lanes>(steps + group * kPanelColumns + column), f32);
  }
};

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
    const int64_t groups_per_number = format.base_group / format.group;
    const NumberField field = {panel, format.has_steps ? panel + steps_at : nullptr, groups_per_number, begin, end};
    if (format.scale == Number::kHalf) {
      field.read<Number::kHalf, i8_lanes>(nullptr, scales);
    } else if (format.scale == Number::kBFloat) {
      field.read<Number::kBFloat, i8_lanes>(nullptr, scales);
    } else if (format.scale == Number::kFloat) {
      field.read<Number::kFloat, i8_lanes>(nullptr, scales);
    } else {
      field.read<Number::kExponent, i8_lanes>(nullptr, scales);
    }
    if (format.min != Number::kNone) read_mins(panel, begin, end, scales, mins);
  }

  // The mins alone; those of zero points need the scales.
  QUIRE_MEMBER void read_mins(const char* panel, int64_t begin, int64_t end, const float* scales, float* mins) const {
    const QuantizedFormat& format = shape.format;
    const int64_t groups_per_number = format.base_group / format.group;
    const char* min_steps = format.has_steps ? panel + min_steps_at : nullptr;
    const NumberField min_field = {panel + mins_at, min_steps, groups_per_number, begin, end};
    if (format.min == Number::kHalf) {
      min_field.read<Number::kHalf, u8_lanes>(nullptr, mins);
    } else {
      min_field.read<Number::kZeroPoint, u8_lanes>(scales, mins);
    }
  }

  // Whether the integers of a block are one group and stand for themselves, two in each byte.
  QUIRE_MEMBER bool has_plain_halves() const {
    return shape.format.bits == 4 && shape.format.table == nullptr && shape.format.group >= QuantizedShape::kBlock;
  }

  // Whether tiles multiply by integers as they are stored, in whatever number of rows.
  QUIRE_MEMBER bool is_plain() const { return has_plain_halves() || shape.format.bits == 8; }

  // The scales as they are stored, where making a group's takes a few operations; else without numbers. So are those
  // that mins are made of, if these are read as well.
  QUIRE_MEMBER StoredScales stored_scales(const char* panel, bool reads_mins) const {
    const QuantizedFormat& format = shape.format;
    const int64_t groups_per_number = format.base_group / format.group;
    const bool is_half = kHasHalves && format.scale == Number::kHalf;
    const bool is_read = is_half || (format.scale == Number::kBFloat && (kHasHalves || format.min == Number::kNone));
    const bool is_even = (groups_per_number & (groups_per_number - 1)) == 0 && (kHasHalves || groups_per_number == 1);
    const bool is_cheap = !kIsAvx2 || !format.has_steps;  // small tiles would make the same scale too often
    if (!is_read || !is_even || !is_cheap || (reads_mins && format.min == Number::kZeroPoint)) return {};
    return {panel, format.has_steps ? panel + steps_at : nullptr, is_half,
            __builtin_ctzll(uint64_t(groups_per_number))};
  }

  // The units of blocks [begin, end) of fewer than 8 bits with a byte for each integer -> piece. What lies `ahead`
  // bytes behind them is asked for.
  QUIRE_MEMBER const char* unpack(const char* panel, int64_t begin, int64_t end, int64_t ahead, char* piece) const {
    read_units(panel, begin, end, ahead, [](i32 v) __attribute__((always_inline)) { return v; }, piece);
    return piece;
  }

  // value(units) of the units of blocks [begin, end) with a byte for each integer -> piece.
  template <bool kAsks = true, typename Value>
  QUIRE_MEMBER void read_units(const char* panel, int64_t begin, int64_t end, int64_t ahead, const Value& value,
                               char* piece) const {
    const char* units = panel + integers_at + begin * shape.block_bytes();
    if (shape.format.table != nullptr) {
      const ByteTable table(shape.format.table);
      const auto look_up = [&](i32 v) __attribute__((always_inline)) { return value(table.look_up(v)); };
      unpack_blocks<4, kAsks>(units, end - begin, ahead, look_up, piece);
    } else if (shape.format.bits == 4) {
      unpack_blocks<4, kAsks>(units, end - begin, ahead, value, piece);
    } else if (shape.format.bits == 5) {
      unpack_blocks<5, kAsks>(units, end - begin, ahead, value, piece);
    } else if (shape.format.bits == 6) {
      unpack_blocks<6, kAsks>(units, end - begin, ahead, value, piece);
    } else {
      for (int64_t i = 0; i < (end - begin) * shape.block_bytes(); i += W * kUnitBytes) {
        store_lanes(piece + i, value(load_lanes(units + i)));
      }
    }
  }

  // What lies above the lower four bits of row `row` of the units of 8 bits, in its place.
  template <int kBits>
  QUIRE_MEMBER static i32 upper_bits(const i32* upper, int row) {
    if constexpr (kBits == 4) return i32{};
    constexpr int kCount = kBits == 6 ? 2 : 1, kMask = kBits == 6 ? 0x30303030 : 0x10101010;
    const int up = 4 - row * kCount % 8;  // one shift is cheaper than two
    const i32 bits = upper[row * kCount / 8];
    return (up >= 0 ? bits << (up & 7) : bits >> (-up & 7)) & kMask;
  }

 private:
  template <int kBits, bool kAsks, typename Value>
  QUIRE_MEMBER static void unpack_blocks(const char* units, int64_t blocks, int64_t ahead, const Value& value,
                                         char* to) {
    constexpr int64_t kHalf = QuantizedShape::kBlock / 2 / kUnitBytes * kUnitRowBytes;
    constexpr int kRows = int(kHalf / kUnitRowBytes);
    for (int64_t block = 0; block < blocks; ++block, units += kBits * kUnitRowBytes, to += 2 * kHalf) {
      for (int64_t i = 0; i < kUnitRowBytes; i += W * kUnitBytes) {
        i32 upper[2];
        QUIRE_UNROLL
        for (int j = 0; j < kBits - 4; ++j) {
          const char* bits = units + kHalf + j * kUnitRowBytes + i;
          if constexpr (kAsks) __builtin_prefetch(bits + ahead, 0, 2);
          upper[j] = load_lanes(bits);
        }
        QUIRE_UNROLL
        for (int row = 0; row < kRows; ++row) {
          const int64_t at = row * kUnitRowBytes + i;
          if constexpr (kAsks) __builtin_prefetch(units + at + ahead, 0, 2);
          const i32 bits = load_lanes(units + at);
          store_lanes(to + at, value((bits & 0x0f0f0f0f) | upper_bits<kBits>(upper, row)));
          store_lanes(to + kHalf + at, value(((bits >> 4) & 0x0f0f0f0f) | upper_bits<kBits>(upper, row + kRows)));
        }
      }
    }
  }
};

// The bytes of a step of a small group of fewer than 8 bits, which is a block's half `half` if there are two. `upper`
// are the bits above the lower four of all its steps.
template <int kBits, bool kHasTable, int kGroup>
QUIRE_INLINE i32 unpack_step(const char* block, int half, int step, i32 upper, const ByteTable& table) {
  const int row = kGroup == 16 ? step : step % 8 / 2, is_upper = kGroup == 16 ? 0 : step % 2;
  const int shift = (kGroup == 16 ? half : is_upper) * 4;
  i32 bytes = (load_lanes(block + row * kUnitRowBytes) >> shift) & 0x0f0f0f0f;
  if constexpr (kBits > 4) bytes = bytes | PanelReader::upper_bits<kBits>(&upper, row + 4 * is_upper);
  return kHasTable ? table.look_up(bytes) : bytes;
}

}  // namespace quire::QUIRE_ISA
