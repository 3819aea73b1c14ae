#include "experts/grouping.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace quire {

void group_by_expert(const int32_t* ids, int64_t count, int64_t num_experts, int32_t* starts, int32_t* pairs,
                     int32_t* places) {
  std::fill_n(starts, num_experts + 1, 0);
  for (int64_t i = 0; i < count; ++i) {
    if (ids[i] < 0 || ids[i] >= num_experts) {
      throw std::invalid_argument("group_by_expert: expert " + std::to_string(ids[i]) + " is not in [0, " +
                                  std::to_string(num_experts) + ")");
    }
    ++starts[ids[i] + 1];
  }
  for (int64_t e = 0; e < num_experts; ++e) starts[e + 1] += starts[e];
  // starts[e] moves on as the pairs of e get their places, to where those of e + 1 begin.
  for (int64_t i = 0; i < count; ++i) {
    places[i] = starts[ids[i]]++;
    pairs[places[i]] = int32_t(i);
  }
  std::copy_backward(starts, starts + num_experts, starts + num_experts + 1);
  starts[0] = 0;
}

}  // namespace quire
