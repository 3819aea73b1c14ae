// Processes that compute one forward pass together, and the memory in which they show each other what they computed.
//
// Each rank makes the same calls in the same order. What a call moves goes through two slots of each rank, piece by
// piece: a rank writes a piece, says so in `head`, reads those of the others, and says in `tail` that it has. So a slot
// is written again only after all have read it, and nothing but the pieces is ever copied. A rank that waits spins,
// then yields its CPU, then sleeps, so that ranks which share a CPU come on too.
//
// What is behind the slots in the memory is for callers: results that ranks write where all read them. A call that
// moves no bytes is a meeting of the ranks.
//
// Ranks of other machines have slots here too. The first rank of a machine sends them what this machine's ranks wrote,
// fills their slots with what comes, and then writes their counters, so the others need not know where a rank is.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "ranks/wire.h"
#include "runtime/thread_pool.h"

namespace quire {

class RankGroup {
 public:
  // Maps the memory of the file, of at least memory_bytes(count, slot_bytes) zeros. A slot holds the largest row of a
  // part. A rank that waits `patience` tenths of a second for another one throws std::runtime_error; 0: it waits for
  // ever. The ranks [first, first + own) are on this machine, and `sockets` lead its first rank to the others, as Wire
  // says.
  RankGroup(int file, int rank, int count, int64_t slot_bytes, int64_t patience, int first, int own,
            const std::vector<int>& sockets);
  ~RankGroup();
  RankGroup(const RankGroup&) = delete;
  RankGroup& operator=(const RankGroup&) = delete;

  static int64_t memory_bytes(int count, int64_t slot_bytes);

  // The memory of the file, all of it.
  char* memory() const { return memory_; }
  int64_t size() const { return size_; }

  // x [rows, own part] contiguous -> out [rows, all parts], rows `stride` bytes apart; the part of rank r is the bytes
  // [bounds[r], bounds[r + 1]) of a row. With `first_only` rank 0 alone gets them.
  void gather(const char* x, int64_t rows, const int64_t* bounds, char* out, int64_t stride, bool first_only);

  // x [rows, row_bytes] -> out, as large: row i is that of the rank r with bounds[r] <= ids[i] < bounds[r + 1].
  void select(const char* x, int64_t rows, int64_t row_bytes, const int64_t* ids, const int64_t* bounds, char* out);

  // x: rows of row_bytes; those of expert e are [starts[e], starts[e + 1]). Rank r has written those of the experts
  // [bounds[r], bounds[r + 1]), and gets all others.
  void gather_expert_rows(char* x, int64_t row_bytes, const int32_t* starts, const int64_t* bounds);

  // The calls from here on are of another pass. Ranks that are in different ones throw std::runtime_error instead of
  // taking the parts of one for those of the other, which may be as large.
  void begin() { ++pass_; }

  // From now on all ranks throw std::runtime_error instead of waiting.
  void stop();

  // This rank begins anew, and if it is its machine's first, all memory too: after stop(), while no rank is in a call.
  void restart();

 private:
  struct Header;
  struct Post;

  Post& post(int rank) const;
  char* slot(int rank, uint32_t piece) const;
  void wait(std::atomic<uint32_t>& word, std::atomic<uint32_t>& sleepers, uint32_t least, int rank) const;

  // What a call moves. A rank's part of a row has row_bytes(rank), at most `most_bytes`. With `first_only` rank 0 alone
  // reads. All ranks must give the same `tag`.
  struct Rows {
    int64_t count, most_bytes;
    uint64_t tag;
    bool first_only;
    FunctionRef<int64_t(int)> row_bytes;
  };

  // Moves rows in pieces: write(begin, end, slot) fills the own slot, and read(rank, begin, end, slot) takes what that
  // rank wrote, unless this rank reads nothing.
  void exchange(Rows rows, FunctionRef<void(int64_t, int64_t, char*)> write,
                FunctionRef<void(int, int64_t, int64_t, const char*)> read);

  // Waits until a rank has written the piece. Throws std::runtime_error if it computes something else.
  void wait_for_piece(int rank, uint64_t tag) const;

  // Exchanges a piece of `count` rows with other machines.
  void cross(const Rows& rows, int64_t count);

  char* memory_;
  const int64_t size_;
  const int rank_, count_, parent_, first_, own_;
  const int64_t slot_bytes_, patience_;
  uint32_t piece_ = 0;
  uint64_t pass_ = 0;
  std::unique_ptr<Wire> wire_;  // of the first rank of several machines
};

}  // namespace quire
