#define QUIRE_ISA avx512
#define QUIRE_SIMD_AVX512
#include "isa/make_table.h"
