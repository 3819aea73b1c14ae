// y = x W^T + bias for any number of rows, on packed weights (matmul/layout.h).
//
// Each output element is one accumulator that runs through k in order, with the same instructions for every number of
// rows and columns beside it: its bits depend on its row of x, its column of W and nothing else. Blocking over k only
// parks the accumulators in memory, as float32, and picks them up again.
#pragma once

#include "matmul/tiles/tile.h"
#if defined(QUIRE_AMX)
#include "matmul/tiles/amx_bf16.h"
#endif
#if defined(QUIRE_ARM_I8MM)
#include "matmul/tiles/arm.h"
#endif

namespace quire::QUIRE_ISA {

constexpr int64_t kStageBytes =
    24 * 1024;                        // one block of rows of x, for one block of k: stays in the first-level cache
constexpr int64_t kBlockUnits = 512;  // most units of k per block when blocks are used again: those of kTaskPanels
                                      // panels are then 512 KiB in all and stay in the second-level cache
// Up to this number of rows, panels pass through all rows while they are near (the portable variant's small tiles read
// no faster than they multiply).
constexpr int64_t kSharedRows = kTileRows * (W >= 8 ? 4 : 1);
constexpr int64_t kSharedPanels = 2;       // at a time
constexpr int64_t kSharedTaskPanels = 32;  // panels for which rows of x are staged once
static_assert(kSharedRows * kSharedTaskPanels <= kTaskRows * kTaskPanels);

// A task's sums, and its rows of x for one block of k.
constexpr int64_t kTileScratchBytes =
    kTaskRows * kTaskPanels * kPanelColumns * 4 + kStageBytes + kSharedRows * (kBlockUnits * 8 + 64);
#if defined(QUIRE_AMX)
constexpr int64_t kScratchBytes = kTileScratchBytes > kAmxScratchBytes ? kTileScratchBytes : kAmxScratchBytes;
#else
constexpr int64_t kScratchBytes = kTileScratchBytes;
#endif

// The next of blocks of rows that cover `left`: whole tiles, but the last ones even where less than half would be left.
// With AVX2 none of four rows, whose eight sums each wait for their last multiply-add: two, three, five and six rows
// have up to twelve.
QUIRE_INLINE int64_t next_rows(int64_t left) {
#if defined(QUIRE_SIMD_AVX2)
  const int64_t rest = left % kTileRows;
  if (left == 4) return 2;
  return left > kTileRows && (rest == 1 || rest == 2 || rest == 4) ? 5 : smaller(left, kTileRows);
#else
  return left % kTileRows > kTileRows / 2 ? smaller(kTileRows, left) : ceil_div(left, ceil_div(left, kTileRows));
#endif
}
QUIRE_INLINE bool has_blocks(int64_t rows) { return rows > 0 && next_rows(rows) < rows; }

// Whether panels pass through all blocks of rows while they are near; with AVX2 also through one block of rows that
// takes several passes.
QUIRE_INLINE bool is_shared(int64_t rows) {
  const bool has_passes = kIsAvx2 && kTileShape.width(int(rows)) < kVectorsPerPanel;
  return rows <= kSharedRows && (has_passes || has_blocks(rows));
}

// What the inner loop reads x as: pairs where the ISA multiplies pairs, else float32.
#if defined(QUIRE_MULTIPLIES_PAIRS)
template <typename T>
struct StagedAs {
  using Type = T;
};
#else
template <typename T>
struct StagedAs {
  using Type = float;
};
#endif
template <typename T>
using Staged = typename StagedAs<T>::Type;

// One unit of k: acc[r][g] += x[r] * w[g] for the tile's rows and vectors of columns.
template <int R, int G, typename T>
QUIRE_INLINE void multiply_unit(f32 (&acc)[R][G], const RowAddresses<R>& x, const char* const (&panels)[G],
                                int64_t offset, const T*) {
  typename Lane<T>::Vector w[G];
  QUIRE_UNROLL
  for (int g = 0; g < G; ++g) w[g] = Lane<T>::load(reinterpret_cast<const T*>(panels[g] + offset));
  QUIRE_UNROLL
  for (int r = 0; r < R; ++r) {
    const auto value = Lane<T>::broadcast(reinterpret_cast<const T*>(x[r]));
    QUIRE_UNROLL
    for (int g = 0; g < G; ++g) acc[r][g] = Lane<T>::dot(acc[r][g], w[g], value);
  }
}

#if defined(QUIRE_SIMD_AVX2)
template <int R, int G>
QUIRE_INLINE void multiply_unit(f32 (&acc)[R][G], const RowAddresses<R>& x, const char* const (&panels)[G],
                                int64_t offset, const bf16*) {
  add_pairs_apart(acc, panels, offset, x);
}
#elif !defined(QUIRE_MULTIPLIES_PAIRS)
template <int R, int G>
QUIRE_INLINE void multiply_unit(f32 (&acc)[R][G], const RowAddresses<R>& x, const char* const (&panels)[G],
                                int64_t offset, const bf16*) {
  f32 first[G], second[G];
  QUIRE_UNROLL
  for (int g = 0; g < G; ++g) {
    const pairs w = load_lanes(panels[g] + offset);
    first[g] = lower(w);
    second[g] = upper(w);
  }
  QUIRE_UNROLL
  for (int r = 0; r < R; ++r) {
    const float* two = reinterpret_cast<const float*>(x[r]);
    const f32 value = set1(two[0]), next = set1(two[1]);
    QUIRE_UNROLL
    for (int g = 0; g < G; ++g) acc[r][g] = fma(value, first[g], acc[r][g]);
    QUIRE_UNROLL
    for (int g = 0; g < G; ++g) acc[r][g] = fma(next, second[g], acc[r][g]);
  }
}
#endif

// Runs R rows of x through `units` units of k of G vectors of columns: from zero, or on from the parked sums.
template <typename T>
struct PackedTile {
  static constexpr TileShape kShape = kTileShape;

