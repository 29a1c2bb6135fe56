// Places where a test may kill the process: FAULT_POINT("take.taken") stands between two steps whose
// order matters to surviving processes. Compiled away unless TRANSPORT_FAULT_POINTS is defined.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <string_view>

#ifdef TRANSPORT_FAULT_POINTS
#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstdio>

#include <unistd.h>
#endif

namespace transport::fault {

inline constexpr std::array<std::string_view, 57> kPoints{
    "create.opened",         // the file exists, in /dev/shm without a name where that can be, without a keeper
    "create.locked",         // kept, no memory
    "create.allocated",      // memory, no header
    "create.header",         // header, not initialised
    "create.initialised",    // complete, no owner
    "create.found",          // a file of this name is open, not yet locked
    "create.waits",          // others remove the name of that file
    "file.checked",          // some slots of a file are checked, its dead owners still there
    "file.entered",          // the name leads to the file, whose writer has its place
    "attach.found",          // mapped, no owner number
    "attach.locked",         // owner byte locked, leftovers of the previous owner still there
    "attach.claimed",        // owner number taken
    "take.hinted",           // hint removed, word still FREE
    "take.taken",            // word WRITING
    "overwrite.taken",       // word WRITING
    "publish.written",       // fields written, word still WRITING
    "publish.synced",        // what is to outlive a loss of power is on disk, word still WRITING
    "publish.published",     // word READY, waiters not woken
    "abort.freed",           // word FREE
    "pin.pinned",            // word READING
    "unpin.unpinned",        // word READY, READING or FREE
    "consume.consumed",      // likewise
    "mark_consumed.marked",  // likewise
    "discard.discarded",     // likewise
    "free.unhinted",         // word FREE, hint not set
    "free.unannounced",      // hint set, event not advanced
    "event.advanced",        // event advanced, waiters asleep
    "reclaim.proven",        // the dead owner's byte is locked, its bits still set
    "reclaim.cleared",       // one of its slots cleared
    "reclaim.disclaimed",    // a dead owner's claims have no holder, its bit still set
    "claim.pinned",          // word READING, the claim word without a holder
    "claim.claimed",         // claimed, not yet announced
    "claim.withdrawn",       // the ready hint is gone, not yet looked again
    "give_back.dropped",     // the claim word has no holder, the pin still there
    "return.unhinted",       // to be claimed again, its ready hint perhaps not set
    "return.unannounced",    // hint set, not yet announced
    "taker.building",        // an entry is taken for a connection, not yet in use
    "outcome.noted",         // a finish is noted, undecided
    "outcome.decided",       // its note is decided, its pin still there
    "failure.counted",       // an entry of the log is begun
    "reclaim.vacated",       // its owner number free, its byte still locked
    "close.released",        // own bits cleared, owner number still taken
    "unlink.checked",        // nothing is unread that is not given up, the name is still there
    "board.locked",          // about to write ports or addresses
    "board.written",         // written beside, not yet shown
    "serve.asked",           // a message is here, nothing of it is done
    "serve.answered",        // the answer is UCX's, its large payloads are not
    "serve.sending",         // a large payload is UCX's
    "serve.sent",            // UCX has let go of a payload, its pin is still there
    "serve.acknowledging",   // an acknowledgement is here, the ring does not know
    "demand.waits",          // a demand waits, nothing watches for it
    "demand.claimed",        // payloads are claimed for it, nothing is sent
    "demand.answered",       // its answer is UCX's
    "finish.asked",          // a claim is to be consumed, the ring does not know
    "read.asked",            // the request is UCX's
    "read.answered",         // the answer is here, perhaps not all payloads
    "read.arrived",          // everything is here, unverified, not reported
};

consteval std::size_t index_of(std::string_view name) {
  const auto found = std::find(kPoints.begin(), kPoints.end(), name);
  if (found == kPoints.end()) throw "no such fault point";
  return static_cast<std::size_t>(found - kPoints.begin());
}

#ifdef TRANSPORT_FAULT_POINTS
struct Trap {
  std::atomic<int> signal{0};
  std::atomic<std::int64_t> passes_left{0};
};
inline std::array<Trap, kPoints.size()> traps;
inline std::atomic<int> report_to{-1};  // descriptor to which a closed trap is reported; -1: none

inline void set(std::size_t index, int signal, std::int64_t after) {
  traps[index].passes_left.store(after);
  traps[index].signal.store(signal);
}

// "process point signal" and a line's end, in one write.
inline void report(std::size_t index, int signal) {
  const int descriptor = report_to.load();
  if (descriptor < 0) return;
  dprintf(descriptor, "%d %s %d\n", static_cast<int>(getpid()), kPoints[index].data(), signal);  // names end in a zero
}

inline void pass(std::size_t index) {
  const int signal = traps[index].signal.load();
  if (signal == 0 || traps[index].passes_left.fetch_sub(1) != 0) return;
  report(index, signal);
  kill(getpid(), signal);  // the process, not this thread
}
#define FAULT_POINT(name)                                                   \
  do {                                                                      \
    constexpr std::size_t fault_index = ::transport::fault::index_of(name); \
    ::transport::fault::pass(fault_index);                                  \
  } while (false)
#else
#define FAULT_POINT(name) static_cast<void>(::transport::fault::index_of(name))
#endif

}  // namespace transport::fault
