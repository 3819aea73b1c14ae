// The functions every ISA variant provides. Pairs of pointers are indexed by DType. Each family has its own struct
// here, one header csrc/<family>.h that defines the functions and a `constexpr` instance of the struct, one line in
// isa/make_table.h, and one csrc/bind_<family>.cpp.
//
// Pointers are untyped: a function casts them to its element type. Strides and sizes count elements.
#pragma once

#include "attention_plan.h"
#include "common.h"
#include "sampling_args.h"
#include "matmul_layout.h"

namespace quire {

// Rows of `width` elements in up to two levels: row (i, j) starts at i * outer_stride + j * inner_stride.
struct StridedRows {
  int64_t outer, inner;
  int64_t outer_stride, inner_stride;
  int64_t width;
};

struct NormTable {
  // out is contiguous [outer * inner, width]; weight [width] float32.
  void (*rms_norm[kNumDTypes])(const void* x, const float* weight, float eps, void* out, StridedRows shape);
};

struct MatmulArgs {
  const void* x;  // [rows, k], rows x_stride apart
  int64_t x_stride, rows;
  PackedWeight weight;
  const float* bias;  // [n] or null
  void* out;          // [rows, n] contiguous
  DType out_dtype;
};

struct MatmulTable {
  void (*matmul[kNumDTypes])(const MatmulArgs& args);
};

struct ProbeTable {
  float (*read_memory)(const void* data, int64_t bytes);
  int64_t (*multiply_in_registers[kNumDTypes])(int64_t rounds);
};

struct KernelTable {
  const char* name;
  MatmulTable matmul;
  NormTable norm;
  AttentionTable attention;
  SamplingTable sampling;
  ProbeTable probe;
};

// The variant in use: the best the CPU has, until use_isa says otherwise.
const KernelTable& kernels();

// Names of the variants this CPU can run, best first.
int available_isas(const char** names, int capacity);

// False if there is no such variant, or this CPU cannot run it.
bool use_isa(const char* name);

}  // namespace quire
