// Products of few rows and weights in groups of 16 or 32 where there are tiles (isa/x86/amx.h), but without them:
// integers are unpacked in registers, once for all rows.
#pragma once

#include "matmul/tiles/amx.h"
#include "quantized/tiles/amx_streams.h"

namespace quire::QUIRE_ISA {

constexpr int64_t kMostFewRows = kFewestByteRows - 1;

QUIRE_INLINE bool is_of_few_rows(const QuantizedShape& shape, int64_t rows) {
  return !shape.is_whole && shape.k > 0 && rows < fewest_rows_on_tiles(shape.format);
}

// A panel's integers, and what is asked for while they are read: `line_bytes` with each block, from `ahead` on. What is
// read soon is asked for once more, into the nearest cache. Each request lies some operations behind the one before,
// since loads of weights would wait behind several at once.
struct StoredBlocks {
  const char *units, *ahead;
  int64_t line_bytes;

  QUIRE_MEMBER const char* line(int64_t block) const {
    const char* first = ahead + block * line_bytes;
    return first - reinterpret_cast<uintptr_t>(first) % 64;
  }
};

// R rows of x times a panel's groups, with a template for each R, as most sums stay in registers. kIsLong: groups have
// several blocks, of kGroup each.
template <int kBits, bool kHasTable, int kGroup, bool kIsLong, int R>
struct FewRows {
  static constexpr int kVectors = int(kPanelColumns / W), kSteps = kGroup / int(kUnitBytes);
  static constexpr int kGroupsPerBlock = int(QuantizedShape::kBlock) / kGroup;
  static constexpr int64_t kBlockBytes = kBits * kUnitRowBytes;
  static constexpr int kLines = int(kBlockBytes / 64), kTurns = kSteps * kGroupsPerBlock;  // of a block
  using Sums = f32[R][kVectors];

  // Of one block: its integers, and what is asked for.
  struct Block {
    const char *units, *line;
  };

  // The bytes of a step of a group, as of unpack_step.
  template <int kHalf>
  QUIRE_INLINE i32 unpack(const char* units, int step, i32 upper, const ByteTable& table) {
    if constexpr (kBits == 8) {
      f32 bytes = as_float(load_lanes(units + step * kUnitRowBytes));
      keep_in_register(bytes);  // else the compiler loads it for each row
      return as_int(bytes);
    } else {
      return unpack_step<kBits, kHasTable, kGroup>(units, kHalf, step, upper, table);
    }
  }

  // acc += the products with a block of a group, or with a group of half a block.
  template <int kHalf>
  QUIRE_INLINE void add_block(const char* x, int64_t stride, const Block& block, const ByteTable& table,
                              i32 (&acc)[R][kVectors]) {
    i32 upper[kVectors] = {};
    QUIRE_UNROLL
    for (int v = 0; v < kVectors && (kBits == 5 || kBits == 6); ++v) {
      upper[v] = load_lanes(block.units + (4 + kHalf) * kUnitRowBytes + v * W * kUnitBytes);
    }
    QUIRE_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      keep_order();
      const int turn = kHalf * kSteps + step, end = (turn + 1) * kLines / kTurns;
      QUIRE_UNROLL
      for (int line = turn * kLines / kTurns; line < end; ++line) {
        ask_for(Ask::kNext, block.line + line * 64);
        ask_for(Ask::kNearest, block.units + kBytesSoon + line * 64);
      }
      const int at = kBits == 8 || kGroup == 16 ? step : step / 2 + step % 2 * 4;
      const char* units = block.units + (kBits == 8 ? kHalf * kSteps * kUnitRowBytes : 0);
      const i32 w[kVectors] = {unpack<kHalf>(units, step, upper[0], table),
                               unpack<kHalf>(units + W * kUnitBytes, step, upper[1], table)};
      QUIRE_UNROLL
      for (int r = 0; r < R; ++r) {
        const i32 value = set1_lane(x + r * stride + at * kUnitBytes);
        QUIRE_UNROLL
        for (int v = 0; v < kVectors; ++v) acc[r][v] = ByteSums::add(acc[r][v], w[v], value);
      }
    }
    keep_order();
  }

