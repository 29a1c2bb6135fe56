// TAKE at the listener: payloads are claimed for a client and sent with the answer; a demand that finds nothing waits.
#include <algorithm>
#include <array>
#include <bit>
#include <exception>
#include <functional>
#include <string>
#include <utility>

#include "common/clock.hpp"
#include "common/fault.hpp"
#include "common/text.hpp"
#include "ucp/serving.hpp"

namespace transport::ucp {

namespace {

constexpr std::size_t kTakeRepliesKept = 8;
constexpr std::size_t kMostCopiedKept = std::size_t{1} << 20;
constexpr std::uint64_t kCopied = 16 << 10;  // payloads of at most so many bytes
// What a death leaves, a lost hint or a claim, is looked for now and then while a demand waits.
constexpr std::uint64_t kLookAgain_ns = 250'000'000;
constexpr std::uint64_t kMillisecond = 1'000'000;
constexpr std::array<std::byte, kTakenAlignment> kZeros{};
constexpr std::uint64_t kUnlimited = std::uint64_t{1} << 62;  // bytes: no payload moves with the claims

}  // namespace

void TakeReply::copy(const std::byte* bytes, std::size_t count) {
  copied.insert(copied.end(), bytes, bytes + count);
  if (pieces.back().buffer == nullptr)
    pieces.back().length += count;
  else if (count != 0)
    pieces.push_back({nullptr, count});
}

void TakeReply::find_copied() {
  std::byte* next = copied.data();
  for (ucp_dt_iov_t& piece : pieces)
    if (piece.buffer == nullptr) {
      piece.buffer = next;
      next += piece.length;
    }
}

// --- demands ----------------------------------------------------------------------------------------
void Service::take(Connection& connection, std::uint32_t number, const Record& record) {
  connection.expect_no_more();
  connection.join_takers();  // there may have been no room before
  const std::uint64_t now = monotonic_ns();
  Demand demand{&connection,
                number,
                {record.rank, record.slot, record.joined_most == 0 ? kUnlimited : bytes_of(record),
                 std::bit_cast<std::int64_t>(record.key), record.attempts,
                 connection.endpoint_->peer()},
                told_of(record),
                record.joined_most,
                now,
                now + record.generation * kMillisecond};
  const bool leaves = draining || connection.parts_;
  if (leaves && ring_.drained()) return answer(demand, Code::ended);
  if (leaves || connection.waiting_ >= limits_.most_waiting) return answer(demand, Code::busy);
  const std::uint32_t before = seen(ring_.published());
  if (waiting_.empty() && serve(demand) == Served::answered) return;  // else the demands that wait have the first choice
  if ((record.generation == 0 || is_news(demand, now)) && waiting_.empty()) return answer(demand, nothing());
  waiting_.push_back(demand);
  ++connection.waiting_;
  FAULT_POINT("demand.waits");
  if (waiting_.size() == 1)
    arm(before);
  else
    look();
}

Service::Served Service::serve(Demand& demand) {
  Connection& connection = *demand.connection;
  if (connection.unsent_ > limits_.most_unsent || connection.unsent_bytes_ > limits_.most_unsent_bytes)
    return Served::held_up;
  Asked asked = demand.asked;
  if (one_each_) asked.most = 1;
  std::size_t spare = 0;  // memory first: afterwards nothing may fail with claims in hand
  for (const Attempt* each = free_; each != nullptr && spare < asked.most; each = each->next) ++spare;
  for (; spare < asked.most; ++spare) {
    Attempt& made = made_.emplace_back();
    made.next = std::exchange(free_, &made);
  }
  claimed_.clear();
  claimed_.reserve(asked.most);
  try {
    if (ring_.claim(asked, claimed_) == 0) return Served::nothing;
    FAULT_POINT("demand.claimed");
    answer(demand, Code::accepted, claimed_);
  } catch (...) {
    for (const Claimed& each : claimed_) {  // those that are attempts by now go with their connection
      const Attempt* known = of_slot_[each.id.slot];
      while (known != nullptr && !(known->hold == Attempt::Hold::claim && known->rank == each.id.rank))
        known = known->next_of_slot;
      if (known == nullptr) ring_.give_back(each.id, 0, Return::unread);
    }
    throw;
  }
  return Served::answered;
}

void Service::answer(const Demand& demand, Code code, const std::vector<Claimed>& claimed) {
  Connection& connection = *demand.connection;
  std::shared_ptr<TakeReply> reply;
  if (take_replies_.empty()) {
    reply = std::make_shared<TakeReply>(mapping_);
  } else {
    reply = std::move(take_replies_.back());
    take_replies_.pop_back();
  }
  TakeReply& going = *reply;
  going.connection = &connection;
  going.pieces.clear();
  going.joined.clear();
  going.pieces.reserve(1 + 2 * claimed.size());
  going.joined.reserve(claimed.size());
  std::vector<std::byte>& copied = going.copied;
  copied.clear();
  copied.resize(sizeof(Header) + claimed.size() * sizeof(Taken));
  std::size_t to_copy = 0;
  for (std::size_t at = 0; at < claimed.size(); ++at) {
    const Claimed& one = claimed[at];
    const auto note = ring_.note(one.id.slot, one.id.generation);
    const std::size_t note_bytes = note ? note->size() : 0;
    store(copied.data() + sizeof(Header) + at * sizeof(Taken),
          Taken{.slot = one.id.slot,
                .generation = one.id.generation,
                .rank = static_cast<std::uint8_t>(one.id.rank),
                .flags = kChecked,
                .attempts = static_cast<std::uint16_t>(one.id.attempts),
                .note_bytes = static_cast<std::uint16_t>(note_bytes),
                .in_vain = static_cast<std::uint16_t>(one.in_vain),
                .length = one.length,
                .checksum = one.checksum,
                .sequence = one.sequence,
                .policy_version = one.policy_version});
    if (note) {
      const auto* const text = reinterpret_cast<const std::byte*>(note->data());
      copied.insert(copied.end(), text, text + note_bytes);
    }
    if (one.length <= kCopied) to_copy += one.length;
  }
  std::size_t head = copied.size();
  copied.reserve(head + to_copy + (1 + claimed.size()) * kTakenAlignment);  // all memory before the first is adopted
  going.pieces.push_back({nullptr, head});

  std::uint64_t joined = 0;  // bytes from the end of the head on
  for (std::size_t at = 0; at < claimed.size(); ++at) {
    const Claimed& one = claimed[at];
    Attempt& attempt =
        *adopt(connection, one.id.slot, one.id.generation, static_cast<std::uint8_t>(one.id.rank), one.length);
    attempt.hold = Attempt::Hold::claim;
    attempt.tries = static_cast<std::uint16_t>(one.id.attempts);
    attempt.state = Attempt::State::idle;
    attempt.answer = demand.number;
    attempt.together = claimed.size() > 1;
    const std::uint64_t at_bytes = aligned_taken(joined);
    if ((registered_ != nullptr && one.length > kCopied) || one.length > demand.joined_most || one.length > demand.asked.most_bytes ||
        at_bytes + one.length > demand.asked.most_bytes + at * kTakenAlignment)
      continue;
    const std::size_t row = sizeof(Header) + at * sizeof(Taken);
    auto taken = load<Taken>(copied.data() + row);
    taken.flags |= kJoined;
    store(copied.data() + row, taken);
    if (joined == 0 && one.length != 0) {
      going.copy(kZeros.data(), aligned_taken(head) - head);
      head = copied.size();
    }
    going.copy(kZeros.data(), at_bytes - joined);
    joined = at_bytes + one.length;
    std::byte* const payload = ring_.payload(one.id.slot);
    if (one.length <= kCopied)
      going.copy(payload, one.length);
    else
      going.pieces.push_back({payload, one.length});
    attempt.state = Attempt::State::sending;
    going.joined.push_back(&attempt);
  }
  store(copied.data(), Header{0, kVersion, static_cast<std::uint8_t>(Kind::status),
                              static_cast<std::uint16_t>(claimed.size()), demand.number,
                              static_cast<std::uint32_t>(joined),
                              found_code(static_cast<std::uint32_t>(code), left(demand.asked.rank))});
  seal(copied.data(), head);
  going.find_copied();

  ++connection.unsent_;
  connection.unsent_bytes_ += copied.size();
  const Waiter waiter{&Connection::take_sent, &going};
  const ucp_tag_t tag = tag_of(connection.client_base_, demand.number);
  if (going.pieces.size() == 1)
    connection.endpoint_->send(copied.data(), copied.size(), tag, waiter, std::move(reply));
  else
    connection.endpoint_->send_pieces(going.pieces.data(), going.pieces.size(), tag, waiter, std::move(reply));
  FAULT_POINT("demand.answered");
}

void Connection::take_sent(void* self, std::uint32_t, ucs_status_t status, std::size_t) {
  auto& reply = *static_cast<TakeReply*>(self);
  Connection& connection = *reply.connection;
  Service& service = *connection.service_;
  connection.unsent_bytes_ -= reply.copied.size();
  for (Attempt* const attempt : reply.joined) service.sent(*attempt, status);
  const bool small = reply.copied.capacity() <= kMostCopiedKept;
  if (status == UCS_OK && small && service.take_replies_.size() < kTakeRepliesKept)
    service.take_replies_.push_back(reply.shared_from_this());  // else UCX may have it for ever
  connection.sent(status);
}

// --- those that wait ----------------------------------------------------------------------------------
void Service::look() {
  watch_.clear();
  if (waiting_.empty()) return;
  const Ring::InUse use(ring_);
  const std::uint32_t before = seen(ring_.published());
  try {
    serve_waiting();
    if (!waiting_.empty()) arm(before);
  } catch (const std::exception&) {  // the ring was closed under us, or there is no memory: no demand is served any more
    for (const Demand& each : waiting_) {
      each.connection->waiting_ = 0;
      each.connection->end(End::internal, "the ring cannot be served any more");
    }
    waiting_.clear();
  }
}

std::uint32_t Service::left(unsigned rank) const {
  if (!ring_.ended()) return kMoreToCome;
  return static_cast<std::uint32_t>(std::min<std::uint64_t>(ring_.left(rank), kMoreToCome - 1));
}

// What a demand is told that found nothing: nothing at the moment, or nothing is left for any rank.
Code Service::nothing() const { return ring_.drained() ? Code::ended : Code::accepted; }

// Whether a demand that waits would rather know: the end at once, and now and then by how much less is left.
bool Service::is_news(const Demand& demand, std::uint64_t now) const {
  if (nothing() == Code::ended) return true;
  if (demand.told != kMoreToCome && now < demand.since_ns + kLookAgain_ns) return false;
  return left(demand.asked.rank) != demand.told;
}

// One round. What found nothing for a rank finds nothing for the next one.
void Service::serve_waiting() {
  std::uint32_t empty = 0;
  const std::uint64_t now = monotonic_ns();
  std::size_t kept = 0;
  for (std::size_t at = 0; at < waiting_.size(); ++at) {
    Demand demand = waiting_[at];
    Connection& connection = *demand.connection;
    bool over = connection.over_ || !connection.endpoint_->alive();
    if (!over && (empty >> demand.asked.rank & 1) == 0) {
      const Served found = serve(demand);
      over = found == Served::answered;
      if (found == Served::nothing) empty |= 1U << demand.asked.rank;
    }
    if (!over && (now >= demand.until_ns || is_news(demand, now))) {
      answer(demand, nothing());
      over = true;
    }
    if (over)
      --connection.waiting_;
    else
      waiting_[kept++] = demand;
  }
  waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(kept), waiting_.end());
}