  template <Ask kAsk, int R, int G>
  QUIRE_INLINE void multiply(f32 (&acc)[R][G], RowAddresses<R> x, const char* const (&panels)[G], int64_t units,
                             Prefetch prefetch) {
    for (int64_t unit = 0; unit < units; ++unit) {
      if constexpr (kAsk != Ask::kNot) {
        QUIRE_UNROLL
        for (int g = 0; g < G; ++g) {
          const int64_t gap = g / kVectorsPerPanel * prefetch.panel_gap + g % kVectorsPerPanel * prefetch.vector_gap;
          ask_for(kAsk, prefetch.at + gap);
        }
        prefetch.at += prefetch.step;
      }
      multiply_unit<R, G>(acc, x, panels, unit * kUnitRowBytes, static_cast<const T*>(nullptr));
      x += kPerUnit<T> * int64_t(sizeof(Staged<T>));
    }
  }

  template <int R, int G>
  static void run(const Staged<T>* x, int64_t x_stride, const char* weight, int64_t panel_bytes, int64_t units,
                  float* parked, int64_t parked_stride, bool from_zero, Prefetch prefetch) {
    const RowAddresses<R> of_x(reinterpret_cast<const char*>(x), x_stride * int64_t(sizeof(Staged<T>)));
    const char* panels[G];
    f32 acc[R][G];
    QUIRE_UNROLL
    for (int g = 0; g < G; ++g) {
      panels[g] = weight + g / kVectorsPerPanel * panel_bytes + g % kVectorsPerPanel * W * kUnitBytes;
      QUIRE_UNROLL
      for (int r = 0; r < R; ++r) acc[r][g] = from_zero ? set1(0) : load(parked + r * parked_stride + g * W);
    }
    if (kAsksNear && R > kUnfetchedNearRows && prefetch.is_near) {
      multiply<Ask::kNearest>(acc, of_x, panels, units, prefetch);
    } else {
      multiply<(R > kUnfetchedRows ? Ask::kNext : Ask::kNot)>(acc, of_x, panels, units, prefetch);
    }
    QUIRE_UNROLL
    for (int g = 0; g < G; ++g) {
      QUIRE_UNROLL
      for (int r = 0; r < R; ++r) store(parked + r * parked_stride + g * W, acc[r][g]);
    }
  }
};

#if defined(QUIRE_ARM_I8MM)
template <>
struct PackedTile<bf16> : MatrixTile {};
consteval bool has_even_blocks() {
  for (int64_t rows = 1; rows <= kTileRows; ++rows) {
    if (kStageBytes / (kUnitBytes * rows) % 2 != 0) return false;
  }
  return kBlockUnits % 2 == 0;
}
static_assert(has_even_blocks());
#endif

// The widest staged row: a whole block of k for one row. Odd numbers of cache lines keep rows out of each other's sets.
template <typename T>
QUIRE_INLINE int64_t stage_stride(int64_t units) {
  const int64_t lines = ceil_div(units * kPerUnit<T> * int64_t(sizeof(Staged<T>)), 64);
  return (lines | 1) * 64 / int64_t(sizeof(Staged<T>));
}

// Copies `count` elements of `rows` rows of x, in the inner loop's type, and zeroes what a last half unit lacks.
template <typename T>
static void stage(const T* x, int64_t x_stride, int64_t rows, int64_t count, Staged<T>* out, int64_t out_stride) {
  if (count == 0) return;  // k is 0, and x may be null
  for (int64_t r = 0; r < rows; ++r) {
    const T* from = x + r * x_stride;
    Staged<T>* to = out + r * out_stride;
    if constexpr (sizeof(T) == sizeof(Staged<T>)) {
      std::memcpy(to, from, size_t(count) * sizeof(T));
    } else {
      for_parts(count, [&](int64_t i, int64_t n) { store_some(to + i, load_some(from + i, n), n); });
    }
    if (count % kPerUnit<T> != 0) to[count] = {};
  }
}

// Whether the inner loop can read the rows of x where they are: in its own type, in whole units, and not in a few sets
// of the cache (as rows 2 KiB apart are).
template <typename T>
static bool is_read_in_place(const MatmulArgs& args) {
  return sizeof(T) == sizeof(Staged<T>) && args.weight.k % kPerUnit<T> == 0 &&
         args.x_stride * int64_t(sizeof(T)) % 2048 != 0;
}

// What is multiplied at a time: a block of rows, a group of panels and a block of k, counted from the task's first.
struct TaskPart {
  int64_t row, rows, panel, panels, unit, units;
};

// What the tile at `vector` of a part, in the panel `weight`, asks for: the weights that follow at once; or, once they
// are near, its share of the next group's panels where panels pass through all rows, else of the next rows of x.
template <typename T>
QUIRE_INLINE Prefetch ahead(const MatmulArgs& args, const ProductTask& task, const TaskPart& part, const char* weight,
                            int64_t vector, int64_t width) {
  const int64_t units = ceil_div(args.weight.k, kPerUnit<T>), panel_bytes = units * kUnitRowBytes;
  if (is_shared(task.rows)) {
    const bool is_last = part.panel + part.panels == task.panels && part.unit + part.units < units;
    const char* next =
        is_last ? weight - part.panel * panel_bytes + part.units * kUnitRowBytes : weight + part.panels * panel_bytes;
    const int64_t step = kUnitRowBytes / kVectorsPerPanel * part.rows / task.rows, gap = part.units * step;
    return {false, next + part.units * kUnitRowBytes * part.row / task.rows + vector % kVectorsPerPanel * gap,
            panel_bytes, gap, step};
  }
  if (part.row == 0) {
    const int64_t first = vector % kVectorsPerPanel * W * kUnitBytes;
    const bool is_near = kAsksNear && has_large_nearest_cache();
    const int64_t bytes = is_near ? kBytesAheadNear : kBytesAhead;
    return {is_near, weight + first + bytes * kVectorsPerPanel / (width < kVectorsPerPanel ? kVectorsPerPanel : width),
            panel_bytes, W * kUnitBytes, kUnitRowBytes};
  }
  const int64_t row = task.row + part.row + part.rows + vector % part.rows;
  return {false,
          reinterpret_cast<const char*>(static_cast<const T*>(args.x) + row * args.x_stride + part.unit * kPerUnit<T>),
          0, args.x_stride * int64_t(sizeof(T)), kUnitBytes};
}

// Adds the product of one part, its rows of x being `x`, to the parked sums.
template <typename T>
static void run_part(const MatmulArgs& args, const ProductTask& task, const TaskPart& part, const Staged<T>* x,
                     int64_t x_stride, float* sums, int64_t sums_stride) {
  const int64_t panel_bytes = ceil_div(args.weight.k, kPerUnit<T>) * kUnitRowBytes;
  const char* weight = args.weight.data + (task.panel + part.panel) * panel_bytes + part.unit * kUnitRowBytes;
  for_tiles(kTileShape, part.rows, part.panels, [&](int64_t vector, int64_t width) {
    expect_out(args.to, task.row + part.row, part.rows, (task.panel + part.panel) * kPanelColumns + vector * W);
    const char* panel = weight + vector / kVectorsPerPanel * panel_bytes;
    tile_function<PackedTile<T>>(part.rows, width)(x, x_stride, panel + vector % kVectorsPerPanel * W * kUnitBytes,
                                                   panel_bytes, part.units, sums + vector * W, sums_stride,
                                                   part.unit == 0, ahead<T>(args, task, part, panel, vector, width));
  });
}

template <typename T>
static void run_task(const MatmulArgs& args, const ProductTask& task, char* scratch) {
  const int64_t k = args.weight.k, units = ceil_div(k, kPerUnit<T>), most_rows = smaller(task.rows, kTileRows);
  int64_t block_units = kStageBytes / (kPerUnit<T> * int64_t(sizeof(Staged<T>)) * most_rows);
  if (has_blocks(task.rows)) block_units = smaller(block_units, kBlockUnits);
  const int64_t group_panels = is_shared(task.rows) ? kSharedPanels : task.panels;
  // With a single block of k, all parts use the same place, one after the other.
  const bool is_parked = units > block_units, in_place = is_read_in_place<T>(args);
  const int64_t sums_stride = (is_parked ? task.panels : group_panels) * kPanelColumns;
  float* parked = reinterpret_cast<float*>(scratch);
  Staged<T>* staged = reinterpret_cast<Staged<T>*>(parked + (is_parked ? task.rows : most_rows) * sums_stride);

  TaskPart part;
  for (part.unit = 0; part.unit < units || part.unit == 0; part.unit += block_units) {
    part.units = smaller(block_units, units - part.unit);
    const int64_t stride = in_place ? args.x_stride : stage_stride<T>(part.units);
    for (part.panel = 0; part.panel < task.panels; part.panel += group_panels) {
      part.panels = smaller(group_panels, task.panels - part.panel);
      for (part.row = 0; part.row < task.rows; part.row += part.rows) {
        part.rows = next_rows(task.rows - part.row);
        const T* from = static_cast<const T*>(args.x) + (task.row + part.row) * args.x_stride + part.unit * kPerUnit<T>;
        Staged<T>* to = staged + (is_shared(task.rows) ? part.row * stride : 0);
        if (!in_place && part.panel == 0) {
          stage(from, args.x_stride, part.rows, smaller(block_units * kPerUnit<T>, k - part.unit * kPerUnit<T>), to,
                stride);
        }
        float* sums = parked + (is_parked ? part.row * sums_stride + part.panel * kPanelColumns : 0);
        run_part<T>(args, task, part, in_place ? reinterpret_cast<const Staged<T>*>(from) : to, stride, sums,
                    sums_stride);
        if (part.unit + part.units < units) continue;
        finish(args.to, task.row + part.row, part.rows, (task.panel + part.panel) * kPanelColumns, sums, sums_stride,
               part.panels * kPanelColumns);
      }
    }
  }
}

#if defined(QUIRE_AMX)
template <>
void run_task<bf16>(const MatmulArgs& args, const ProductTask& task, char* scratch) {
  run_amx_task(args, task, scratch);
}
template <typename T>
inline constexpr bool kUsesTiles = sizeof(T) == sizeof(bf16);
#else
template <typename T>
inline constexpr bool kUsesTiles = false;
#endif

template <typename T>
static void matmul(const MatmulArgs& args) {
  const int64_t task_panels = !kUsesTiles<T> && is_shared(args.rows) ? kSharedTaskPanels : kTaskPanels;
  for_tasks(args.rows, args.weight.n, args.weight.k, task_panels, [&](const ProductTask& task, int thread) {
    run_task<T>(args, task, static_cast<char*>(thread_scratch(thread, kScratchBytes)));
  });
}

// As one product after the other, in one region.
template <typename T>
static void multiply_heads(const HeadProductArgs& args) {
  const int64_t panels = ceil_div(args.n, kPanelColumns), width = args.n + args.tail;
  const int64_t weight_bytes = panels * ceil_div(args.k, kPerUnit<T>) * kUnitRowBytes;
  const int64_t row_tasks = ceil_div(args.rows, kTaskRows), panel_tasks = ceil_div(panels, kTaskPanels);
  const int64_t num_tasks = args.num_heads * row_tasks * panel_tasks;
  const DType dtype = sizeof(T) == sizeof(float) ? kFloat32 : kBFloat16;
  auto task = [&](int64_t index, int thread) {
    const int64_t head = index / (row_tasks * panel_tasks), panel_task = index / row_tasks % panel_tasks;
    const int64_t panel = panel_task * panels / panel_tasks, row = index % row_tasks * kTaskRows;
    const ProductTask part = {row, smaller(kTaskRows, args.rows - row), panel,
                              (panel_task + 1) * panels / panel_tasks - panel};
    const T* x = static_cast<const T*>(args.x) + head * args.x_head_stride;
    T* out = static_cast<T*>(args.out) + head * width;
    const ProductOut to = {args.n, args.num_heads * width, nullptr, out, dtype};
    run_task<T>({x, args.x_stride, args.rows, {args.weights + head * weight_bytes, args.n, args.k}, to}, part,
                static_cast<char*>(thread_scratch(thread, kScratchBytes)));
    for (int64_t r = row; panel == 0 && args.tail > 0 && r < row + part.rows; ++r) {
      std::memcpy(out + r * to.stride + args.n, x + r * args.x_stride + args.k, size_t(args.tail) * sizeof(T));
    }
  };
  auto all_tasks = [&](int64_t, int thread) {
    for (int64_t index = 0; index < num_tasks; ++index) task(index, thread);
  };
  if (args.rows * args.num_heads * args.n * args.k <= kInlineProducts) {
    parallel_for(1, all_tasks);
  } else {
    parallel_for(num_tasks, task);
  }
}

static constexpr MatmulTable kMatmul = {
    .matmul = {matmul<float>, matmul<bf16>},
    .of_heads = {multiply_heads<float>, multiply_heads<bf16>},
};

}  // namespace quire::QUIRE_ISA