  // sum += the products with the group `index`, whose first block, of the panel's, is `number`.
  template <int kHalf>
  QUIRE_INLINE void multiply(const char* rows, const QuantizedRow& layout, const WeightPiece& piece, int64_t index,
                             const StoredBlocks& blocks, int64_t number, const ByteTable& table, Sums& sum) {
    const int64_t group = piece.first + index, stride = layout.bytes, num_blocks = kIsLong ? layout.blocks : 1;
    const char* x = rows + group * num_blocks * kGroup;
    const char* lacks = rows + layout.lacks_at + group * int64_t(sizeof(int32_t));
    const char* x_scales = rows + layout.scales_at + group * int64_t(sizeof(float));
    const f32 scale[kVectors] = {piece.scale(index, 0), piece.scale(index, W)};
    i32 acc[R][kVectors];
    QUIRE_UNROLL
    for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = set1_lane(lacks + r * stride);
    for (int64_t i = 0; i < num_blocks; ++i, ++number, x += kGroup) {
      const Block block = {blocks.units + number * kBlockBytes, blocks.line(number)};
      add_block<kHalf>(x, stride, block, table, acc);
      for (int64_t at = kLines * 64; kHalf == kGroupsPerBlock - 1 && at < blocks.line_bytes; at += 64) {
        ask_for(Ask::kNext, block.line + at);
      }
    }
    QUIRE_UNROLL
    for (int r = 0; r < R; ++r) {
      const f32 x_scale = set1(*reinterpret_cast<const float*>(x_scales + r * stride));
      QUIRE_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        sum[r][v] = sum[r][v] + __builtin_convertvector(acc[r][v], f32) * (x_scale * scale[v]);
      }
    }
  }

  // sums [R][32] += the products with a piece of a panel.
  static void run(const char* rows, const QuantizedRow& layout, const WeightPiece& given,
                  const StoredBlocks& given_blocks, float* sums) {
    const StoredBlocks blocks = given_blocks;
    const WeightPiece piece = given;
    const ByteTable table(kHasTable ? piece.table : kFloat4);
    Sums sum;
    QUIRE_UNROLL
    for (int r = 0; r < R; ++r) {
      QUIRE_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        sum[r][v] = piece.first == 0 ? set1(0) : load(sums + r * kPanelColumns + v * W);
      }
    }
    const int64_t num_blocks = kIsLong ? layout.blocks : 1;
    int64_t index = 0, number = piece.first * num_blocks / kGroupsPerBlock;
    for (; index < piece.groups; index += kGroupsPerBlock, number += num_blocks) {
      multiply<0>(rows, layout, piece, index, blocks, number, table, sum);
      if constexpr (kGroupsPerBlock == 2) multiply<1>(rows, layout, piece, index + 1, blocks, number, table, sum);
    }
    QUIRE_UNROLL
    for (int r = 0; r < R; ++r) {
      QUIRE_UNROLL
      for (int v = 0; v < kVectors; ++v) store(sums + r * kPanelColumns + v * W, sum[r][v]);
    }
  }
};

using RunFewRows = void(const char*, const QuantizedRow&, const WeightPiece&, const StoredBlocks&, float*);

template <int kBits, bool kHasTable, int kGroup, bool kIsLong = false, int R = 1>
static RunFewRows* few_rows(int64_t rows) {
  if constexpr (R < (kBits == 8 ? kFewestByteRows : kFewestSmallRows) - 1) {
    if (rows > R) return few_rows<kBits, kHasTable, kGroup, kIsLong, R + 1>(rows);
  }
  return &FewRows<kBits, kHasTable, kGroup, kIsLong, R>::run;
}

static RunFewRows* few_rows_of(const QuantizedShape& shape, int64_t rows) {
  const QuantizedFormat& format = shape.format;
  if (shape.has_long_groups()) return few_rows<4, false, 32, true>(rows);
  if (format.table != nullptr) return few_rows<4, true, 32>(rows);
  if (format.bits == 8) return few_rows<8, false, 32>(rows);
  if (format.bits == 6) return few_rows<6, false, 16>(rows);
  if (format.bits == 5) return few_rows<5, false, 32>(rows);
  return format.group == 16 ? few_rows<4, false, 16>(rows) : few_rows<4, false, 32>(rows);
}

