#define QUIRE_ISA neon_i8mm
#define QUIRE_SIMD_NEON
#define QUIRE_ARM_DOT
#define QUIRE_ARM_I8MM
#include "isa/make_table.h"
