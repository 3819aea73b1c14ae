#define QUIRE_ISA avx2
#define QUIRE_SIMD_AVX2
#include "isa/make_table.h"
