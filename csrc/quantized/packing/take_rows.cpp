#include "quantized/packing/take_rows.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "matmul/pack.h"
#include "runtime/thread_pool.h"

namespace quire {
namespace {

// An array [count][32 rows] of a panel.
struct Field {
  int64_t at, count, item_bytes;
};

template <size_t N>
void take_rows(const char* weight, int64_t panel_bytes, const std::array<Field, N>& fields, const int64_t* rows,
               int64_t count, char* out) {
  const int64_t num_panels = (count + kPanelColumns - 1) / kPanelColumns;
  ask_for_large_pages(out, num_panels * panel_bytes);
  auto task = [&](int64_t index, int) {
    char* panel = out + index * panel_bytes;
    std::memset(panel, 0, size_t(panel_bytes));
    const int64_t first = index * kPanelColumns, num_rows = std::min(kPanelColumns, count - first);
    for (const Field& field : fields) {
      for (int64_t j = 0; j < num_rows; ++j) {
        const int64_t row = rows[first + j], size = field.item_bytes;
        const char* from = weight + row / kPanelColumns * panel_bytes + field.at + row % kPanelColumns * size;
        char* to = panel + field.at + j * size;
        for (int64_t i = 0; i < field.count; ++i, from += kPanelColumns * size, to += kPanelColumns * size) {
          std::memcpy(to, from, size_t(size));
        }
      }
    }
  };
  parallel_for(num_panels, task);
}

}  // namespace

void take_packed_rows(const char* weight, int64_t k, int64_t element_bytes, const int64_t* rows, int64_t count,
                      char* out) {
  const int64_t units = (k * element_bytes + kUnitBytes - 1) / kUnitBytes;
  take_rows(weight, units * kUnitRowBytes, std::array{Field{0, units, kUnitBytes}}, rows, count, out);
}

void take_quantized_rows(const QuantizedShape& shape, const char* weight, const int64_t* rows, int64_t count,
                         char* out) {
  const QuantizedFormat& format = shape.format;
  const std::array fields = {
      Field{0, shape.bases(), bytes_of(format.scale)},
      Field{shape.steps_at(), shape.groups(), format.has_steps},
      Field{shape.mins_at(), shape.bases(), bytes_of(format.min)},
      Field{shape.min_steps_at(), shape.groups(), format.has_steps && format.min != Number::kNone},
      Field{shape.integers_at(), shape.blocks() * shape.block_bytes() / kUnitRowBytes, kUnitBytes},
  };
  take_rows(weight, shape.panel_bytes(), fields, rows, count, out);
  QuantizedShape own = shape;
  own.n = count;
  std::memcpy(out + own.factors_at(), weight + shape.factors_at(), size_t(shape.bytes() - shape.factors_at()));
}

}  // namespace quire
