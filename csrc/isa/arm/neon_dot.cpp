#define QUIRE_ISA neon_dot
#define QUIRE_SIMD_NEON
#define QUIRE_ARM_DOT
#include "isa/make_table.h"
