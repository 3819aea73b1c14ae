// Gathers the kernels of the variant being compiled into its table. Included last by the file of each variant:
// isa/portable.cpp, isa/x86/<name>.cpp, isa/arm/<name>.cpp.
#pragma once

#include "attention/attention.h"
#include "base/kernel_table.h"
#include "elementwise/activation.h"
#include "elementwise/norm.h"
#include "elementwise/pooling.h"
#include "elementwise/rotary.h"
#include "elementwise/scale.h"
#include "experts/products.h"
#include "experts/route.h"
#include "isa/probe.h"
#include "lora/lora.h"
#include "matmul/matmul.h"
#include "quantized/quantized.h"
#include "sampling/logprobs.h"

#define QUIRE_NAME_OF(isa) #isa
#define QUIRE_NAME(isa) QUIRE_NAME_OF(isa)

namespace quire::QUIRE_ISA {

extern const KernelTable table;
const KernelTable table = {
    .name = QUIRE_NAME(QUIRE_ISA),
    .matmul = kMatmul,
    .quantized = kQuantized,
    .lora = kLora,
    .experts = {.route = route,
                .work_bytes = expert_work_bytes,
                .matmul = {expert_matmul<float>, expert_matmul<bf16>},
                .combine = {combine<float>, combine<bf16>}},
    .norm = kNorm,
    .pooling = kPooling,
    .activation = kActivation,
    .scale = kScale,
    .rotary = kRotary,
    .probe = kProbe,
    .attention = kAttention,
    .sampling = kSampling,
};

}  // namespace quire::QUIRE_ISA
