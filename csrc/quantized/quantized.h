// The kernels on quantized weights, as the table of a variant has them.
#pragma once

#include "quantized/gather.h"
#include "quantized/matmul.h"
#include "quantized/packing/quantize.h"

namespace quire::QUIRE_ISA {

static constexpr QuantizedTable kQuantized = {
    .rows_bytes = quantized_rows_bytes,
    .quantize = {{quantize<8, float>, quantize<8, bf16>}, {quantize<4, float>, quantize<4, bf16>}},
    .matmul = {quantized_matmul<float>, quantized_matmul<bf16>},
    .gather = {gather_quantized<float>, gather_quantized<bf16>},
};

}  // namespace quire::QUIRE_ISA
