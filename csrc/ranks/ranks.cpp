#include "ranks/ranks.h"

#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

namespace quire {
namespace {

constexpr std::chrono::microseconds kSpin{20};    // without giving the CPU away
constexpr std::chrono::microseconds kYield{500};  // before sleeping
constexpr int64_t kParallelBytes = 128 * 1024;    // of a copy that is worth waking threads for
constexpr long kTickNs = 100'000'000;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Sleeps while the word is `seen`, at most a tick. Returns whether the tick is over.
bool sleep_while(std::atomic<uint32_t>& word, uint32_t seen) {
#if defined(__linux__)
  const timespec tick = {0, kTickNs};
  return syscall(SYS_futex, &word, FUTEX_WAIT, seen, &tick, nullptr, 0) != 0 && errno == ETIMEDOUT;
#else
  for (long ns = 0; ns < kTickNs && word.load() == seen; ns += 100'000) usleep(100);
  return word.load() == seen;
#endif
}

void wake(std::atomic<uint32_t>& word) {
#if defined(__linux__)
  syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
#endif
}

int64_t file_bytes(int file) {
  struct stat found;
  return fstat(file, &found) == 0 ? int64_t(found.st_size) : 0;
}

// Calls copy(begin, end) for ranges of rows that together cover [begin, end).
template <typename Copy>
void for_row_ranges(int64_t begin, int64_t end, int64_t row_bytes, const Copy& copy) {
  if ((end - begin) * row_bytes < 2 * kParallelBytes) {
    copy(begin, end);
    return;
  }
  const int64_t step = std::max<int64_t>(1, kParallelBytes / row_bytes);
  auto task = [&](int64_t index, int) { copy(begin + index * step, std::min(end, begin + (index + 1) * step)); };
  parallel_for((end - begin + step - 1) / step, task);
}

}  // namespace

struct RankGroup::Header {
  alignas(64) std::atomic<uint32_t> is_stopped;
};

// Pieces written and read so far, each with the number of ranks that sleep until it changes.
struct RankGroup::Post {
  alignas(64) std::atomic<uint32_t> head;
  std::atomic<uint32_t> head_sleepers;
  uint64_t tags[2];
  alignas(64) std::atomic<uint32_t> tail;
  std::atomic<uint32_t> tail_sleepers;
};

int64_t RankGroup::memory_bytes(int count, int64_t slot_bytes) {
  return int64_t(sizeof(Header)) + count * (int64_t(sizeof(Post)) + 2 * slot_bytes);
}

RankGroup::RankGroup(int file, int rank, int count, int64_t slot_bytes, int64_t patience, int first, int own,
                     const std::vector<int>& sockets)
    : size_(file_bytes(file)),
      rank_(rank),
      count_(count),
      parent_(getppid()),
      first_(first),
      own_(own),
      slot_bytes_(slot_bytes),
      patience_(patience) {
  static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4);
  void* memory = mmap(nullptr, size_t(size_), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED || size_ < memory_bytes(count, slot_bytes)) {
    throw std::runtime_error("the memory that ranks share cannot be mapped");
  }
  memory_ = static_cast<char*>(memory);
  if (!sockets.empty()) {
    auto& is_stopped = reinterpret_cast<Header*>(memory_)->is_stopped;
    wire_ = std::make_unique<Wire>(sockets, first, own, count, slot_bytes, is_stopped);
  }
}

RankGroup::~RankGroup() { munmap(memory_, size_t(size_)); }

RankGroup::Post& RankGroup::post(int rank) const { return reinterpret_cast<Post*>(memory_ + sizeof(Header))[rank]; }

char* RankGroup::slot(int rank, uint32_t piece) const {
  return memory_ + sizeof(Header) + size_t(count_) * sizeof(Post) + (2 * rank + int(piece % 2)) * slot_bytes_;
}

void RankGroup::wait(std::atomic<uint32_t>& word, std::atomic<uint32_t>& sleepers, uint32_t least, int rank) const {
  const std::atomic<uint32_t>& is_stopped = reinterpret_cast<Header*>(memory_)->is_stopped;
  const auto is_ready = [&] {  // a rank that reads nothing may be three pieces ahead
    const int32_t ahead = int32_t(word.load(std::memory_order_acquire) - least);
    if (ahead > 3) throw std::runtime_error("rank " + std::to_string(rank) + " is out of step");
    return ahead >= 0;
  };
  const auto start = std::chrono::steady_clock::now();
  for (auto now = start; now - start < kYield; now = std::chrono::steady_clock::now()) {
    for (int i = 0; i < 64; ++i) {
      if (is_ready()) return;
      pause();
    }
    if (is_stopped.load(std::memory_order_relaxed) != 0) break;
    if (now - start > kSpin) sched_yield();
  }
  for (int64_t ticks = 0;;) {
    sleepers.fetch_add(1);
    const uint32_t seen = word.load();
    const bool is_over = int32_t(seen - least) < 0 && is_stopped.load() == 0 && sleep_while(word, seen);
    sleepers.fetch_sub(1);
    if (is_ready()) return;
    if (is_stopped.load() != 0) throw std::runtime_error("the ranks were stopped");
    if (getppid() != parent_) throw std::runtime_error("the process of rank 0 has ended");
    ticks += is_over;
    if (patience_ > 0 && ticks >= patience_) {
      throw std::runtime_error("rank " + std::to_string(rank) + " made no progress for " +
                               std::to_string(patience_ / 10) + " s");
    }
  }
}

void RankGroup::wait_for_piece(int rank, uint64_t tag) const {
  wait(post(rank).head, post(rank).head_sleepers, piece_ + 1, rank);
  if (post(rank).tags[piece_ % 2] != tag) {
    throw std::runtime_error("rank " + std::to_string(rank) + " computes something else");
  }
}

void RankGroup::cross(const Rows& rows, int64_t count) {
  for (int r = first_ + 1; r < first_ + own_; ++r) wait_for_piece(r, rows.tag);
  auto place = [&](int r) { return slot(r, piece_); };
  auto num_bytes = [&](int r) { return count * rows.row_bytes(r); };
  wire_->exchange({piece_, rows.tag, !rows.first_only, place, num_bytes}, patience_);
  for (int r = 0; r < count_; ++r) {
    if (first_ <= r && r < first_ + own_) continue;
    Post& its = post(r);
    its.tags[piece_ % 2] = rows.tag;
    for (auto [word, sleepers] : {std::pair(&its.head, &its.head_sleepers), std::pair(&its.tail, &its.tail_sleepers)}) {
      word->store(piece_ + 1);
      if (sleepers->load() > 0) wake(*word);
    }
  }
}

void RankGroup::exchange(Rows rows, FunctionRef<void(int64_t, int64_t, char*)> write,
                         FunctionRef<void(int, int64_t, int64_t, const char*)> read) {
  if (rows.most_bytes > slot_bytes_) throw std::runtime_error("a row is larger than what ranks share");
  rows.tag ^= pass_ * 0x9E3779B97F4A7C15u;  // odd: no two passes have the same product
  const bool reads = rank_ == 0 || !rows.first_only;
  const int64_t step = std::max<int64_t>(1, slot_bytes_ / std::max<int64_t>(1, rows.most_bytes));
  for (int64_t begin = 0; begin < rows.count; begin += step) {
    const int64_t end = std::min(rows.count, begin + step);
    for (int r = 0; r < count_; ++r) {  // of the piece before the last
      if (r != rank_) wait(post(r).tail, post(r).tail_sleepers, piece_ - 1, r);
    }
    Post& own = post(rank_);
    write(begin, end, slot(rank_, piece_));
    own.tags[piece_ % 2] = rows.tag;
    own.head.store(piece_ + 1);
    if (own.head_sleepers.load() > 0) wake(own.head);
    if (wire_) cross(rows, end - begin);
    for (int i = 1; reads && i < count_; ++i) {
      const int r = (rank_ + i) % count_;
      wait_for_piece(r, rows.tag);
      read(r, begin, end, slot(r, piece_));
    }
    own.tail.store(piece_ + 1);
    if (own.tail_sleepers.load() > 0) wake(own.tail);
    ++piece_;
  }
}

void RankGroup::gather(const char* x, int64_t rows, const int64_t* bounds, char* out, int64_t stride, bool first_only) {
  const auto copy_to_out = [&](int r, int64_t begin, int64_t end, const char* from) {
    const int64_t bytes = bounds[r + 1] - bounds[r];
    for_row_ranges(begin, end, bytes, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        std::memcpy(out + row * stride + bounds[r], from + (row - begin) * bytes, size_t(bytes));
      }
    });
  };
  auto row_bytes = [&](int r) { return bounds[r + 1] - bounds[r]; };
  const int64_t own_bytes = row_bytes(rank_);
  int64_t most = 0;
  for (int r = 0; r < count_; ++r) most = std::max(most, row_bytes(r));
  auto write = [&](int64_t begin, int64_t end, char* to) {
    if (rank_ != 0 || !first_only) {
      for_row_ranges(begin, end, own_bytes, [&](int64_t first, int64_t last) {
        std::memcpy(to + (first - begin) * own_bytes, x + first * own_bytes, size_t((last - first) * own_bytes));
      });
    }
  };
  auto read = [&](int r, int64_t begin, int64_t end, const char* from) { copy_to_out(r, begin, end, from); };
  const uint64_t tag = uint64_t(rows) << 40 ^ uint64_t(bounds[count_]) << 1 ^ uint64_t(first_only);
  exchange({rows, most, tag, first_only, row_bytes}, write, read);
  if (rank_ == 0 || !first_only) copy_to_out(rank_, 0, rows, x);
}

