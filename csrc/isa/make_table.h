// Gathers the kernels of the variant being compiled into its table. Included last by each isa/<name>.cpp.
#pragma once

#include "activation.h"
#include "attention.h"
#include "kernel_table.h"
#include "matmul.h"
#include "norm.h"
#include "probe.h"
#include "quantize.h"
#include "rotary.h"
#include "sampling_logprobs.h"

#define QUIRE_NAME_OF(isa) #isa
#define QUIRE_NAME(isa) QUIRE_NAME_OF(isa)

namespace quire::QUIRE_ISA {

extern const KernelTable table;
const KernelTable table = {
    .name = QUIRE_NAME(QUIRE_ISA),
    .matmul = kMatmul,
    .quantized = kQuantized,
    .norm = kNorm,
    .activation = kActivation,
    .rotary = kRotary,
    .probe = kProbe,
    .attention = kAttention,
    .sampling = kSampling,
};

}  // namespace quire::QUIRE_ISA