void Service::arm(std::uint32_t before) {
  const std::uint64_t now = monotonic_ns();
  std::uint64_t until = now + kLookAgain_ns;
  for (const Demand& each : waiting_) {
    until = std::min(until, each.until_ns);
    if (const std::uint64_t due = ring_.next_due_ns(each.asked.rank); due > now) until = std::min(until, due);
  }
  watch_.arm(before, until);
}

void Service::dismiss() {
  for (const Demand& each : std::exchange(waiting_, {})) {
    --each.connection->waiting_;
    if (!each.connection->over_) answer(each, ring_.drained() ? Code::ended : Code::busy);
  }
}

// Those of a connection that ends: nothing was taken for them.
void Service::forget(const Connection& connection) {
  std::erase_if(waiting_, [&](const Demand& each) { return each.connection == &connection; });
}

// The client does not want it any more: the answer is an empty one, unless it is on its way.
void Service::cancel_take(const Connection& connection, std::uint32_t number) {
  const auto found = std::find_if(waiting_.begin(), waiting_.end(), [&](const Demand& each) {
    return each.connection == &connection && each.number == number;
  });
  if (found == waiting_.end()) return;
  const Demand demand = *found;
  waiting_.erase(found);
  --demand.connection->waiting_;
  answer(demand, Code::accepted);
}

