// The connections of a machine with the others whose ranks compute the same forward pass.
//
// Machine 0 is connected with all others, which are connected with it alone: it passes on to each what the others have
// computed. One rank of each machine sends and receives for all of them, in the call in which they wait for it.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

#include "runtime/thread_pool.h"

namespace quire {

class Wire {
 public:
  // What crosses in one exchange: for each rank, where its part is or belongs, and how many bytes it has.
  struct Pieces {
    uint32_t number;
    uint64_t tag;
    bool for_all;  // and not for machine 0 alone
    FunctionRef<char*(int)> place;
    FunctionRef<int64_t(int)> num_bytes;
  };

  // `first` and `own`: the ranks of this machine, of `count`. `sockets`: of the machines after machine 0, each of which
  // has as many ranks; or of machine 0. `is_stopped` ends what waits. No part is larger than `most_bytes`.
  Wire(const std::vector<int>& sockets, int first, int own, int count, int64_t most_bytes,
       std::atomic<uint32_t>& is_stopped);

  // Sends the parts of this machine's ranks, and receives those of all others. Throws std::runtime_error if ranks are
  // stopped anywhere, a connection ends, or nothing comes for `patience` tenths of a second (0: waits for ever).
  void exchange(const Pieces& pieces, int64_t patience);

  // Lets the other machines know that ranks have been stopped: now, or if exchange() runs, at its end.
  void stop();

  // Drops what is still to come from before. After stop(), while no machine is in exchange().
  void restart();

 private:
  struct Header {
    uint32_t epoch;  // restarts before it was sent
    int32_t rank;    // -1: ranks have been stopped
    uint32_t number, unused;
    uint64_t tag, num_bytes;
  };
  struct Part {
    Header header;
    const char* data;
    size_t num_sent = 0;
  };
  struct Peer {
    int socket;
    std::deque<Part> out = {};
    int num_missing = 0;
    Header in = {};
    size_t num_received = 0;  // of the header and of what follows it
    char* into = nullptr;     // where that belongs; nothing needs it if this is null
    bool is_complete() const { return num_received >= sizeof(Header) && num_received == sizeof(Header) + in.num_bytes; }
  };

  bool send(Peer& peer);
  bool receive(Peer& peer, const Pieces& pieces);
  char* begin(const Peer& peer, const Pieces& pieces);
  void end(Peer& peer, const Pieces& pieces);
  bool is_own(int rank) const { return first_ <= rank && rank < first_ + own_; }
  void tell() noexcept;

  const int first_, own_, count_;
  const int64_t most_bytes_;
  std::atomic<uint32_t>& is_stopped_;
  std::vector<Peer> peers_;
  std::mutex mutex_;  // of all below, and of the peers
  uint32_t epoch_ = 0;
  bool has_told_ = false;
};

}  // namespace quire
