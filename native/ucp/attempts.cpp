// Attempts: each holds the pin of one payload from READ to the end, whichever way that comes.
#include "ucp/serving.hpp"

#include <algorithm>
#include <utility>

#include "common/checksum.hpp"
#include "common/clock.hpp"
#include "common/error.hpp"
#include "common/fault.hpp"
#include "common/siphash.hpp"

namespace transport::ucp {

namespace {

constexpr std::size_t kRepliesKept = 64;
constexpr std::uint64_t kMostJoinedOfRegistered = 8192;

}  // namespace

Service::Service(Engine& engine, Ring& ring, const Limits& limits)
    : engine_(engine.shared_from_this()),
      ring_(ring),
      limits_(limits),
      mapping_(ring.mapping()),
      slot_count_(ring.identity().slot_count),
      of_slot_(slot_count_),
      watch_(mapping_, ring.published()) {
  ring.require_open();
  engine_->sort_unexpected = [this](ucp_tag_t tag, std::size_t length, ucp_tag_message_h message) {
    return keep(tag, length, message);
  };
}

void Service::register_payloads() {
  registered_ = engine_->register_memory(ring_.registrable(), mapping_);
  limits_.inline_bytes = std::min(limits_.inline_bytes, kMostJoinedOfRegistered);
}

// Messages that belong to no admitted connection are dropped, so that strangers cannot fill this process's memory.
bool Service::keep(ucp_tag_t tag, std::size_t length, ucp_tag_message_h message) {
  const auto found = of_base_.find(static_cast<std::uint32_t>(tag >> 32));
  return found != of_base_.end() && found->second->keep(tag & 0xffffffff, length, message);
}

bool Service::known(const Record& record) const {
  return record.slot < slot_count_ && record.key == slot_key(ring_.identity().secret, record.slot, record.generation);
}

Code Service::begin(Connection& connection, const Record& record, Attempt*& attempt, Answer& answer) {
  if (!known(record)) return Code::wrong_key;
  if (draining || connection.reads_ >= limits_.most_reads) return Code::busy;
  if (record.rank >= kMaxReaders) return Code::rank;
  if (free_ == nullptr) free_ = &made_.emplace_back();  // before there is a pin that a lack of memory would leave
  const PinAnswer pinned = ring_.pin(record.slot, record.generation, record.rank);
  if (pinned != PinAnswer::ok)  // unused ranks start as done
    return pinned == PinAnswer::done && record.rank >= ring_.info(record.slot).readers ? Code::rank : Code::stale;
  const SlotInfo info = ring_.info(record.slot);
  const bool expired = info.deadline_ns != 0 && info.deadline_ns <= realtime_ns();
  const bool range = record.kind == static_cast<std::uint8_t>(Kind::read_range);
  const std::uint64_t offset = offset_of(record);
  const bool fits = range ? offset <= info.length && record.length <= info.length - offset : info.length == record.length;
  if (!fits || expired) {
    ring_.unpin(record.slot, record.generation);
    if (!fits) return Code::length;
    ring_.discard(record.slot, record.generation);
    return Code::stale;
  }
  answer.flags = kChecked;
  answer.length = record.length;
  // The writer has hashed the payload as a whole: of a part there is only what stands in the slot now, hashed by
  // `Connection::hash`.
  answer.checksum = range ? 0 : info.checksum;
  attempt = adopt(connection, record.slot, record.generation, record.rank, record.length);
  ++connection.reads_;
  return Code::accepted;
}

// The caller has seen to it that one is free.
Attempt* Service::adopt(Connection& connection, std::uint32_t slot, std::uint32_t generation, std::uint8_t rank,
                        std::uint64_t length) {
  Attempt* const attempt = std::exchange(free_, free_->next);
  const double through_s = static_cast<double>(length) / limits_.slowest_rate;
  *attempt = {&connection, slot, generation, rank, Attempt::State::sending, connection.last_active() + through_s,
              nullptr, connection.first_, nullptr, of_slot_[slot]};
  if (attempt->next != nullptr) attempt->next->previous = attempt;
  if (attempt->next_of_slot != nullptr) attempt->next_of_slot->previous_of_slot = attempt;
  attempt->length = length;
  connection.first_ = of_slot_[slot] = attempt;
  ++connection.attempts_;
  ++attempts_;
  return attempt;
}

// A reader has the payload, whichever connection or port it came through.
void Service::acknowledge(const Record& record) {
  if (!known(record) || record.rank >= kMaxReaders) return;
  FAULT_POINT("serve.acknowledging");
  Attempt* marked = nullptr;
  const auto same = [&](const Attempt& each) {
    return each.generation == record.generation && each.rank == record.rank;
  };
  for (Attempt* each = of_slot_[record.slot]; each != nullptr; each = each->next_of_slot)
    if (same(*each) && each->idle() && each->hold == Attempt::Hold::pin) marked = each;
  if (marked == nullptr)
    ring_.consume(record.slot, record.generation, record.rank);
  else if (ring_.mark_consumed(record.slot, record.generation, record.rank))
    drop(*marked);  // its pin went in the same swap
  for (Attempt* each = of_slot_[record.slot]; each != nullptr;) {
    Attempt* const next = each->next_of_slot;
    if (same(*each)) {
      if (each->idle())
        end(*each);
      else
        each->state = Attempt::State::acknowledged;
    }
    each = next;
  }
}

std::uint64_t Service::fate(const Record& record) const {
  const SlotInfo info = ring_.info(record.slot);
  const bool there = info.state == State::ready || info.state == State::reading;
  if (info.generation != record.generation || !there) return static_cast<std::uint64_t>(Fate::gone);
  const bool consumed = record.rank < kMaxReaders && (info.done >> record.rank & 1) != 0;
  return static_cast<std::uint64_t>(consumed ? Fate::consumed : Fate::readable);
}

bool Service::consumed_elsewhere(const Attempt& attempt) const {
  const SlotInfo info = ring_.info(attempt.slot);
  return info.generation != attempt.generation || (info.done >> attempt.rank & 1) != 0;
}

// Its bytes count when they are through, not when they are asked for.
void Service::sent(Attempt& attempt, ucs_status_t status) {
  FAULT_POINT("serve.sent");
  const bool over = attempt.state == Attempt::State::acknowledged;
  if (const Ring::InUse use(ring_); (over || status == UCS_OK) && !ring_.closed())
    ring_.count(attempt.connection->carried_, attempt.length);
  attempt.state = Attempt::State::idle;
  if (over || covered(attempt)) end(attempt);
}

// Whether another attempt of its connection keeps the payload for the same rank: a claim, or the read of another part.
// So a payload of many ranges counts once when they are through.
bool Service::covered(const Attempt& attempt) {
  if (attempt.hold != Attempt::Hold::pin) return false;
  for (Attempt* each = of_slot_[attempt.slot]; each != nullptr; each = each->next_of_slot) {
    if (each == &attempt || each->connection != attempt.connection || each->rank != attempt.rank ||
        each->generation != attempt.generation || each->hold == Attempt::Hold::nothing ||
        each->state == Attempt::State::acknowledged)
      continue;
    each->sent_by = std::max(each->sent_by, attempt.sent_by);
    return true;
  }
  return false;
}

// A claim of an answer that brought several, and that its client may never have had, goes back uncounted: one payload
// that does not get through is no reason for the others to end as dead.
void Service::end(Attempt& attempt) {
  const ClaimId claim = attempt.claim();
  const Attempt::Hold hold = attempt.hold;
  const std::uint64_t delay_ns = attempt.delay_ns;
  const bool broken = attempt.together && attempt.state != Attempt::State::acknowledged;
  const Return back = broken ? Return::unread : attempt.back;
  if (hold == Attempt::Hold::claim && broken) one_each_ = true;
  drop(attempt);
  const Ring::InUse use(ring_);
  try {
    if (hold == Attempt::Hold::pin) ring_.unpin(claim.slot, claim.generation);
    if (hold == Attempt::Hold::claim) ring_.give_back(claim, delay_ns, back);
  } catch (const RingFault&) {  // the ring was closed, and its pins with it
  }
}

// Its client names a payload of the answer, so it has the answer. The claims of an answer stand side by side in the list
// of their connection, which may be long.
void Service::handed_over(Attempt& attempt) {
  one_each_ = false;
  if (!attempt.together) return;
  const auto same = [&](const Attempt* each) { return each != nullptr && each->answer == attempt.answer; };
  for (Attempt* each = &attempt; same(each); each = each->next) each->together = false;
  for (Attempt* each = attempt.previous; same(each); each = each->previous) each->together = false;
}

void Service::drop(Attempt& attempt) {
  Connection& connection = *attempt.connection;
  (attempt.previous != nullptr ? attempt.previous->next : connection.first_) = attempt.next;
  if (attempt.next != nullptr) attempt.next->previous = attempt.previous;
  (attempt.previous_of_slot != nullptr ? attempt.previous_of_slot->next_of_slot : of_slot_[attempt.slot]) =
      attempt.next_of_slot;
  if (attempt.next_of_slot != nullptr) attempt.next_of_slot->previous_of_slot = attempt.previous_of_slot;
  attempt.connection = nullptr;
  attempt.next = std::exchange(free_, &attempt);
  if (attempt.is_read()) --connection.reads_;
  --connection.attempts_;
  --attempts_;
  tell_quiet();
}

void Service::when_quiet(void* token) {
  std::swap(quiet_, token);
  if (token != nullptr) engine_->emit({token});
  tell_quiet();
}

void Service::tell_quiet() {
  if (attempts_ == 0 && quiet_ != nullptr) engine_->emit({std::exchange(quiet_, nullptr)});
}

std::shared_ptr<Reply> Service::take_reply() {
  if (replies_.empty()) return std::make_shared<Reply>(mapping_);
  const auto reply = std::move(replies_.back());
  replies_.pop_back();
  return reply;
}

void Service::give_back(std::shared_ptr<Reply> reply) {
  if (replies_.size() < kRepliesKept) replies_.push_back(std::move(reply));
}

}  // namespace transport::ucp
