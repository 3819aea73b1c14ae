// A forward pass as a list of kernel calls, recorded and then replayed without the interpreter in between, as CUDA
// graphs are. A replay reads and writes the addresses of the recording; what is new lies there before it starts.
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

  // Makes it what this thread's kernel calls are recorded into. They run meanwhile only if `runs`.
  void begin(bool runs) {
    runs_ = runs;
    recording() = this;
  }

  bool runs() const { return runs_; }

  void add(std::function<void()> call) { calls_.push_back(std::move(call)); }

  void replay() const {
    for (const auto& call : calls_) call();
  }

  size_t size() const { return calls_.size(); }

 private:
  std::vector<std::function<void()>> calls_;
  bool runs_ = false;
};

}  // namespace quire
