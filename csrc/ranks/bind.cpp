#include <nanobind/stl/vector.h>

#include <algorithm>

#include "base/binding.h"
#include "base/checks.h"
#include "ranks/ranks.h"

namespace quire {

// The calls of a group are kernels: a recording keeps them, and the group must live as long as it.
void bind_ranks(nb::module_& module) {
  nb::class_<RankGroup>(module, "RankGroup")
      .def(nb::init<int, int, int, int64_t, int64_t, int, int, const std::vector<int>&>())
      .def_prop_ro("address", [](RankGroup& group) { return reinterpret_cast<uintptr_t>(&group); })
      .def_prop_ro("memory", [](RankGroup& group) { return reinterpret_cast<uintptr_t>(group.memory()); })
      .def_prop_ro("size", &RankGroup::size)
      .def("stop", &RankGroup::stop)
      .def("begin", &RankGroup::begin)
      .def("restart", &RankGroup::restart);
  module.def("rank_memory_bytes", &RankGroup::memory_bytes);
  add_kernel(
      module, "gather_parts",
      +[](void* group, const char* x, int64_t rows, const int64_t* bounds, char* out, int64_t stride, bool first_only) {
        static_cast<RankGroup*>(group)->gather(x, rows, bounds, out, stride, first_only);
      });
  add_kernel(
      module, "select_rows",
      +[](void* group, const char* x, int64_t rows, int64_t row_bytes, const int64_t* ids, const int64_t* bounds,
          char* out) { static_cast<RankGroup*>(group)->select(x, rows, row_bytes, ids, bounds, out); });
  add_kernel(
      module, "gather_expert_rows",
      +[](void* group, char* x, int64_t row_bytes, const int32_t* starts, const int64_t* bounds) {
        static_cast<RankGroup*>(group)->gather_expert_rows(x, row_bytes, starts, bounds);
      });
  // gated_activation of the rows [starts[0], starts[num_experts]) alone.
  add_kernel(
      module, "gated_expert_rows",
      +[](int dtype, int kind, float a, float b, float c, const char* x, const int32_t* starts, int64_t num_experts,
          int64_t width, char* out) {
        const int64_t first = starts[0], bytes = width * (dtype == kFloat32 ? int64_t(sizeof(float)) : 2);
        kernels().activation.gated_activation[dtype]({kind, {a, b, c}}, x + first * 2 * bytes,
                                                     starts[num_experts] - first, width, out + first * bytes, width);
      });
  // The index of each id in the rows [first, first + n) of a table of `limit`; some index for those beyond.
  add_kernel(
      module, "own_rows",
      +[](const int64_t* ids, int64_t count, int64_t limit, int64_t first, int64_t n, int64_t* out) {
        check_range("embedding: token id", ids, count, limit);
        for (int64_t i = 0; i < count; ++i) out[i] = std::clamp<int64_t>(ids[i] - first, 0, n - 1);
      });
}

}  // namespace quire
