// Rows of a batch, grouped by the experts they go to.
#pragma once

#include <cstdint>

namespace quire {

constexpr int64_t kMostExperts = 1024;  // of a layer

// Sorts `count` pairs of a token and an expert, ids [count], by expert, and within one by index. starts
// [num_experts + 1]: where the pairs of each expert begin; pairs [count]: their indices in that order; places [count]:
// the place of each pair in it. Throws std::invalid_argument for an id that is not in [0, num_experts).
void group_by_expert(const int32_t* ids, int64_t count, int64_t num_experts, int32_t* starts, int32_t* pairs,
                     int32_t* places);

}  // namespace quire
