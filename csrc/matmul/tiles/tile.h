// How a matrix product is cut: tiles of accumulators that fill the registers, tasks that fill the threads; and how its
// rows leave. Shared by the products on packed (matmul/matmul.h) and on quantized weights (quantized/matmul.h).
#pragma once

#include "base/kernel_table.h"
#include "isa/rows.h"
#include "isa/simd.h"
#include "matmul/layout.h"
#include "runtime/memory.h"
#include "runtime/thread_pool.h"

namespace quire::QUIRE_ISA {

constexpr int64_t kVectorsPerPanel = kPanelColumns / W;

// The largest tile of accumulators, rows x vectors, fills the registers; fewer rows take more columns, up to `most`
// vectors, where that hides latency: within a panel at best, since processors fetch one stream ahead better than two.
struct TileShape {
  int rows, vectors, most;

  // Vectors of columns a tile of `count` rows takes: the largest power of two that fits the registers.
  constexpr int width(int count) const {
    int wide = vectors;
    while (wide * 2 <= most && wide * 2 * count <= rows * vectors) wide *= 2;
    return wide;
  }
};

#if defined(__AVX512BF16__)
constexpr TileShape kTileShape = {12, 2, 2};
#elif defined(QUIRE_SIMD_AVX512)
constexpr TileShape kTileShape = {12, 2, 8};
#elif defined(QUIRE_ARM_I8MM)
constexpr TileShape kTileShape = {6, 4, 4};
#elif defined(QUIRE_SIMD_NEON)
constexpr TileShape kTileShape = {5, 4, 8};
#elif defined(QUIRE_SIMD_AVX2)
constexpr TileShape kTileShape = {6, 2, 4};
#else
constexpr TileShape kTileShape = {4, 2, 4};
#endif
constexpr int kTileRows = kTileShape.rows;

#if defined(QUIRE_AMX)
constexpr int64_t kBlockRows = 32;  // whose products are computed together: tasks begin at multiples
#else
constexpr int64_t kBlockRows = kTileRows;
#endif
constexpr int64_t kTaskPanels = 8;
constexpr int64_t kTaskRows = 16 * kTileRows;
static_assert(kTaskRows % kBlockRows == 0);
constexpr int64_t kInlineProducts = 128 * 1024;  // done before a sleeping worker would have woken

QUIRE_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
QUIRE_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Tile::run<R, G> for these numbers of rows and vectors, which Tile::kShape has.
template <typename Tile, int R = 1>
static auto tile_function(int64_t rows, int64_t vectors) {
  constexpr TileShape kShape = Tile::kShape;
  if constexpr (R < kShape.rows) {
    if (rows > R) return tile_function<Tile, R + 1>(rows, vectors);
  }
  constexpr int kWidth = kShape.width(R);
  if constexpr (kWidth >= 8) {
    if (vectors >= 8) return &Tile::template run<R, 8>;
  }
  if constexpr (kWidth >= 4) {
    if (vectors >= 4) return &Tile::template run<R, 4>;
  }
  return &Tile::template run<R, 2>;
}

// Calls call(vector, width) for tiles of up to shape.width(rows) vectors that together cover `panels` panels.
template <typename Call>
QUIRE_INLINE void for_tiles(const TileShape& shape, int64_t rows, int64_t panels, const Call& call) {
  const int64_t vectors = panels * kVectorsPerPanel;
  int64_t width = shape.width(int(rows));
  for (int64_t vector = 0; vector < vectors; vector += width) {
    while (width > vectors - vector) width /= 2;
    call(vector, width);
  }
}

constexpr int64_t kBytesAhead = 6144;  // of weights, in all panels of a tile together

// How lines that will be read soon are asked for: into the second-level cache or into the nearest one, which is faster
// where that has room for them (has_large_nearest_cache).
enum class Ask { kNot, kNext, kNearest };

// Few rows are read as fast as the processor's own prefetchers go, and not faster with more requests, or only with
// requests into the nearest cache. Processors with AMX, which are Intel's, want requests into the second-level cache.
#if defined(QUIRE_AMX)
constexpr bool kAsksNear = false;
constexpr int kUnfetchedRows = 0, kUnfetchedNearRows = 0;
#elif defined(__AVX512BF16__)
constexpr bool kAsksNear = true;
constexpr int kUnfetchedRows = 4, kUnfetchedNearRows = 2;
#elif defined(QUIRE_SIMD_AVX2)
constexpr bool kAsksNear = false;
constexpr int kUnfetchedRows = 0, kUnfetchedNearRows = 0;
#else
constexpr bool kAsksNear = false;
constexpr int kUnfetchedRows = 2, kUnfetchedNearRows = 2;
#endif
constexpr int64_t kBytesAheadNear = 8192;  // of weights that are not quantized

QUIRE_INLINE void ask_for(Ask ask, const char* first, int64_t lines = 1) {
  if (ask == Ask::kNearest) {
    QUIRE_UNROLL
    for (int64_t i = 0; i < lines; ++i) __builtin_prefetch(first + i * 64, 0, 3);
  } else if (ask == Ask::kNext) {
    QUIRE_UNROLL
    for (int64_t i = 0; i < lines; ++i) __builtin_prefetch(first + i * 64, 0, 2);
  }
}

// What a tile asks for ahead, in each unit a line for each vector: those of a panel are `vector_gap` apart, panels
// `panel_gap`, units `step`. May be beyond what there is.
struct Prefetch {
  bool is_near;  // whether it is asked for as Ask::kNearest
  const char* at;
  int64_t panel_gap, vector_gap, step;
};

// Where a product goes: sums of rows from `row` and of `width` columns from `column` on (but those beyond the last),
// plus bias, rounded. The sums' rows are `stride` apart.
template <typename Out>
static void finish_as(const ProductOut& to, int64_t row, int64_t rows, int64_t column, const float* sums,
                      int64_t stride, int64_t width) {
  const int64_t columns = smaller(width, to.n - column);
  const bool has_bias = to.bias != nullptr;  // adding 0 would make 0 of -0
  const auto bias = [&](int64_t j, int64_t count) __attribute__((always_inline)) {
    return has_bias ? load_some(to.bias + column + j, count) : set1(0);
  };
  Out* out = static_cast<Out*>(to.out) + row * to.stride + column;
  int64_t j = 0;
  for (; j + 2 * W <= columns;
       j += 2 * W) {  // whole cache lines of bf16, since rows may lie in a few sets of the cache
    const f32 first = bias(j, W), second = bias(j + W, W);
    for (int64_t r = 0; r < rows; ++r) {
      const f32 a = load(sums + r * stride + j), b = load(sums + r * stride + j + W);
      store_two(out + r * to.stride + j, has_bias ? a + first : a, has_bias ? b + second : b);
    }
  }
  for_parts(columns - j, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
    const f32 own = bias(j + i, count);
    for (int64_t r = 0; r < rows; ++r) {
      const f32 sum = load(sums + r * stride + j + i);
      store_some(out + r * to.stride + j + i, has_bias ? sum + own : sum, count);
    }
  });
}