void Service::cancel_takes(const Connection& connection) {
  while (connection.waiting_ != 0) {  // each is in `waiting_`
    const auto found = std::find_if(waiting_.begin(), waiting_.end(),
                                    [&](const Demand& each) { return each.connection == &connection; });
    cancel_take(connection, found->number);
  }
}

// --- the end of a claim ----------------------------------------------------------------------------------
// The claim that the record names, if it was given to this connection and has not ended.
Attempt* Service::held(const Connection& connection, const Record& record) const {
  if (record.slot >= slot_count_) return nullptr;
  for (Attempt* each = of_slot_[record.slot]; each != nullptr; each = each->next_of_slot)
    if (each->hold == Attempt::Hold::claim && each->connection == &connection && each->rank == record.rank &&
        each->generation == record.generation && each->tries == record.attempts &&
        each->state != Attempt::State::acknowledged)
      return each;
  return nullptr;
}

Code Service::finish(Connection& connection, const Record& record) {
  Attempt* const attempt = held(connection, record);
  if (attempt == nullptr) return Code::stale;
  FAULT_POINT("finish.asked");
  handed_over(*attempt);
  const bool accepted =
      end_claim(*attempt, [&](const ClaimId& claim) { return ring_.finish(claim, false, connection.taker_); });
  end_reads(connection, record);
  return accepted ? Code::accepted : Code::stale;
}

