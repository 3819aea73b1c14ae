// y = x W^T + bias for any number of rows, on packed weights (matmul_layout.h).
//
// Each output element is one accumulator that runs through k in order, with the same instructions for every number of
// rows and columns beside it: its bits depend on its row of x, its column of W and nothing else. Blocking over k only
// parks the accumulators in memory, as float32, and picks them up again.
#pragma once

#include "tiles.h"

namespace quire::QUIRE_ISA {

constexpr int64_t kStageBytes = 24 * 1024;  // a tile's rows of x, for one block of k: stay in the first-level cache
constexpr int64_t kBlockUnits = 512;  // most units of k per block when blocks are used again: those of kTaskPanels
                                      // panels are then 512 KiB in all and stay in the second-level cache
constexpr int64_t kScratchBytes = kTaskRows * kTaskPanels * kPanelColumns * 4 + 128 * 1024;

constexpr int64_t kSharedBlocks =
    4;  // with so many blocks of rows, panels pass through all of them while they are near
constexpr int64_t kSharedPanels = 2;       // at a time
constexpr int64_t kSharedTaskPanels = 32;  // rows of x are staged once for so many

// What a tile asks for ahead of its multiplications: the weights `distance` bytes from its own, `step` for each unit.
struct Prefetch {
  int64_t distance, step;
};

// The weights that follow in all panels of a tile of `vectors` vectors, 8 KiB ahead in all.
QUIRE_INLINE Prefetch following(int64_t vectors) {
  return {vectors <= kVectorsPerPanel ? 8192 : 8192 * kVectorsPerPanel / vectors, kUnitRowBytes};
}

// What the inner loop reads x as: pairs where the ISA multiplies pairs, else float32.
#if defined(__AVX512BF16__)
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
template <int R, int G>
QUIRE_INLINE void multiply_unit(f32 (&acc)[R][G], const float* x, int64_t x_stride, const char* const (&panels)[G],
                                int64_t offset, const float*) {
  f32 w[G];
  QUIRE_UNROLL
  for (int g = 0; g < G; ++g) w[g] = load(reinterpret_cast<const float*>(panels[g] + offset));
  QUIRE_UNROLL
  for (int r = 0; r < R; ++r) {
    const f32 value = set1(x[r * x_stride]);
    QUIRE_UNROLL
    for (int g = 0; g < G; ++g) acc[r][g] = fma(value, w[g], acc[r][g]);
  }
}

#if defined(__AVX512BF16__)
template <int R, int G>
QUIRE_INLINE void multiply_unit(f32 (&acc)[R][G], const bf16* x, int64_t x_stride, const char* const (&panels)[G],
                                int64_t offset, const bf16*) {
  pairs w[G];
  QUIRE_UNROLL
  for (int g = 0; g < G; ++g) w[g] = load_pairs(reinterpret_cast<const bf16*>(panels[g] + offset));
  QUIRE_UNROLL
  for (int r = 0; r < R; ++r) {
    const pairs value = set1_pair(x + r * x_stride);
    QUIRE_UNROLL
    for (int g = 0; g < G; ++g) acc[r][g] = dot2(acc[r][g], w[g], value);
  }
}
#else
template <int R, int G>
QUIRE_INLINE void multiply_unit(f32 (&acc)[R][G], const float* x, int64_t x_stride, const char* const (&panels)[G],
                                int64_t offset, const bf16*) {
  f32 first[G], second[G];
  QUIRE_UNROLL
  for (int g = 0; g < G; ++g) {
    const pairs w = load_pairs(reinterpret_cast<const bf16*>(panels[g] + offset));
    first[g] = lower(w);
    second[g] = upper(w);
  }
  QUIRE_UNROLL
  for (int r = 0; r < R; ++r) {
    const f32 value = set1(x[r * x_stride]), next = set1(x[r * x_stride + 1]);
    QUIRE_UNROLL
    for (int g = 0; g < G; ++g) acc[r][g] = fma(value, first[g], acc[r][g]);
    QUIRE_UNROLL
    for (int g = 0; g < G; ++g) acc[r][g] = fma(next, second[g], acc[r][g]);
  }
}
#endif

// Runs R rows of staged x through `units` units of k of G vectors of columns, on from the sums parked in `acc`.
template <typename T, bool kShared>
struct PackedTile {
  template <int R, int G>
  static void run(const Staged<T>* x, int64_t x_stride, const char* weight, int64_t panel_bytes, int64_t units,
                  float* parked, int64_t parked_stride, Prefetch prefetch) {
    const char* panels[G];
    f32 acc[R][G];
    QUIRE_UNROLL
    for (int g = 0; g < G; ++g) {
      panels[g] = weight + g / kVectorsPerPanel * panel_bytes + g % kVectorsPerPanel * W * kUnitBytes;
      QUIRE_UNROLL
      for (int r = 0; r < R; ++r) acc[r][g] = load(parked + r * parked_stride + g * W);
    }
    for (int64_t unit = 0; unit < units; ++unit) {
      const int64_t offset = unit * kUnitRowBytes;
      if constexpr (R > 2) {  // few rows are read as fast as the processor's own prefetchers go
        // A share of a unit's two cache lines is one line at most.
        QUIRE_UNROLL
        for (int g = 0; g < G; g += kShared ? int(kVectorsPerPanel) : 1) {
          __builtin_prefetch(panels[g] + prefetch.distance + unit * prefetch.step, 0, 2);
        }
      }
      multiply_unit<R, G>(acc, x, x_stride, panels, offset, static_cast<const T*>(nullptr));
      x += kPerUnit<T>;
    }
    QUIRE_UNROLL
    for (int g = 0; g < G; ++g) {
      QUIRE_UNROLL
      for (int r = 0; r < R; ++r) store(parked + r * parked_stride + g * W, acc[r][g]);
    }
  }
};

// The widest staged row: a whole block of k for one row. Odd numbers of cache lines keep rows out of each other's sets.
template <typename T>
QUIRE_INLINE int64_t stage_stride(int64_t units) {
  const int64_t lines = ceil_div(units * kPerUnit<T> * int64_t(sizeof(Staged<T>)), 64);
  return (lines | 1) * 64 / int64_t(sizeof(Staged<T>));
}

// Copies k in [begin, end) of `rows` rows of x, in the inner loop's type, and zeroes what a last half unit lacks.
template <typename T>
static void stage(const T* x, int64_t x_stride, int64_t rows, int64_t begin, int64_t end, Staged<T>* out,
                  int64_t out_stride) {
  const int64_t count = end - begin;
  if (count == 0) return;  // k is 0, and x may be null
  for (int64_t r = 0; r < rows; ++r) {
    const T* from = x + r * x_stride + begin;
    Staged<T>* to = out + r * out_stride;
    if constexpr (sizeof(T) == sizeof(Staged<T>)) {
      std::memcpy(to, from, size_t(count) * sizeof(T));
    } else {
      int64_t i = 0;
      for (; i + W <= count; i += W) store(to + i, load(from + i));
      if (i < count) store_n(to + i, load_n(from + i, count - i), count - i);
    }
    if (count % kPerUnit<T> != 0) to[count] = {};
  }
}

// Adds the product over one block of k, staged in `x`, to the parked sums of one block of rows.
template <typename T, bool kShared>
static void run_block(const Staged<T>* x, int64_t x_stride, int64_t rows, const char* weight, int64_t panel_bytes,
                      int64_t panels, int64_t units, float* parked, int64_t parked_stride, Prefetch shared = {}) {
  for_tiles(rows, panels, [&](int64_t vector, int64_t width) {
    const char* first = weight + vector / kVectorsPerPanel * panel_bytes + vector % kVectorsPerPanel * W * kUnitBytes;
    const Prefetch prefetch = kShared ? shared : following(width);
    tile_function<PackedTile<T, kShared>>(rows, width)(x, x_stride, first, panel_bytes, units, parked + vector * W,
                                                       parked_stride, prefetch);
  });
}

template <typename T>
static void run_task(const MatmulArgs& args, const ProductTask& task, char* scratch) {
  const int64_t k = args.weight.k, units = ceil_div(k, kPerUnit<T>), panel_bytes = units * kUnitRowBytes;
  const int64_t row_blocks = ceil_div(task.rows, kTileRows), most_rows = ceil_div(task.rows, row_blocks);
  int64_t block_units = kStageBytes / (kPerUnit<T> * int64_t(sizeof(Staged<T>)) * most_rows);
  if (row_blocks > 1) block_units = smaller(block_units, kBlockUnits);
  const int64_t parked_stride = task.panels * kPanelColumns;
  // With a single block of k, all blocks of rows take turns in one place.
  const int64_t parked_rows = units <= block_units ? most_rows : task.rows;
  float* parked = reinterpret_cast<float*>(scratch);
  Staged<T>* staged = reinterpret_cast<Staged<T>*>(parked + parked_rows * parked_stride);

  for (int64_t unit = 0; unit < units || unit == 0; unit += block_units) {
    const int64_t count = smaller(block_units, units - unit), stride = stage_stride<T>(count);
    for (int64_t block = 0; block < row_blocks; ++block) {
      const int64_t first = block * task.rows / row_blocks, rows = (block + 1) * task.rows / row_blocks - first;
      float* sums = parked + (parked_rows == task.rows ? first * parked_stride : 0);
      if (unit == 0) std::memset(sums, 0, size_t(rows * parked_stride) * sizeof(float));
      stage(static_cast<const T*>(args.x) + (task.row + first) * args.x_stride, args.x_stride, rows, unit * kPerUnit<T>,
            smaller((unit + count) * kPerUnit<T>, k), staged, stride);
      run_block<T, false>(staged, stride, rows, args.weight.data + task.panel * panel_bytes + unit * kUnitRowBytes,
                          panel_bytes, task.panels, count, sums, parked_stride);
      if (unit + count == units)
        finish(args.to, task.row + first, rows, task.panel * kPanelColumns, sums, parked_stride);
    }
  }
}

// As run_task, for a few blocks of rows: two panels at a time pass through all of them, and meanwhile, a share in each
// block, the two that follow are fetched. So reading the weights overlaps with all multiplications by them.
template <typename T>
static void run_shared_task(const MatmulArgs& args, const ProductTask& task, char* scratch) {
  const int64_t k = args.weight.k, units = ceil_div(k, kPerUnit<T>), panel_bytes = units * kUnitRowBytes;
  const int64_t row_blocks = ceil_div(task.rows, kTileRows), sums_stride = task.panels * kPanelColumns;
  const int64_t stride = stage_stride<T>(smaller(units, kBlockUnits));
  float* sums = reinterpret_cast<float*>(scratch);
  Staged<T>* staged = reinterpret_cast<Staged<T>*>(sums + task.rows * sums_stride);
  std::memset(sums, 0, size_t(task.rows * sums_stride) * sizeof(float));
  for (int64_t unit = 0; unit < units; unit += kBlockUnits) {
    const int64_t count = smaller(kBlockUnits, units - unit);
    stage(static_cast<const T*>(args.x) + task.row * args.x_stride, args.x_stride, task.rows, unit * kPerUnit<T>,
          smaller((unit + count) * kPerUnit<T>, k), staged, stride);
    for (int64_t panel = 0; panel < task.panels; panel += kSharedPanels) {
      const char* weight = args.weight.data + (task.panel + panel) * panel_bytes + unit * kUnitRowBytes;
      for (int64_t block = 0; block < row_blocks; ++block) {
        const int64_t first = block * task.rows / row_blocks, rows = (block + 1) * task.rows / row_blocks - first;
        const int64_t step = kUnitRowBytes / row_blocks;
        run_block<T, true>(staged + first * stride, stride, rows, weight, panel_bytes,
                           smaller(kSharedPanels, task.panels - panel), count,
                           sums + first * sums_stride + panel * kPanelColumns, sums_stride,
                           {kSharedPanels * panel_bytes + block * count * step, step});
      }
    }
  }
  finish(args.to, task.row, task.rows, task.panel * kPanelColumns, sums, sums_stride);
}

template <typename T>
static void matmul(const MatmulArgs& args) {
  const bool is_shared = args.rows > kTileRows && args.rows <= kSharedBlocks * kTileRows;
  const int64_t task_panels = is_shared ? kSharedTaskPanels : kTaskPanels;
  for_tasks(args.rows, args.weight.n, args.weight.k, task_panels, [&](const ProductTask& task, int thread) {
    char* scratch = static_cast<char*>(thread_scratch(thread, kScratchBytes));
    (is_shared ? run_shared_task<T> : run_task<T>)(args, task, scratch);
  });
}

static constexpr MatmulTable kMatmul = {
    .matmul = {matmul<float>, matmul<bf16>},
};

}  // namespace quire::QUIRE_ISA
