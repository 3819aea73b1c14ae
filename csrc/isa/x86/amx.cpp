#define QUIRE_ISA amx
#define QUIRE_SIMD_AVX512
#define QUIRE_AMX
#include "isa/make_table.h"