// `how` ends the claim, and takes a pin with it.
bool Service::end_claim(Attempt& attempt, const std::function<bool(const ClaimId&)>& how) {
  const ClaimId claim = attempt.claim();
  if (attempt.idle()) {
    const bool accepted = how(claim);
    drop(attempt);  // its pin went with it
    return accepted;
  }
  // UCX has not said that it is out of the slot: a pin stays until then, accepted or not.
  attempt.hold = ring_.pin_again(attempt.slot) ? Attempt::Hold::pin : Attempt::Hold::nothing;
  attempt.state = Attempt::State::acknowledged;
  return how(claim);
}

// Its length and the lengths of its texts were checked with its message.
Code Service::end_untrained(Connection& connection, const Record& record, const std::byte* texts) {
  Attempt* const attempt = held(connection, record);
  if (attempt == nullptr) return Code::stale;
  handed_over(*attempt);
  const Ended how = record.joined_most == kEndsDead ? Ended::dead : Ended::aged;
  const auto* const text = reinterpret_cast<const char*>(texts);
  const std::string reason = one_line({text, reason_bytes(record)});
  const std::string consumer = one_line({text + reason_bytes(record), consumer_bytes(record)});
  const bool accepted = end_claim(*attempt, [&](const ClaimId& claim) {
    return ring_.end(claim, how, reason, consumer, connection.taker_);
  });
  end_reads(connection, record);
  return accepted ? Code::accepted : Code::stale;
}

Code Service::give_back(Connection& connection, const Record& record) {
  Attempt* const attempt = held(connection, record);
  if (attempt == nullptr) return Code::stale;
  handed_over(*attempt);
  bool accepted = true;
  const Return back = (record.joined_most & kUnread) != 0 ? Return::unread : Return::retried;
  const std::uint64_t delay_ns = std::min(record.length, ~std::uint64_t{0} / kMillisecond) * kMillisecond;
  if (attempt->idle()) {
    accepted = ring_.give_back(attempt->claim(), delay_ns, back);
    drop(*attempt);
  } else {
    attempt->delay_ns = delay_ns;
    attempt->back = back;
    attempt->state = Attempt::State::acknowledged;
  }
  end_reads(connection, record);
  return accepted ? Code::accepted : Code::stale;
}

// Of a claim that was finished through a connection that broke, here or at another port.
Code Service::outcome(const Record& record) {
  const ClaimId claim{record.slot, record.generation, record.rank, record.attempts};
  Outcome found = ring_.outcome(record.key, claim);
  if (found == Outcome::undecided && ring_.reclaim() > 0) found = ring_.outcome(record.key, claim);
  switch (found) {
    case Outcome::accepted:
      return Code::accepted;
    case Outcome::refused:
      return Code::stale;
    case Outcome::undecided:  // its listener lives: it was stopped, or has just begun
      return Code::busy;
    default:
      return Code::unknown;
  }
}

// What was read under a claim, because it was too large to be joined to the answer.
void Service::end_reads(const Connection& connection, const Record& record) {
  for (Attempt* each = of_slot_[record.slot]; each != nullptr;) {
    Attempt* const next = each->next_of_slot;
    if (each->connection == &connection && each->hold == Attempt::Hold::pin && each->rank == record.rank &&
        each->generation == record.generation) {
      if (each->idle())
        end(*each);
      else
        each->state = Attempt::State::acknowledged;
    }
    each = next;
  }
}

}  // namespace transport::ucp
