// A forward pass as a list of kernel calls, recorded and then replayed without the interpreter in between, as CUDA
// graphs are. A replay reads and writes the addresses of the recording; what is new lies there before it starts.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/kernel_table.h"

namespace quire {

struct Memory {
  const void* at;
  int64_t bytes;

  bool overlaps(const Memory& other) const {
    const auto begin = reinterpret_cast<uintptr_t>(at), others = reinterpret_cast<uintptr_t>(other.at);
    return begin < others + uintptr_t(other.bytes) && others < begin + uintptr_t(bytes);
  }
};

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

  void add(std::function<void()> call) {
    calls_.push_back(std::move(call));
    offered_.reset();
  }

  // The call that was added last is a norm, which the next one may compute itself.
  void offer_norm(const NormArgs& norm) { offered_ = norm; }

  // Removes the norm that was added last and returns it, if it makes x [rows, width], and a call that writes to
  // `written` may compute one row after the other: nothing that they are made of lies there.
  std::optional<NormArgs> take_norm(const Memory& x, int64_t rows, int64_t width, std::span<const Memory> written) {
    if (!offered_ || offered_->out != x.at || offered_->rows != rows || offered_->width != width) return {};
    for (const Memory& each : written) {
      if (each.overlaps({offered_->x, x.bytes}) || each.overlaps({offered_->residual, x.bytes})) return {};
    }
    calls_.pop_back();
    return std::exchange(offered_, {});
  }

  void replay() const {
    for (const auto& call : calls_) call();
  }

  size_t size() const { return calls_.size(); }

 private:
  std::vector<std::function<void()>> calls_;
  std::optional<NormArgs> offered_;
  bool runs_ = false;
};

}  // namespace quire
