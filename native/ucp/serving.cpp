// A client's connection: its messages in, answers and payloads out. What its reads hold is in attempts.cpp.
#include "ucp/serving.hpp"

#include <algorithm>
#include <exception>
#include <utility>

#include "common/clock.hpp"
#include "common/fault.hpp"

namespace transport::ucp {

namespace {

constexpr std::size_t kChargedToEach = 256;  // what UCX needs for a message beside its bytes, roughly

// How a send ends whose client went away.
bool is_of_the_peer(ucs_status_t status) {
  switch (status) {
    case UCS_ERR_CANCELED:
    case UCS_ERR_CONNECTION_RESET:
    case UCS_ERR_ENDPOINT_TIMEOUT:
    case UCS_ERR_NOT_CONNECTED:
    case UCS_ERR_REJECTED:
    case UCS_ERR_UNREACHABLE:
    case UCS_ERR_IO_ERROR:
      return true;
    default:
      return false;
  }
}

}  // namespace

// --- connection: messages in --------------------------------------------------------------------------------
std::shared_ptr<Connection> Connection::open(std::shared_ptr<Service> service, std::shared_ptr<Endpoint> endpoint,
                                             std::uint32_t tag_base, std::uint32_t client_base,
                                             std::uint64_t lease_ns, bool takes, void* ended) {
  std::shared_ptr<Connection> opened(
      new Connection(std::move(service), std::move(endpoint), tag_base, client_base, lease_ns, takes));
  opened->heard_ns_ = monotonic_ns();
  opened->ended_ = ended;
  ++opened->service_->engine().expecting;
  opened->service_->of_base_[tag_base] = opened.get();
  for (std::size_t each = 0; each < kReceives; ++each) opened->post();
  // What comes after the handshake in its way would stay in UCX, however much it is.
  opened->endpoint_->receive_stream(&opened->inbox_->beyond_handshake, 1,
                                    {&Connection::received_stream, opened.get()}, opened->inbox_);
  opened->join_takers();
  return opened;
}

void Connection::post() {
  if (posted_ == service_->limits_.numbers) return;  // another number would be another connection's tag
  const std::uint32_t number = posted_++, place = number % kReceives;
  arrivals_[place].here = false;
  std::byte* const message = inbox_->messages[place].data();
  const Waiter waiter{&Connection::received, this, place};
  if (ahead_.empty())
    endpoint_->receive(message, kControlBytes, tag_of(tag_base_, number), waiter, inbox_);
  else
    endpoint_->receive_kept(message, kControlBytes, take_ahead().message, waiter, inbox_);
}

// A client may ask ahead of its answers, in order and within a limit.
bool Connection::keep(std::uint64_t place, std::size_t length, ucp_tag_message_h message) {
  if (over_) return false;
  const std::size_t charge = length + kChargedToEach;
  const char* fault = nullptr;
  if (place != tag_of(0, posted_ + static_cast<std::uint32_t>(ahead_.size())))
    fault = "a control message with the wrong message number";
  else if (length > kControlBytes)
    fault = "a control message is too long";
  else if (ahead_bytes_ + charge > service_->limits_.most_ahead ||
           service_->ahead_bytes_ + charge > service_->limits_.most_ahead_of_all)
    fault = "too many requests ahead of their answers";
  if (fault != nullptr) {
    end(End::garbage, fault);
    return false;
  }
  ahead_.push_back({message, charge});
  ahead_bytes_ += charge;
  service_->ahead_bytes_ += charge;
  return true;
}

Connection::Ahead Connection::take_ahead() {
  const Ahead first = ahead_.front();
  ahead_.pop_front();
  ahead_bytes_ -= first.charge;
  service_->ahead_bytes_ -= first.charge;
  return first;
}

void Connection::received_stream(void* self, std::uint32_t, ucs_status_t status, std::size_t) {
  if (status == UCS_OK) static_cast<Connection*>(self)->end(End::garbage, "stream data after the handshake");
}

// It may come from inside of `receive`: what a message asks for is done later, however many have arrived.
void Connection::received(void* self, std::uint32_t index, ucs_status_t status, std::size_t length) {
  auto& connection = *static_cast<Connection*>(self);
  connection.arrivals_[index] = {true, status, length};
  if (!connection.over_) connection.service_->engine().defer(connection);
}

// A client that asks and does not listen is held up: its answers are not piled up here.
bool Connection::has_work() const {
  return unsent_ <= service_->limits_.most_unsent &&
         (due_ == service_->limits_.numbers || arrivals_[due_ % kReceives].here);
}

// One message at a time, so that connections take turns.
void Connection::run() {
  if (over_ || !has_work()) return;
  const Ring::InUse use(service_->ring_);
  if (due_ == service_->limits_.numbers) {
    if (unsent_ == 0) end(End::garbage, "its message numbers are used up");
    return;
  }
  const std::uint32_t place = due_ % kReceives;
  const Arrival arrival = arrivals_[place];
  if (arrival.status == UCS_ERR_MESSAGE_TRUNCATED) return end(End::garbage, "a control message is too long");
  if (arrival.status != UCS_OK) return end(End::gone, "the peer disconnected");
  const std::byte* const message = inbox_->messages[place].data();
  if (!answering_) {
    heard_ns_ = monotonic_ns();
    if (const char* const fault = control_fault(message, arrival.length, due_))
      return end(End::garbage, fault);
    FAULT_POINT("serve.asked");
  }
  try {
    if (answer(message)) {
      ++due_;
      post();
    }
  } catch (const std::exception&) {  // the ring was closed under us, or there is no memory: the connection ends
    return end(End::internal, "the ring can no longer be served");
  }
  if (!over_ && has_work()) service_->engine().defer(*this);
}

// --- connection: answers and payloads out -------------------------------------------------------------------
// False: it goes on in another turn. Ranges are hashed here, and a message may ask for any number of bytes of them.
bool Connection::answer(const std::byte* message) {
  const auto header = load<Header>(message);
  if (const Record first = record_at(message, 0); first.kind == static_cast<std::uint8_t>(Kind::take)) {
    if (takes_)
      service_->take(*this, header.number, first);
    else
      end(End::garbage, "a demand of a client whose handshake said that it takes nothing");
    return true;
  }
  if (!answering_) {
    answering_ = service_->answering_ ? std::move(service_->answering_) : std::make_unique<Answering>();
    answering_->reply = service_->take_reply();
    answering_->answers = answering_->count = answering_->index = 0;
    answering_->join = true;
    answering_->hashing = nullptr;
  }
  Answering& now = *answering_;
  std::byte* const first = now.reply->status.data() + sizeof(Header);
  std::uint64_t left = service_->limits_.most_hashed;
  for (; now.index < header.count; ++now.index) {
    const Record record = record_at(message, now.index);
    Answer said{};
    said.position = static_cast<std::uint16_t>(now.index);
    switch (static_cast<Kind>(record.kind)) {
      case Kind::read:
      case Kind::read_range: {
        if (now.hashing != nullptr) {  // begun in an earlier turn
          if (!hash(left)) return false;
          continue;
        }
        const bool small = record.length <= service_->limits_.inline_bytes;
        Attempt* attempt = nullptr;
        said.code = static_cast<std::uint8_t>(service_->begin(*this, record, attempt, said));
        if (attempt != nullptr) {
          const std::uint64_t offset = Service::offset_of(record);
          now.payloads[now.count++] = {attempt, record.length, now.index,
                                       small ? first + now.answers * sizeof(Answer) : nullptr, offset};
          if (record.kind == static_cast<std::uint8_t>(Kind::read_range)) {
            now.hashing = service_->ring_.payload(attempt->slot) + offset;
            now.unhashed = record.length;
            now.hashed = Checksum();
          }
        } else if (small) {
          now.join = false;  // the client has laid out one message for all of them
        }
        break;
      }
      case Kind::ack:
        service_->acknowledge(record);
        continue;
      case Kind::discard:
        if (service_->known(record)) service_->ring_.discard(record.slot, record.generation);
        continue;
      case Kind::state:
        if (service_->known(record))
          said.value = service_->fate(record);
        else
          said.code = static_cast<std::uint8_t>(Code::wrong_key);
        break;
      case Kind::finish:
        said.code = static_cast<std::uint8_t>(service_->finish(*this, record));
        break;
      case Kind::give_back:
        said.code = static_cast<std::uint8_t>(service_->give_back(*this, record));
        break;
      case Kind::end:
        said.code = static_cast<std::uint8_t>(
            service_->end_untrained(*this, record, message + sizeof(Header) + sizeof(Record)));
        break;
      case Kind::outcome:
        said.code = static_cast<std::uint8_t>(service_->outcome(record));
        break;
      case Kind::cancel_take:
        service_->cancel_take(*this, record.slot);
        continue;
      case Kind::renew:  // its message is the sign of life
        continue;
      case Kind::bye:  // everything in front of it is done
        break;
      default:  // `control_fault` lets none pass; a kind that only one of the two knows is not taken for another
        end(End::garbage, "a record of unknown kind");
        return true;
    }
    store(first + now.answers++ * sizeof(Answer), said);
    if (now.hashing != nullptr && !hash(left)) return false;
  }
  finish_reply(header);
  service_->answering_ = std::move(answering_);
  return true;
}

// The range of the last answer; false: it has more bytes than are left for this turn.
bool Connection::hash(std::uint64_t& left) {
  Answering& now = *answering_;
  const std::uint64_t bytes = std::min(now.unhashed, left);
  now.hashed.update(now.hashing, bytes);
  now.hashing += bytes;
  now.unhashed -= bytes;
  left -= bytes;
  if (now.unhashed != 0) return false;
  now.hashing = nullptr;
  std::byte* const at = now.reply->status.data() + sizeof(Header) + (now.answers - 1) * sizeof(Answer);
  auto said = load<Answer>(at);
  said.checksum = now.hashed.digest();
  store(at, said);
  return true;
}

void Connection::finish_reply(const Header& asked) {
  Answering& now = *answering_;
  if (now.answers == 0) return service_->give_back(std::move(now.reply));
  Reply& reply = *now.reply;
  std::size_t pieces = 1, joined_bytes = 0;
  reply.joined_count = 0;
  for (std::size_t each = 0; each < now.count && now.join; ++each) {
    const Payload& payload = now.payloads[each];
    if (payload.small == nullptr) continue;
    auto said = load<Answer>(payload.small);
    said.flags |= kJoined;
    store(payload.small, said);
    reply.joined[reply.joined_count++] = payload.attempt;
    if (payload.length == 0) continue;
    reply.pieces[pieces++] = {service_->ring_.payload(payload.attempt->slot) + payload.offset, payload.length};
    joined_bytes += payload.length;
  }
  const std::size_t head = sizeof(Header) + now.answers * sizeof(Answer);
  store(reply.status.data(),
        Header{0, kVersion, static_cast<std::uint8_t>(Kind::status), static_cast<std::uint16_t>(now.answers),
               asked.number, static_cast<std::uint32_t>(joined_bytes), 0});
  seal(reply.status.data(), head);
  reply.pieces[0] = {reply.status.data(), head};
  send_reply(std::move(now.reply), asked.number, pieces);
  FAULT_POINT("serve.answered");
  for (std::size_t each = 0; each < now.count; ++each) {
    const Payload& payload = now.payloads[each];
    if (now.join && payload.small != nullptr) continue;
    ++unsent_;
    endpoint_->send(service_->ring_.payload(payload.attempt->slot) + payload.offset, payload.length,
                    tag_of(client_base_, asked.number, 1 + payload.index),
                    {&Connection::payload_sent, payload.attempt}, service_->mapping_, UCS_MEMORY_TYPE_HOST,
                    service_->registered_);
    FAULT_POINT("serve.sending");
  }
}

void Connection::send_reply(std::shared_ptr<Reply> reply, std::uint32_t number, std::size_t pieces) {
  Reply& going = *reply;
  going.connection = this;
  ++unsent_;
  const Waiter waiter{&Connection::reply_sent, &going};
  const std::uint64_t tag = tag_of(client_base_, number);
  if (pieces == 1)
    endpoint_->send(going.pieces[0].buffer, going.pieces[0].length, tag, waiter, std::move(reply));
  else
    endpoint_->send_pieces(going.pieces.data(), pieces, tag, waiter, std::move(reply));
}

void Connection::reply_sent(void* self, std::uint32_t, ucs_status_t status, std::size_t) {
  auto& reply = *static_cast<Reply*>(self);
  Connection& connection = *reply.connection;
  for (std::size_t each = 0; each < reply.joined_count; ++each) connection.service_->sent(*reply.joined[each], status);
  if (status == UCS_OK) connection.service_->give_back(reply.shared_from_this());  // else UCX may have it for ever
  connection.sent(status);
}

void Connection::payload_sent(void* self, std::uint32_t, ucs_status_t status, std::size_t) {
  auto& attempt = *static_cast<Attempt*>(self);
  Connection& connection = *attempt.connection;
  connection.service_->sent(attempt, status);
  connection.sent(status);
}

void Connection::sent(ucs_status_t status) {
  --unsent_;
  if (over_) return;
  if (status != UCS_OK && endpoint_->alive()) {
    // A client that aborted is often seen by its sends first, a moment before UCX says that it is gone.
    if (is_of_the_peer(status)) return end(End::gone, "the peer disconnected");
    return end(End::internal, "UCX refused to send");
  }
  if (has_work()) service_->engine().defer(*this);  // it may have been held up
}

// --- connection: attempts and the end -----------------------------------------------------------------------
void Connection::end_consumed() {
  const Ring::InUse use(service_->ring_);
  for (Attempt* each = first_; each != nullptr;) {
    Attempt* const next = each->next;
    if (each->idle() && service_->consumed_elsewhere(*each)) service_->end(*each);
    each = next;
  }
}

// Where what becomes of its claims is noted, and by which a writer that closes knows of it. As soon as there is room; a
// client that comes when nothing is left hears that at once.
void Connection::join_takers() {
  if (!takes_ || taker_ >= 0) return;
  const Ring::InUse use(service_->ring_);
  if (!service_->ring_.drained()) taker_ = service_->ring_.open_taker(taker_token(tag_base_, client_base_));
}

// What waits for a payload would get one that its client, who closes or has stopped, does not train on.
void Connection::part(bool again) {
  parts_ = true, again_ = again, waiting_ = 0;
  service_->forget(*this);
}

// It takes payloads: when its next message comes depends on what is written, so that a spin for it does not pay.
void Connection::expect_no_more() {
  if (std::exchange(expected_, false)) --service_->engine().expecting;
}

long Connection::expire(double before) {
  const Ring::InUse use(service_->ring_);
  const bool silent = holder_gone(heard_ns_, lease_ns_, true, monotonic_ns());
  const auto late = [&](const Attempt& each) {
    return each.hold == Attempt::Hold::claim ? silent : each.sent_by < before && !answering_;
  };
  for (const Attempt* each = first_; each != nullptr; each = each->next)
    if (late(*each) && !each->idle()) return -1;
  long ended = 0;
  for (Attempt* each = first_; each != nullptr;) {
    Attempt* const next = each->next;
    if (late(*each)) {
      service_->end(*each);
      ++ended;
    }
    each = next;
  }
  // A silent client would be given the same payloads again and again.
  if (ended != 0) service_->cancel_takes(*this);
  return ended;
}

void Connection::end(End how, const char* reason) {
  if (over_) return;
  over_ = true;
  reason_ = reason;
  expect_no_more();
  service_->engine().emit({std::exchange(ended_, nullptr), static_cast<long>(how)});
}

void Connection::close() {
  if (closed_) return;
  closed_ = true;
  end(End::gone, "closed by this side");
  endpoint_->abort();
  service_->engine().forget(*this);
  service_->of_base_.erase(tag_base_);
  service_->forget(*this);
  while (!ahead_.empty()) service_->engine().drop(take_ahead().message);
  answering_.reset();
  while (first_ != nullptr) service_->end(*first_);
  const Ring::InUse use(service_->ring_);
  if (again_)
    service_->ring_.lose_taker(taker_);
  else
    service_->ring_.close_taker(taker_);
}

}  // namespace transport::ucp