QUIRE_INLINE void finish(const ProductOut& to, int64_t row, int64_t rows, int64_t column, const float* sums,
                         int64_t stride, int64_t width) {
  if (to.dtype == kFloat32) {
    finish_as<float>(to, row, rows, column, sums, stride, width);
  } else {
    finish_as<bf16>(to, row, rows, column, sums, stride, width);
  }
}

// Asks for the lines that a tile's rows will be written to.
QUIRE_INLINE void expect_out(const ProductOut& to, int64_t row, int64_t rows, int64_t column) {
  const int64_t bytes = to.dtype == kFloat32 ? int64_t(sizeof(float)) : int64_t(sizeof(bf16));
  for (int64_t r = 0; r < rows; ++r) {
    __builtin_prefetch(static_cast<char*>(to.out) + ((row + r) * to.stride + column) * bytes, 1, 2);
  }
}

// A rectangle of a product, computed by one thread: rows [row, row + rows), panels [panel, panel + panels).
struct ProductTask {
  int64_t row, rows, panel, panels;
};

// Calls run(task, thread) for tasks of about `task_panels` panels that together cover a product of [rows, n], `k`
// multiplications each.
template <typename Run>
static void for_tasks(int64_t rows, int64_t n, int64_t k, int64_t task_panels, const Run& run) {
  const int64_t panels = ceil_div(n, kPanelColumns);
  if (rows == 0 || panels == 0) return;
  const int64_t row_tasks = ceil_div(rows, kTaskRows), row_blocks = ceil_div(rows, kBlockRows);
  const bool is_small = rows * n * k <= kInlineProducts;
  int64_t panel_tasks = ceil_div(panels, task_panels);
  if (!is_small) {  // as many equal tasks as all threads finish together
    const int64_t threads = num_threads();
    panel_tasks = smaller(panels, ceil_div(ceil_div(row_tasks * panel_tasks, threads) * threads, row_tasks));
  }
  auto task = [&](int64_t index, int thread) {
    const int64_t p = index / row_tasks, r = index % row_tasks;
    ProductTask part;
    part.row = r * row_blocks / row_tasks * kBlockRows;
    part.rows = smaller((r + 1) * row_blocks / row_tasks * kBlockRows, rows) - part.row;
    part.panel = p * panels / panel_tasks;
    part.panels = (p + 1) * panels / panel_tasks - part.panel;
    run(part, thread);
  };
  auto all_tasks = [&](int64_t, int thread) {
    for (int64_t index = 0; index < row_tasks * panel_tasks; ++index) task(index, thread);
  };
  if (is_small) {
    parallel_for(1, all_tasks);
  } else {
    parallel_for(row_tasks * panel_tasks, task);
  }
}

}  // namespace quire::QUIRE_ISA
