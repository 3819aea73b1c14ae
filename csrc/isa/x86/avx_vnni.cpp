#define QUIRE_ISA avx_vnni
#define QUIRE_SIMD_AVX2
#include "isa/make_table.h"
