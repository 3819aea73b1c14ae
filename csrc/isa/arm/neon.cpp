#define QUIRE_ISA neon
#define QUIRE_SIMD_NEON
#include "isa/make_table.h"
