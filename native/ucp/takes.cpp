#include "ucp/takes.hpp"

#include <array>
#include <bit>
#include <stdexcept>
#include <utility>
#include <vector>

#include "common/checksum.hpp"
#include "common/fault.hpp"

namespace transport::ucp {

class TakeOperation final : public Deferred, public std::enable_shared_from_this<TakeOperation> {
 public:
  TakeOperation(std::shared_ptr<Link> link, void* token, const TakeTerms& terms, TakeRoom room)
      : engine_(link->endpoint_->engine()),
        link_(std::move(link)),
        token_(token),
        terms_(terms),
        room_(std::move(room)),
        number_(link_->next_number_++) {}
  ~TakeOperation() override {
    if (queued()) engine_.forget(*this);
  }

  std::uint32_t start() {
    self_ = shared_from_this();
    ++link_->under_way_;
    Endpoint& endpoint = *link_->endpoint_;
    endpoint.receive(room_.data, room_.size, tag_of(link_->tag_base_, number_), {&TakeOperation::arrived, this}, self_);
    store(control_.data(), Header{0, kVersion, static_cast<std::uint8_t>(Kind::control), 1, number_, 0, 0});
    store(control_.data() + sizeof(Header),
          Record{static_cast<std::uint8_t>(Kind::take), terms_.rank, terms_.most_attempts, terms_.most, terms_.wait_ms,
                 terms_.joined_most, std::bit_cast<std::uint64_t>(terms_.oldest_version),
                 length_of_take(terms_.most_bytes, terms_.told)});
    seal(control_.data(), control_.size());
    endpoint.send(control_.data(), control_.size(), tag_of(link_->their_base_, number_), {&TakeOperation::sent, this},
                  self_);
    FAULT_POINT("read.asked");  // no spin for the answer: it may come when the next payload is written
    const std::uint32_t number = number_;
    one_less();
    return number;
  }

 private:
  static void sent(void* self, std::uint32_t, ucs_status_t status, std::size_t) {
    auto& operation = *static_cast<TakeOperation*>(self);
    operation.note(status);
    operation.one_less();
  }
  static void arrived(void* self, std::uint32_t, ucs_status_t status, std::size_t length) {
    auto& operation = *static_cast<TakeOperation*>(self);
    FAULT_POINT("read.answered");
    operation.note(status);
    operation.length_ = length;
    operation.one_less();
  }

  void note(ucs_status_t status) {
    if (status != UCS_OK && failure_ == UCS_OK) failure_ = status;
  }
  void one_less() {
    if (--under_way_ == 0) engine_.defer(*this);
  }

  void run() override {
    const std::shared_ptr<TakeOperation> keep = std::move(self_);
    const std::shared_ptr<Link> link = std::move(link_);
    --link->under_way_;
    engine_.emit(event(*link));
    engine_.release(keep);  // where UCX is not done with it, a request keeps it and its room
  }

  Event event(const Link& link) {
    void* const token = std::exchange(token_, nullptr);
    if (failure_ == UCS_ERR_MESSAGE_TRUNCATED) return {token, kProtocol};
    if (failure_ != UCS_OK) {
      const ucs_status_t seen = link.endpoint_->failure();
      return {token, failure_ == UCS_ERR_CANCELED && seen != UCS_OK ? seen : failure_, nullptr, link.endpoint_};
    }
    if (taken_fault(room_.data, length_, number_, terms_) != nullptr) return {token, kProtocol};
    const auto header = load<Header>(room_.data);
    auto outcomes = std::make_unique<std::vector<long>>();
    outcomes->push_back(code_of(header));
    outcomes->push_back(header.count);
    outcomes->push_back(left_of(header));
    if (terms_.verify) verify(header, *outcomes);
    return {token, 0, std::move(outcomes)};
  }

  void verify(const Header& header, std::vector<long>& outcomes) const {
    std::uint64_t at_bytes = length_ - header.joined_bytes, joined = 0;
    for (std::size_t at = 0; at < header.count; ++at) {
      const Taken taken = taken_at(room_.data, at);
      if ((taken.flags & kJoined) == 0) continue;
      joined = aligned_taken(joined);
      if (checksum(room_.data + at_bytes + joined, taken.length) != taken.checksum)
        outcomes.push_back(static_cast<long>(at));
      joined += taken.length;
    }
  }

  Engine& engine_;
  std::shared_ptr<Link> link_;           // while under way, and with it the engine
  std::shared_ptr<TakeOperation> self_;  // likewise
  void* token_;
  const TakeTerms terms_;
  TakeRoom room_;
  const std::uint32_t number_;
  unsigned under_way_ = 3;  // the message, its answer, and `start` itself: requests may complete at once
  ucs_status_t failure_ = UCS_OK;
  std::size_t length_ = 0;
  std::array<std::byte, sizeof(Header) + sizeof(Record)> control_{};
};

std::uint32_t Link::take(void* token, const TakeTerms& terms, TakeRoom room) {
  return std::make_shared<TakeOperation>(shared_from_this(), token, terms, std::move(room))->start();
}

}  // namespace transport::ucp
