#define QUIRE_ISA sve256
#define QUIRE_SIMD_SVE
#define QUIRE_ARM_DOT
#define QUIRE_ARM_I8MM
#include "isa/make_table.h"
