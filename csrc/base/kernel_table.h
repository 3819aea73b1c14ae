// The functions every ISA variant provides. Pairs of pointers are indexed by DType. Each family of kernels has its own
// struct here, a header in its folder of csrc that defines the functions and a `constexpr` instance of the struct, a
// line in isa/make_table.h, and a binding beside its header.
//
// Pointers are untyped: a function casts them to its element type. Strides and sizes count elements.
#pragma once

#include <string>
#include <vector>

#include "attention/plan.h"
#include "base/common.h"
#include "quantized/layout.h"
#include "sampling/args.h"

namespace quire {

constexpr int64_t kMaxTables = 3;

struct EmbeddingNormArgs {
  int64_t num_tables;
  const void* tables[kMaxTables];  // of `width` columns each
  const int64_t* ids[kMaxTables];  // [rows]: rows of that table; or null: row 0
  const float* weight;             // [width]
  const float* bias;               // [width] or null
  float eps;
  void* out;  // [rows, width] contiguous
  int64_t rows, width;
};

// RMSNorm or LayerNorm of x or, if there is a residual, of residual += x. All [rows, width] contiguous.
struct NormArgs {
  const void* x;
  void* residual;       // or null
  const float* weight;  // [width]
  const float* bias;    // [width] or null, as for RMSNorm
  float eps;
  void* out;
  int64_t rows, width;
  bool is_rms;
};

struct NormTable {
  // All [rows, width] contiguous. residual += x, in place.
  void (*add[kNumDTypes])(const void* x, void* residual, int64_t rows, int64_t width);
  // x [outer, inner, width] has strides outer_stride and inner_stride; out is contiguous; weight [width].
  void (*rms_norm[kNumDTypes])(const void* x, const float* weight, float eps, void* out, int64_t outer, int64_t inner,
                               int64_t outer_stride, int64_t inner_stride, int64_t width);
  void (*norm[kNumDTypes])(const NormArgs& args);
  // x as that of rms_norm; weight and bias [inner, width]. bias may be null.
  void (*head_layer_norm[kNumDTypes])(const void* x, const float* weight, const float* bias, float eps, void* out,
                                      int64_t outer, int64_t inner, int64_t outer_stride, int64_t inner_stride,
                                      int64_t width);
  void (*embedding_norm[kNumDTypes])(const EmbeddingNormArgs& args);
};

enum Pooling : int { kMean = 0, kSumByRoot = 1, kWeightedMean = 2, kMax = 3 };

// x [rows, width] contiguous -> out [width]: the mean of the rows, their sum divided by the root of their number, the
// mean in which row r counts r + 1 times, or the largest of each column.
struct PoolingTable {
  void (*pool_rows[kNumDTypes])(int pooling, const void* x, int64_t rows, int64_t width, float* out);
};

enum Activation : int {
  kSilu = 0,
  kGelu = 1,
  kGeluTanh = 2,
  kRelu = 3,
  kRelu2 = 4,
  kQuickGelu = 5,
  kXielu = 6,
  kClampedSwiglu = 7,  // only gated
};

// A kind and the members of its struct in elementwise/activation.h, in their order.
struct ActivationKind {
  int kind;
  float parameters[3];
};

struct ActivationTable {
  // x and out [rows, width] contiguous.
  void (*activation[kNumDTypes])(const ActivationKind& kind, const void* x, int64_t rows, int64_t width, void* out);
  // x [rows, 2 * width] contiguous; rows of out lie `out_stride` elements apart.
  void (*gated_activation[kNumDTypes])(const ActivationKind& kind, const void* x, int64_t rows, int64_t width,
                                       void* out, int64_t out_stride);
};

// In place; x [rows, width] contiguous, but for clip, which takes rows that lie `stride` elements apart.
struct ScaleTable {
  void (*scale[kNumDTypes])(void* x, int64_t rows, int64_t width, float factor);
  void (*clip[kNumDTypes])(void* x, int64_t rows, int64_t width, int64_t stride, float limit);
  void (*softcap)(float* x, int64_t rows, int64_t width, float cap);
};

struct RotaryTable {
  // x [tokens, heads, >= rotary_dim]; cos_sin [max_positions, rotary_dim]; every position must be below max_positions.
  using Kernel = void (*)(void* x, int64_t tokens, int64_t heads, int64_t token_stride, int64_t head_stride,
                          const int64_t* positions, const float* cos_sin, int64_t rotary_dim);
  Kernel rotary[kNumDTypes];
  Kernel interleaved_rotary[kNumDTypes];
};

// Where a product [rows, n] goes, rows `stride` apart, and what is added to each row.
struct ProductOut {
  int64_t n, stride;
  const float* bias;  // [n] or null
  void* out;
  DType dtype;
};

struct MatmulArgs {
  const void* x;  // [rows, k], rows x_stride apart
  int64_t x_stride, rows;
  PackedWeight weight;
  ProductOut to;
};

// Each head's rows times a matrix of its own. What rows have beyond k is copied behind their products.
struct HeadProductArgs {
  const void* x;  // [rows, num_heads, k + tail]
  int64_t x_stride, x_head_stride, rows;
  int64_t num_heads, n, k, tail;
  const char* weights;  // the packed matrices [n, k], one behind the other
  void* out;            // [rows, num_heads, n + tail] contiguous
};

struct MatmulTable {
  void (*matmul[kNumDTypes])(const MatmulArgs& args);
  void (*of_heads[kNumDTypes])(const HeadProductArgs& args);
};

struct QuantizedMatmulArgs {
  QuantizedShape shape;
  const void* x;  // [rows, k], rows x_stride apart
  int64_t x_stride, rows;
  const char* weight;
  char* rows_of_x;       // of rows_bytes(shape, rows), to work in
  const int32_t* order;  // the column of x for each column of the weight, or null; groups are of 32 then
  ProductOut to;
  // What is multiplied is what this makes of x, which is [rows, 2 * k] if it is gated; null: x itself.
  const ActivationKind* activation;
  bool is_gated;
  const NormArgs* norm;  // what makes x, each row before it is rounded; null: x is there
};

// Indexed by the DType of x and of the weight that was quantized.
struct QuantizedTable {
  // What matmul needs as rows_of_x.
  int64_t (*rows_bytes)(const QuantizedShape& shape, int64_t rows);
  // To int8 or int4, rotated after its columns are multiplied with the factors, unless those are null. False if an
  // element is not finite.
  bool (*quantize[2][kNumDTypes])(const void* weight, int64_t stride, const QuantizedShape& shape, const float* factors,
                                  char* out);
  void (*matmul[kNumDTypes])(const QuantizedMatmulArgs& args);
  // out [count, k] = rows of the weight; ids must be in [0, n).
  void (*gather[kNumDTypes])(const QuantizedShape& shape, const int64_t* ids, int64_t count, const char* weight,
                             void* out);
};

constexpr int kMaxLoraModules = 3;

// One adapter's matrices for a projection that fuses up to three modules, as lora/lora.h lays them out. Python writes
// such entries as integers of eight bytes.
struct LoraEntry {
  const void* a;  // [ranks, k]; null: the adapter has nothing for this projection
  int64_t ranks;  // of all modules together, padded
  struct {
    const void* b;
    int64_t rank;  // 0: the adapter has nothing for this module
  } modules[kMaxLoraModules];
};

struct LoraArgs {
  const void* x;  // [rows, k], rows x_stride apart
  int64_t x_stride, rows, k;
  const int64_t* slots;  // [rows]: index in the table, or -1
  const LoraEntry* table;
  int64_t num_slots;
  int64_t sizes[kMaxLoraModules];  // the outputs of each module
  void* y;                         // [rows, sum of sizes], rows y_stride apart
  int64_t y_stride;
  void* work;           // num_slots + 4 * rows numbers of four bytes, then [rows, work_stride] float32
  int64_t work_stride;  // at least the ranks of any adapter
};

struct LoraTable {
  void (*add_lora[kNumDTypes])(const LoraArgs& args);
};

enum Scoring : int { kSoftmax = 0, kSigmoid = 1, kSparseMixer = 2 };

// Which experts each row goes to, as Routing in src/quire/kernels/weights.py says.
struct RouteArgs {
  const float* logits;  // [rows, num_experts] contiguous
  int64_t rows, num_experts, top_k;
  int scoring;
  const float* bias;  // [num_experts] or null
  int64_t num_groups, top_groups;
  bool has_pairs;  // groups are chosen by the sum of their two best experts, not by the best one
  bool is_normalized;
  float scale, jitter;
  int32_t* ids;    // [rows, top_k]
  float* weights;  // [rows, top_k]
};

// The matrix [n, k] of one expert. Python writes such entries as integers of eight bytes.
struct ExpertEntry {
  const char* weight;
  const float* bias;     // [n] or null
  const int32_t* order;  // as in QuantizedMatmulArgs
  int64_t format;        // index in kQuantizedFormats; -1: packed
  int64_t base_group;
};

// The product of rows that are grouped by expert: row r of expert e for starts[e] <= r < starts[e + 1].
struct ExpertMatmulArgs {
  const void* x;  // rows of k, x_stride apart
  int64_t x_stride;
  const int32_t* pairs;  // [rows]: row r is of x's row pairs[r] / top_k; or null: of x's row r
  int64_t top_k, rows;
  const int32_t* starts;  // [num_experts + 1]
  const ExpertEntry* table;
  int64_t num_experts, n, k;
  char* work;         // of expert_work_bytes
  int64_t row_bytes;  // at most, of a row in it
  void* out;          // rows of n, out_stride apart
  int64_t out_stride;
  DType out_dtype;
};

// Sums over the experts of each of `rows` tokens, in the order of their ranks.
struct CombineArgs {
  const void* y;  // [rows * top_k, width] contiguous
  const float* weights;
  const int32_t* places;  // [rows, top_k]: the row of y
  int64_t rows, top_k, width;
  const void* shared;  // [rows, width], added; or null
  const float* gate;   // [rows]: shared counts its sigmoid; or null
  void* out;           // [rows, width] contiguous
};

struct ExpertTable {
  void (*route)(const RouteArgs& args);
  // What matmul needs as work.
  int64_t (*work_bytes)(int64_t rows, int64_t num_experts, int64_t row_bytes);
  void (*matmul[kNumDTypes])(const ExpertMatmulArgs& args);
  void (*combine[kNumDTypes])(const CombineArgs& args);
};

struct ProbeTable {
  void (*read_memory)(const void* data, int64_t bytes);
  int64_t (*multiply_in_registers[kNumDTypes + 2])(int64_t rounds);  // the last: weights of 8 and of 4 bits
};

struct KernelTable {
  const char* name;
  MatmulTable matmul;
  QuantizedTable quantized;
  LoraTable lora;
  ExpertTable experts;
  NormTable norm;
  PoolingTable pooling;
  ActivationTable activation;
  ScaleTable scale;
  RotaryTable rotary;
  ProbeTable probe;
  AttentionTable attention;
  SamplingTable sampling;
};

// The variant in use: the best the CPU has, until use_isa says otherwise.
const KernelTable& kernels();

// Names of the variants this CPU can run, best first.
std::vector<std::string> available_isas();

// False if there is no such variant, or this CPU cannot run it.
bool use_isa(const std::string& name);

}  // namespace quire