// Whether results are written past the caches: of wide products, as they leave these before all of them are read, and a
// line that was written keeps the reading of weights waiting for some 60 ns when it leaves.
static bool are_written_past(const ProductOut& to, int64_t rows) {
  constexpr int64_t kFewestPassingRows = 4, kFewestPassingColumns = 4096;
  if (to.dtype == kFloat32) return passes_caches(to, rows);
  return rows >= kFewestPassingRows && to.n >= kFewestPassingColumns &&
         (reinterpret_cast<uintptr_t>(to.out) | uintptr_t(to.stride) * sizeof(bf16)) % 64 == 0;
}

template <typename Out>
static void write_past(const ProductOut& to, int64_t row, int64_t rows, int64_t column, const float* sums) {
  Out* out = static_cast<Out*>(to.out) + row * to.stride + column;
  for (int64_t r = 0; r < rows; ++r, out += to.stride, sums += kPanelColumns) {
    alignas(64) Out line[kPanelColumns];
    for (int64_t j = 0; j < kPanelColumns; j += W) {
      store(line + j, to.bias != nullptr ? load(sums + j) + load(to.bias + column + j) : load(sums + j));
    }
    for (int64_t j = 0; j < kPanelColumns; j += 64 / int64_t(sizeof(Out))) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(out + j), (__m512i)load_lanes(reinterpret_cast<char*>(line + j)));
    }
  }
}

// As finish, of one panel.
static void finish_few_rows(const ProductOut& to, int64_t row, int64_t rows, int64_t column, const float* sums) {
  if (!are_written_past(to, rows) || column + kPanelColumns > to.n) {
    finish(to, row, rows, column, sums, kPanelColumns, kPanelColumns);
  } else if (to.dtype == kFloat32) {
    write_past<float>(to, row, rows, column, sums);
  } else {
    write_past<bf16>(to, row, rows, column, sums);
  }
}

// The sums of few rows and a panel.
static void multiply_few_rows(const char* rows, int64_t num_rows, const PanelReader& reader, const QuantizedRow& layout,
                              const char* panel, const PanelOut& out, float* sums) {
  alignas(64) float scales[kPieceGroups * kPanelColumns], mins[kPieceGroups * kPanelColumns];
  const StoredScales stored_scales = reader.stored_scales(panel, false);
  const int64_t piece_groups = stored_scales.numbers != nullptr ? layout.groups : kPieceGroups;
  const QuantizedShape& shape = reader.shape;
  const char* units = panel + reader.integers_at;
  const int64_t line_bytes = layout.has_mins ? shape.block_bytes() : shape.panel_bytes() / shape.blocks();
  const StoredBlocks blocks = {units, units + kBytesAheadOfBlocks, line_bytes};
  RunFewRows* const run = few_rows_of(shape, num_rows);
  if (!are_written_past(out.to, num_rows)) out.expect(0, num_rows, true);
  for (int64_t first = 0; first < layout.groups; first += piece_groups) {
    const int64_t end = smaller(first + piece_groups, layout.groups);
    if (stored_scales.numbers == nullptr) reader.read_scales(panel, first, end, scales, mins);
    const WeightPiece piece = {nullptr, stored_scales, scales, mins, shape.format.table, first, end - first};
    run(rows, layout, piece, blocks, sums);
  }
  if (layout.has_mins) subtract_mins(rows, num_rows, reader, layout, panel, sums);
}

// As run_quantized_task.
static void run_task_of_few_rows(const PanelReader& reader, const QuantizedRow& layout, const char* weight,
                                 const char* rows, const ProductTask& task, const ProductOut& to, int64_t first) {
  alignas(64) float sums[kMostFewRows * kPanelColumns];
  const int64_t panel_bytes = reader.shape.panel_bytes();
  for (int64_t panel = task.panel; panel < task.panel + task.panels; ++panel) {
    const PanelOut out = {to, first + task.row, panel * kPanelColumns};
    multiply_few_rows(rows, task.rows, reader, layout, weight + panel * panel_bytes, out, sums);
    finish_few_rows(to, out.row, task.rows, out.column, sums);
  }
  _mm_sfence();  // before other threads see that the task is done
}

}  // namespace quire::QUIRE_ISA
