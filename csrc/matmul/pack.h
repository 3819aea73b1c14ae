// Moving weights in and out of the packed layout (matmul/layout.h), and rows out of embedding tables. Plain copies: the
// same code on every CPU. `element_bytes` is 2 (bf16) or 4 (float32).
#pragma once

#include "matmul/layout.h"

namespace quire {

// Large pages, where the system grants them: reading weights through 4 KiB pages costs a fifth of the memory bandwidth,
// and first touching them costs more than the packing.
void ask_for_large_pages(char* begin, int64_t bytes);

// Bytes of a packed [n, k] matrix.
int64_t packed_bytes(int64_t n, int64_t k, int64_t element_bytes);

// rows [n, k], each row contiguous, row_stride_bytes apart, at any alignment -> packed (64-byte aligned).
void pack(const char* rows, int64_t row_stride_bytes, int64_t n, int64_t k, int64_t element_bytes, char* packed);

// The inverse, into contiguous rows [n, k].
void unpack(const char* packed, int64_t n, int64_t k, int64_t element_bytes, char* rows);

// out [count, k] = the rows `ids` of a packed matrix. Throws std::invalid_argument for an id that is not in [0, n).
void gather_packed(const int64_t* ids, int64_t count, const char* packed, int64_t n, int64_t k, int64_t element_bytes,
                   char* out);

// The same from a plain table of n rows of row_bytes.
void gather_rows(const int64_t* ids, int64_t count, const char* table, int64_t n, int64_t row_bytes, char* out);

}  // namespace quire
