#include "ranks/wire.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <stdexcept>
#include <string>
#include <system_error>

namespace quire {
namespace {

constexpr std::chrono::microseconds kSpin{50};  // before sleeping
constexpr int kTickMs = 100;
constexpr std::chrono::seconds kLast{1};  // for what is sent when ranks are stopped

// The number of bytes that a call has moved; 0 if it would have to wait.
size_t moved(ssize_t result) {
  if (result >= 0) return size_t(result);
  if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return 0;
  throw std::runtime_error("another machine cannot be reached: " + std::generic_category().message(errno));
}

}  // namespace

Wire::Wire(const std::vector<int>& sockets, int first, int own, int count, int64_t most_bytes,
           std::atomic<uint32_t>& is_stopped)
    : first_(first), own_(own), count_(count), most_bytes_(most_bytes), is_stopped_(is_stopped) {
  for (const int socket : sockets) peers_.push_back(Peer{.socket = socket});
}

void Wire::exchange(const Pieces& pieces, int64_t patience) {
  const std::lock_guard lock(mutex_);
  const bool is_first = first_ == 0;
  for (Peer& peer : peers_) {
    for (int r = first_; r < first_ + own_ && (pieces.for_all || !is_first); ++r) {
      peer.out.push_back({{epoch_, r, pieces.number, 0, pieces.tag, uint64_t(pieces.num_bytes(r))}, pieces.place(r)});
    }
    peer.num_missing = is_first ? own_ : pieces.for_all ? count_ - own_ : 0;
  }
  std::vector<pollfd> polled(peers_.size());
  try {
    auto since = std::chrono::steady_clock::now();
    for (int64_t ticks = 0;;) {
      bool is_done = true, has_moved = false;
      for (Peer& peer : peers_) {
        has_moved |= send(peer);
        while (peer.num_missing > 0 && receive(peer, pieces)) has_moved = true;
      }
      for (size_t i = 0; i < peers_.size(); ++i) {
        const bool sends = !peers_[i].out.empty(), receives = peers_[i].num_missing > 0;
        is_done &= !sends && !receives;
        polled[i] = {sends || receives ? peers_[i].socket : -1, short((sends ? POLLOUT : 0) | (receives ? POLLIN : 0)),
                     0};
      }
      if (is_done) return;
      if (is_stopped_.load() != 0) throw std::runtime_error("the ranks were stopped");
      const auto now = std::chrono::steady_clock::now();
      if (has_moved) {
        since = now;
        ticks = 0;
      } else if (now - since > kSpin && poll(polled.data(), nfds_t(polled.size()), kTickMs) == 0 &&
                 ++ticks >= patience && patience > 0) {
        throw std::runtime_error("another machine made no progress for " + std::to_string(patience / 10) + " s");
      }
    }
  } catch (...) {
    tell();
    throw;
  }
}

// Sends what can be sent without waiting. Returns whether anything was.
bool Wire::send(Peer& peer) {
  bool has_moved = false;
  while (!peer.out.empty()) {
    Part& part = peer.out.front();
    const size_t in_header = std::min(part.num_sent, sizeof(Header)), in_data = part.num_sent - in_header;
    iovec parts[2] = {{reinterpret_cast<char*>(&part.header) + in_header, sizeof(Header) - in_header},
                      {const_cast<char*>(part.data) + in_data, size_t(part.header.num_bytes) - in_data}};
    msghdr message = {};
    message.msg_iov = parts;
    message.msg_iovlen = 2;
    const int more = peer.out.size() > 1 ? MSG_MORE : 0;
    const size_t count = moved(sendmsg(peer.socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL | more));
    part.num_sent += count;
    has_moved |= count > 0;
    if (part.num_sent < sizeof(Header) + part.header.num_bytes) return has_moved;
    peer.out.pop_front();
  }
  return has_moved;
}

// Receives what has come of the next part, at most all of it. Returns whether anything had.
bool Wire::receive(Peer& peer, const Pieces& pieces) {
  if (peer.is_complete()) end(peer, pieces);  // of a header that stopped the ranks
  char dropped[16384];
  const bool in_header = peer.num_received < sizeof(Header);
  const size_t done = in_header ? peer.num_received : peer.num_received - sizeof(Header);
  const size_t left = (in_header ? sizeof(Header) : size_t(peer.in.num_bytes)) - done;
  char* const to = in_header ? reinterpret_cast<char*>(&peer.in) + done : peer.into ? peer.into + done : dropped;
  const size_t wanted = to == dropped ? std::min(left, sizeof(dropped)) : left;
  const ssize_t result = recv(peer.socket, to, wanted, MSG_DONTWAIT);
  if (result == 0) throw std::runtime_error("another machine has closed its connection");
  const size_t count = moved(result);
  peer.num_received += count;
  if (in_header && count == left) peer.into = begin(peer, pieces);
  if (peer.is_complete()) end(peer, pieces);
  return count > 0;
}

// A header has come: checks it. Returns where what follows belongs, null for nowhere.
char* Wire::begin(const Peer& peer, const Pieces& pieces) {
  const Header& in = peer.in;
  if (in.epoch > epoch_ || in.num_bytes > uint64_t(most_bytes_))
    throw std::runtime_error("another machine sends nonsense");
  if (in.epoch < epoch_) return nullptr;
  if (in.rank < 0) {
    is_stopped_.store(1);
    throw std::runtime_error("the ranks were stopped");
  }
  if (in.rank >= count_ || is_own(in.rank) || in.number != pieces.number || in.tag != pieces.tag ||
      in.num_bytes != uint64_t(pieces.num_bytes(in.rank))) {
    throw std::runtime_error("rank " + std::to_string(in.rank) + " computes something else");
  }
  return pieces.place(in.rank);
}

// All of a part has come. Machine 0 passes it on.
void Wire::end(Peer& peer, const Pieces& pieces) {
  peer.num_received = 0;
  if (peer.into == nullptr) return;
  --peer.num_missing;
  for (Peer& other : peers_) {
    if (first_ == 0 && pieces.for_all && &other != &peer) other.out.push_back({peer.in, peer.into});
  }
}

void Wire::tell() noexcept {
  if (has_told_) return;
  has_told_ = true;
  for (Peer& peer : peers_) {
    try {
      while (peer.out.size() > 1 || (!peer.out.empty() && peer.out.back().num_sent == 0)) peer.out.pop_back();
      peer.out.push_back({{epoch_, -1, 0, 0, 0, 0}, nullptr});
      const auto end = std::chrono::steady_clock::now() + kLast;
      while (send(peer), !peer.out.empty() && std::chrono::steady_clock::now() < end) {
        pollfd polled = {peer.socket, POLLOUT, 0};
        poll(&polled, 1, kTickMs);
      }
    } catch (const std::exception&) {  // it is gone: its messages end, too
      peer.out.clear();
    }
  }
}

void Wire::stop() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (lock) tell();
}

void Wire::restart() {
  const std::lock_guard lock(mutex_);
  ++epoch_;
  has_told_ = false;
  for (Peer& peer : peers_) {
    while (peer.out.size() > 1 || (!peer.out.empty() && peer.out.back().num_sent == 0)) peer.out.pop_back();
    peer.into = nullptr;
  }
}

}  // namespace quire
