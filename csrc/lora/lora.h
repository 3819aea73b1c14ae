// Low-rank adapters (Hu et al. 2021) on the rows of a batch: y += B (A x), by each row's own adapter, or by none.
//
// Rows of the same adapter are gathered into chunks, which share what they read of A and B. First A x is computed for
// all chunks, then B times that; both are divided among the threads. Each element of A x is one vector of sums that
// runs through k in order; each element of y one sum that runs through the ranks in order and is added to y at the end.
// So the bits of a row depend on itself and its adapter, and on nothing else.
//
// A lies in blocks of kRankBlock rows, each block [lines][kRankBlock][64 bytes along k]; B in panels of 32 outputs,
// each [rank][32]. What the last line, block and panel have beyond the matrix is zero.
#pragma once

#include "matmul/tiles/tile.h"

namespace quire::QUIRE_ISA {

constexpr int kRankBlock = 4;
constexpr int kVectorsAtOnce = 2;
constexpr int64_t kLineBytes = 64;
constexpr int64_t kLoraBytesAhead = 2048;
#if defined(QUIRE_SIMD_AVX512)
constexpr int kShrinkRows = 4, kExpandRows = 8;
#else
constexpr int kShrinkRows = 2, kExpandRows = 4;
#endif
constexpr int32_t kChunkRows = 32;
constexpr int64_t kTasksPerThread = 8;              // ranks differ, and so do the tasks
constexpr int64_t kInlineLoraProducts = 32 * 1024;  // done before all threads have started
static_assert(kVectorsPerPanel % kVectorsAtOnce == 0);

// Rows order[begin .. begin + rows) of the batch, which have the same adapter.
struct LoraChunk {
  int32_t slot, begin, rows;
};

// The parts of args.work.
struct LoraWork {
  int32_t* ends;      // [num_slots]: where the rows of each slot end in order
  int32_t* order;     // [rows]: the rows that have an adapter, by slot
  LoraChunk* chunks;  // [rows]
  float* shrunk;      // [rows, work_stride]: A x of the rows in order

  explicit LoraWork(const LoraArgs& args)
      : ends(static_cast<int32_t*>(args.work)),
        order(ends + args.num_slots),
        chunks(reinterpret_cast<LoraChunk*>(order + args.rows)),
        shrunk(reinterpret_cast<float*>(chunks + args.rows)) {}
};

// What there is to do.
struct LoraPlan {
  int64_t num_chunks = 0;
  int64_t row_ranks = 0;  // the sum of the ranks of all rows
};

QUIRE_INLINE bool has_adapter(const LoraArgs& args, int64_t row) {
  return args.slots[row] >= 0 && args.table[args.slots[row]].a != nullptr;
}

static LoraPlan plan_chunks(const LoraArgs& args, const LoraWork& work) {
  std::memset(work.ends, 0, size_t(args.num_slots) * sizeof(int32_t));
  for (int64_t row = 0; row < args.rows; ++row) {
    if (has_adapter(args, row)) ++work.ends[args.slots[row]];
  }
  LoraPlan plan;
  int32_t begin = 0;
  for (int32_t slot = 0; slot < args.num_slots; ++slot) {
    const int32_t count = work.ends[slot];
    plan.row_ranks += count * args.table[slot].ranks;
    for (int32_t done = 0; done < count; done += kChunkRows) {
      const int32_t left = count - done;
      work.chunks[plan.num_chunks++] = {slot, begin + done, left < kChunkRows ? left : kChunkRows};
    }
    work.ends[slot] = begin;  // moves on to the end as the rows are filled in
    begin += count;
  }
  for (int64_t row = 0; row < args.rows; ++row) {
    if (has_adapter(args, row)) work.order[work.ends[args.slots[row]]++] = int32_t(row);
  }
  return plan;
}

// kRankBlock elements of A x for each of R rows of x.
template <int R, typename T>
static void shrink_tile(const T* x, int64_t x_stride, const int32_t* rows, const T* a, int64_t k, float* out,
                        int64_t out_stride) {
  constexpr int64_t kInLine = kLineBytes / int64_t(sizeof(T)), kInVector = W * kPerUnit<T>;
  f32 acc[R][kRankBlock];
  QUIRE_UNROLL
  for (int r = 0; r < R; ++r) {
    QUIRE_UNROLL
    for (int c = 0; c < kRankBlock; ++c) acc[r][c] = set1(0);
  }
  const auto add_line = [&](const T* const(&from)[R]) __attribute__((always_inline)) {
    QUIRE_UNROLL
    for (int64_t i = 0; i < kInLine; i += kInVector) {
      typename Lane<T>::Vector weights[kRankBlock];
      QUIRE_UNROLL
      for (int c = 0; c < kRankBlock; ++c) weights[c] = Lane<T>::load(a + c * kInLine + i);
      QUIRE_UNROLL
      for (int r = 0; r < R; ++r) {
        const auto values = Lane<T>::load(from[r] + i);
        QUIRE_UNROLL
        for (int c = 0; c < kRankBlock; ++c) acc[r][c] = Lane<T>::dot(acc[r][c], values, weights[c]);
      }
    }
  };
  const T* from[R];
  QUIRE_UNROLL
  for (int r = 0; r < R; ++r) from[r] = x + rows[r] * x_stride;
  int64_t left = k;
  for (; left >= kInLine; left -= kInLine) {
    if constexpr (R == 1) {
      QUIRE_UNROLL
      for (int c = 0; c < kRankBlock; ++c) {
        __builtin_prefetch(reinterpret_cast<const char*>(a + c * kInLine) + kLoraBytesAhead, 0, 2);
      }
    }
    add_line(from);
    a += kRankBlock * kInLine;
    QUIRE_UNROLL
    for (int r = 0; r < R; ++r) from[r] += kInLine;
  }
  if (left > 0) {
    T last[R][kInLine] = {};
    const T* padded[R];
    for (int r = 0; r < R; ++r) {
      std::memcpy(last[r], from[r], size_t(left) * sizeof(T));
      padded[r] = last[r];
    }
    add_line(padded);
  }
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < kRankBlock; ++c) out[r * out_stride + c] = reduce_add(acc[r][c]);
  }
}

