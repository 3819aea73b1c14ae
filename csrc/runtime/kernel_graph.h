// A forward pass as a list of kernel calls, recorded while it runs and replayed without the interpreter in between, as
// CUDA graphs are. A replay reads and writes the addresses of the recording; what is new lies there before it starts.
#pragma once

#include <functional>
#include <utility>
#include <vector>

namespace quire {

class KernelGraph {
 public:
  // What this thread's kernel calls are recorded into; null: nothing.
  static KernelGraph*& recording() {
    static thread_local KernelGraph* graph = nullptr;
    return graph;
  }

  void add(std::function<void()> call) { calls_.push_back(std::move(call)); }

  void replay() const {
    for (const auto& call : calls_) call();
  }

  size_t size() const { return calls_.size(); }

 private:
  std::vector<std::function<void()>> calls_;
};

}  // namespace quire
