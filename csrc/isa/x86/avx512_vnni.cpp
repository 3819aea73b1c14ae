#define QUIRE_ISA avx512_vnni
#define QUIRE_SIMD_AVX512
#include "isa/make_table.h"
