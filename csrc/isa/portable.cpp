#define QUIRE_ISA portable
#include "isa/make_table.h"