// y += B t of R rows for the `columns` outputs of a panel.
template <int R, typename T>
static void expand_tile(const float* t, int64_t t_stride, const T* panel, int64_t rank, T* y, int64_t y_stride,
                        const int32_t* rows, int64_t columns) {
  for (int64_t column = 0; column < columns; column += kVectorsAtOnce * W) {
    f32 acc[R][kVectorsAtOnce];
    QUIRE_UNROLL
    for (int r = 0; r < R; ++r) {
      QUIRE_UNROLL
      for (int g = 0; g < kVectorsAtOnce; ++g) acc[r][g] = set1(0);
    }
    for (int64_t i = 0; i < rank; ++i) {
      if constexpr (R == 1) {
        const char* line = reinterpret_cast<const char*>(panel + i * kPanelColumns + column);
        __builtin_prefetch(line + kLoraBytesAhead, 0, 2);
      }
      f32 weights[kVectorsAtOnce];
      QUIRE_UNROLL
      for (int g = 0; g < kVectorsAtOnce; ++g) weights[g] = load(panel + i * kPanelColumns + column + g * W);
      QUIRE_UNROLL
      for (int r = 0; r < R; ++r) {
        const f32 value = set1(t[r * t_stride + i]);
        QUIRE_UNROLL
        for (int g = 0; g < kVectorsAtOnce; ++g) acc[r][g] = fma(value, weights[g], acc[r][g]);
      }
    }
    QUIRE_UNROLL
    for (int r = 0; r < R; ++r) {
      QUIRE_UNROLL
      for (int g = 0; g < kVectorsAtOnce; ++g) {
        const int64_t left = columns - column - g * W;
        if (left <= 0) continue;
        T* to = y + rows[r] * y_stride + column + g * W;
        const int64_t count = smaller(left, W);
        store_some(to, load_some(to, count) + acc[r][g], count);
      }
    }
  }
}

// Calls tile(integral constant R, first row) for tiles of up to Most rows that together cover `rows` rows.
template <int Most, typename Tile>
QUIRE_INLINE void for_row_tiles(int64_t rows, const Tile& tile) {
  int64_t row = 0;
  for (; row + Most <= rows; row += Most) tile.template operator()<Most>(row);
  if constexpr (Most > 1) {
    if (row < rows) {
      for_row_tiles<Most / 2>(rows - row, [&]<int R>(int64_t next) __attribute__((always_inline)) {
        tile.template operator()<R>(row + next);
      });
    }
  }
}