void RankGroup::select(const char* x, int64_t rows, int64_t row_bytes, const int64_t* ids, const int64_t* bounds,
                       char* out) {
  const auto copy_of = [&](int r, int64_t begin, int64_t end, const char* from, char* to) {
    for (int64_t row = begin; row < end; ++row, from += row_bytes, to += row_bytes) {
      if (bounds[r] <= ids[row] && ids[row] < bounds[r + 1]) std::memcpy(to, from, size_t(row_bytes));
    }
  };
  auto write = [&](int64_t begin, int64_t end, char* to) {
    copy_of(rank_, begin, end, x + begin * row_bytes, to);
    copy_of(rank_, begin, end, x + begin * row_bytes, out + begin * row_bytes);
  };
  auto read = [&](int r, int64_t begin, int64_t end, const char* from) {
    copy_of(r, begin, end, from, out + begin * row_bytes);
  };
  auto any_bytes = [&](int) { return row_bytes; };
  exchange({rows, row_bytes, ~(uint64_t(rows) << 40 ^ uint64_t(row_bytes)), false, any_bytes}, write, read);
}

void RankGroup::gather_expert_rows(char* x, int64_t row_bytes, const int32_t* starts, const int64_t* bounds) {
  int64_t most = 0;
  for (int r = 0; r < count_; ++r) most = std::max<int64_t>(most, starts[bounds[r + 1]] - starts[bounds[r]]);
  const auto move = [&](int r, int64_t begin, int64_t end, auto copy) {  // of its rows [begin, end), those that exist
    const int64_t first = starts[bounds[r]], count = starts[bounds[r + 1]] - first;
    for_row_ranges(begin, std::max(begin, std::min(end, count)), row_bytes, [&](int64_t row, int64_t last) {
      copy(x + (first + row) * row_bytes, (row - begin) * row_bytes, size_t((last - row) * row_bytes));
    });
  };
  auto write = [&](int64_t begin, int64_t end, char* to) {
    move(rank_, begin, end, [&](char* own, int64_t at, size_t bytes) { std::memcpy(to + at, own, bytes); });
  };
  auto read = [&](int r, int64_t begin, int64_t end, const char* from) {
    move(r, begin, end, [&](char* its, int64_t at, size_t bytes) { std::memcpy(its, from + at, bytes); });
  };
  auto any_bytes = [&](int) { return row_bytes; };
  exchange({most, row_bytes, ~(uint64_t(most) << 40 ^ uint64_t(row_bytes) << 1 ^ 1), false, any_bytes}, write, read);
}

void RankGroup::stop() {
  reinterpret_cast<Header*>(memory_)->is_stopped.store(1);
  for (int r = 0; r < count_; ++r) {
    wake(post(r).head);
    wake(post(r).tail);
  }
  if (wire_) wire_->stop();
}

void RankGroup::restart() {
  piece_ = 0;
  pass_ = 0;
  if (rank_ != first_) return;
  if (wire_) wire_->restart();
  for (int r = 0; r < count_; ++r) {
    post(r).head.store(0);
    post(r).tail.store(0);
  }
  reinterpret_cast<Header*>(memory_)->is_stopped.store(0);
}

}  // namespace quire
