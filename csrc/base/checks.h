// Checks of values, such as ids. They are made in each call, since values change from one replay of a recording to the
// next; the Python wrappers have checked shapes, strides and dtypes.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace quire {

// Throws std::invalid_argument unless each of `count` ids, `stride` apart, is in [first, limit).
inline void check_range(const char* what, const int64_t* ids, int64_t count, int64_t limit, int64_t stride = 1,
                        int64_t first = 0) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t id = ids[i * stride];
    if (id < first || id >= limit) {
      throw std::invalid_argument(std::string(what) + " " + std::to_string(id) + " is not in [" +
                                  std::to_string(first) + ", " + std::to_string(limit) + ")");
    }
  }
}

}  // namespace quire
