#include "base/binding.h"
#include "runtime/kernel_graph.h"

namespace quire {

void bind_graph(nb::module_& module) {
  nb::class_<KernelGraph>(module, "KernelGraph")
      .def(nb::init<>())
      .def("begin", &KernelGraph::begin)
      .def("end", [](KernelGraph&) { KernelGraph::recording() = nullptr; })
      .def("add",  // a call of Python's, between those of kernels
           [](KernelGraph& graph, nb::object call) {
             graph.add([call = std::move(call)] {
               const nb::gil_scoped_acquire lock;
               call();
             });
           })
      .def("__len__", &KernelGraph::size)
      .def("replay", &KernelGraph::replay, Unlocked());
}

}  // namespace quire