// Part `part` of `parts` of the ranks of one chunk.
template <typename T>
static void shrink_chunk(const LoraArgs& args, const LoraWork& work, const LoraChunk& chunk, int64_t part,
                         int64_t parts) {
  const LoraEntry& entry = args.table[chunk.slot];
  const int64_t blocks = entry.ranks / kRankBlock;
  const int64_t block_bytes = ceil_div(args.k * int64_t(sizeof(T)), kLineBytes) * kLineBytes * kRankBlock;
  const int32_t* rows = work.order + chunk.begin;
  float* shrunk = work.shrunk + chunk.begin * args.work_stride;
  for_row_tiles<kShrinkRows>(chunk.rows, [&]<int R>(int64_t row) __attribute__((always_inline)) {
    for (int64_t block = part * blocks / parts; block < (part + 1) * blocks / parts; ++block) {
      const char* a = static_cast<const char*>(entry.a) + block * block_bytes;
      shrink_tile<R>(static_cast<const T*>(args.x), args.x_stride, rows + row, reinterpret_cast<const T*>(a), args.k,
                     shrunk + row * args.work_stride + block * kRankBlock, args.work_stride);
    }
  });
}

// Part `part` of `parts` of the panels of one chunk.
template <typename T>
static void expand_chunk(const LoraArgs& args, const LoraWork& work, const LoraChunk& chunk, int64_t part,
                         int64_t parts) {
  const LoraEntry& entry = args.table[chunk.slot];
  const int32_t* rows = work.order + chunk.begin;
  const float* shrunk = work.shrunk + chunk.begin * args.work_stride;
  T* y = static_cast<T*>(args.y);
  for (int m = 0; m < kMaxLoraModules; ++m) {
    const int64_t n = args.sizes[m], rank = entry.modules[m].rank;
    const int64_t panels = rank == 0 ? 0 : ceil_div(n, kPanelColumns);
    for (int64_t panel = part * panels / parts; panel < (part + 1) * panels / parts; ++panel) {
      const T* weights = static_cast<const T*>(entry.modules[m].b) + panel * rank * kPanelColumns;
      const int64_t column = panel * kPanelColumns;
      for_row_tiles<kExpandRows>(chunk.rows, [&]<int R>(int64_t row) __attribute__((always_inline)) {
        expand_tile<R>(shrunk + row * args.work_stride, args.work_stride, weights, rank, y + column, args.y_stride,
                       rows + row, smaller(kPanelColumns, n - column));
      });
    }
    shrunk += rank;
    y += n;
  }
}

// Calls run(chunk, part, parts) for all parts of all chunks: many enough for the threads, unless there is little to do.
template <typename Run>
QUIRE_INLINE void for_chunks(const LoraWork& work, const LoraPlan& plan, int64_t products, const Run& run) {
  const bool is_small = products <= kInlineLoraProducts;
  const int64_t wanted = is_small ? 1 : (plan.num_chunks == 1 ? 2 : kTasksPerThread) * num_threads();
  const int64_t parts = plan.num_chunks >= wanted ? 1 : ceil_div(wanted, plan.num_chunks);
  auto task = [&](int64_t index, int) { run(work.chunks[index / parts], index % parts, parts); };
  auto all_tasks = [&](int64_t, int thread) {
    for (int64_t index = 0; index < plan.num_chunks * parts; ++index) task(index, thread);
  };
  if (is_small) {
    parallel_for(1, all_tasks);
  } else {
    parallel_for(plan.num_chunks * parts, task);
  }
}

template <typename T>
static void add_lora(const LoraArgs& args) {
  const LoraWork work(args);
  const LoraPlan plan = plan_chunks(args, work);
  if (plan.num_chunks == 0) return;
  for_chunks(work, plan, plan.row_ranks * args.k, [&](const LoraChunk& chunk, int64_t part, int64_t parts) {
    shrink_chunk<T>(args, work, chunk, part, parts);
  });
  int64_t n = 0;
  for (const int64_t size : args.sizes) n = n < size ? size : n;
  for_chunks(work, plan, plan.row_ranks * n, [&](const LoraChunk& chunk, int64_t part, int64_t parts) {
    expand_chunk<T>(args, work, chunk, part, parts);
  });
}

static constexpr LoraTable kLora = {
    .add_lora = {add_lora<float>, add_lora<bf16>},
};

}  // namespace quire::QUIRE_ISA
