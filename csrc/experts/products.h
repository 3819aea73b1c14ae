// Products of rows with the matrices of their experts, and the sums of a token's experts.
//
// Rows are grouped by expert. A task is a range of an expert's panels times up to kTaskRows of its rows, so a panel is
// read once for all of them; all tasks of all experts are one parallel region. They are the tasks of the products by
// one matrix (matmul/matmul.h, quantized/matmul.h): a row has the bits that kernels.matmul gives it alone.
#pragma once

#include "experts/grouping.h"
#include "matmul/matmul.h"
#include "quantized/matmul.h"

namespace quire::QUIRE_ISA {

// Rows that are prepared at once, for all experts together: more than this, and reading an expert once more costs
// nothing beside its products.
constexpr int64_t kMostExpertRows = 2048;

// Rows [begin, begin + rows) of the product, which are of one expert.
struct ExpertChunk {
  int32_t expert, begin, rows;
};

static int64_t most_chunks(int64_t rows, int64_t num_experts) { return smaller(rows, num_experts) + rows / kTaskRows; }

QUIRE_INLINE int64_t chunks_bytes(int64_t rows, int64_t num_experts) {
  return ceil_div(most_chunks(rows, num_experts) * int64_t(sizeof(ExpertChunk)), 64) * 64;
}

static int64_t expert_work_bytes(int64_t rows, int64_t num_experts, int64_t row_bytes) {
  rows = smaller(rows, kMostExpertRows);
  return chunks_bytes(rows, num_experts) + rows * row_bytes;
}

// The chunks of rows [first, end) -> chunks; returns their number.
static int64_t plan_experts(const ExpertMatmulArgs& args, int64_t first, int64_t end, ExpertChunk* chunks) {
  int64_t count = 0;
  for (int64_t e = 0; e < args.num_experts; ++e) {
    const int64_t last = smaller(args.starts[e + 1], end);
    int64_t row = args.starts[e] > first ? args.starts[e] : first;
    for (int64_t rows; row < last; row += rows) {
      rows = smaller(kTaskRows, last - row);
      chunks[count++] = {int32_t(e), int32_t(row), int32_t(rows)};
    }
  }
  return count;
}

// A chunk's rows [begin, end) as the tiles read them -> `to`, which is the chunk's first. Neighbouring rows for packed
// weights are read where they are.
template <typename T>
static void prepare_rows(const ExpertMatmulArgs& args, const ExpertChunk& chunk, int64_t begin, int64_t end, char* to) {
  const ExpertEntry& entry = args.table[chunk.expert];
  const bool is_packed = entry.format < 0;
  if (is_packed && args.pairs == nullptr) return;
  const QuantizedShape shape(is_packed ? 0 : int(entry.format), entry.base_group, args.n, args.k);
  const QuantizedRow layout(shape);
  const float* factors = is_packed ? nullptr : factors_of(shape, entry.weight);
  const int64_t stride = is_packed ? args.row_bytes : layout.bytes;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t index = chunk.begin + row, from = args.pairs == nullptr ? index : args.pairs[index] / args.top_k;
    const T* x = static_cast<const T*>(args.x) + from * args.x_stride;
    if (is_packed) {
      std::memcpy(to + row * stride, x, size_t(args.k) * sizeof(T));
    } else {
      quantize_x(x, entry.order, factors, layout, to + row * stride);
    }
  }
}

// Some panels of a chunk's product. Its first row was prepared at `rows`.
template <typename T>
static void run_expert_task(const ExpertMatmulArgs& args, const ExpertChunk& chunk, int64_t panel, int64_t panels,
                            const char* rows, int thread) {
  const ExpertEntry& entry = args.table[chunk.expert];
  const int64_t out_bytes = args.out_dtype == kFloat32 ? int64_t(sizeof(float)) : int64_t(sizeof(bf16));
  const ProductOut to = {args.n, args.out_stride, entry.bias,
                         static_cast<char*>(args.out) + chunk.begin * args.out_stride * out_bytes, args.out_dtype};
  const ProductTask task = {0, chunk.rows, panel, panels};
  if (entry.format >= 0) {
    const QuantizedShape shape(int(entry.format), entry.base_group, args.n, args.k);
    return run_quantized_task(PanelReader(shape), QuantizedRow(shape), entry.weight, rows, task, to, 0, thread);
  }
  char* scratch = static_cast<char*>(thread_scratch(thread, kScratchBytes));
  const PackedWeight weight = {entry.weight, args.n, args.k};
  if (args.pairs == nullptr) {
    const T* x = static_cast<const T*>(args.x) + chunk.begin * args.x_stride;
    run_task<T>({x, args.x_stride, chunk.rows, weight, to}, task, scratch);
  } else {
    run_task<T>({rows, args.row_bytes / int64_t(sizeof(T)), chunk.rows, weight, to}, task, scratch);
  }
}

// Rows [first, end) of the product.
template <typename T>
static void multiply_experts(const ExpertMatmulArgs& args, int64_t first, int64_t end) {
  ExpertChunk* chunks = reinterpret_cast<ExpertChunk*>(args.work);
  char* prepared = args.work + chunks_bytes(end - first, args.num_experts);
  const int64_t num_chunks = plan_experts(args, first, end, chunks), panels = ceil_div(args.n, kPanelColumns);
  if (args.row_bytes > 0) {
    for_rows(end - first, args.k, [&](int64_t begin, int64_t last) {
      for (int64_t i = 0; i < num_chunks; ++i) {
        const int64_t at = chunks[i].begin - first, from = begin > at ? begin - at : 0;
        const int64_t to = smaller(chunks[i].rows, last - at);
        if (from < to) prepare_rows<T>(args, chunks[i], from, to, prepared + at * args.row_bytes);
      }
    });
  }
  if (num_chunks == 0 || panels == 0) return;
  const int64_t threads = num_threads(), tasks = num_chunks * ceil_div(panels, kTaskPanels);
  const bool is_small = (end - first) * args.n * args.k <= kInlineProducts;
  const int64_t parts = smaller(panels, ceil_div(is_small ? tasks : ceil_div(tasks, threads) * threads, num_chunks));
  auto task = [&](int64_t index, int thread) {
    const ExpertChunk& chunk = chunks[index / parts];
    const int64_t part = index % parts, panel = part * panels / parts;
    run_expert_task<T>(args, chunk, panel, (part + 1) * panels / parts - panel,
                       prepared + (chunk.begin - first) * args.row_bytes, thread);
  };
  auto all_tasks = [&](int64_t, int thread) {
    for (int64_t index = 0; index < num_chunks * parts; ++index) task(index, thread);
  };
  if (is_small) {
    parallel_for(1, all_tasks);
  } else {
    parallel_for(num_chunks * parts, task);
  }
}

template <typename T>
static void expert_matmul(const ExpertMatmulArgs& args) {
  for (int64_t first = 0; first < args.rows; first += kMostExpertRows) {
    multiply_experts<T>(args, first, smaller(args.rows, first + kMostExpertRows));
  }
}

template <typename T>
static void combine(const CombineArgs& args) {
  for_rows(args.rows, args.width * (args.top_k + 1), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float* weights = args.weights + row * args.top_k;
      const int32_t* places = args.places + row * args.top_k;
      const f32 share = args.gate == nullptr ? set1(1) : sigmoid(set1(args.gate[row]));
      T* out = static_cast<T*>(args.out) + row * args.width;
      for_parts(args.width, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
        f32 sum = set1(0);
        for (int64_t rank = 0; rank < args.top_k; ++rank) {
          const T* y = static_cast<const T*>(args.y) + places[rank] * args.width;
          sum = fma(load_some(y + i, n), set1(weights[rank]), sum);
        }
        if (args.shared != nullptr) {
          sum = fma(load_some(static_cast<const T*>(args.shared) + row * args.width + i, n), share, sum);
        }
        store_some(out + i, sum, n);
      });
    }
  });
}

}  // namespace quire::QUIRE_ISA
