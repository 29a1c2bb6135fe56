#include "ucp/reading.hpp"

#include <limits>
#include <stdexcept>

#include "ucp/answers.hpp"
#include "common/checksum.hpp"
#include "common/fault.hpp"
#include "common/text.hpp"

namespace transport::ucp {

// One message to the listener and everything that comes back for it.
class Operation final : public Deferred, public std::enable_shared_from_this<Operation> {
 public:
  explicit Operation(Engine& engine) : engine_(engine) {}
  // It may die on any thread, and is queued only on its own.
  ~Operation() override {
    if (queued()) engine_.forget(*this);
  }

  // --- starting -----------------------------------------------------------------------------------
  void open(std::shared_ptr<Link> link, void* token, std::uint32_t number, std::size_t before, std::size_t asked) {
    link_ = std::move(link);
    token_ = token;
    number_ = number;
    before_ = before;
    asked_ = asked;
    under_way_ = 1;  // this call itself: requests may complete at once
    failure_ = UCS_OK;
    protocol_ = each_ = false;
    expects_ = asked != 0;
    records_ = text_bytes_ = 0;
    wants_.clear();
    outcomes_.assign(asked, 0);
    if (control_.size() < kControlBytes) control_.resize(kControlBytes);
    status_.resize(sizeof(Header) + asked * sizeof(Answer));
    self_ = shared_from_this();
    ++link_->under_way_;
    if (expects_) ++engine_.expecting;
  }

  void add(const Record& record) {
    store(control_.data() + sizeof(Header) + records_ * sizeof(Record), record);
    ++records_;
  }

  // Behind the only record.
  void add(std::string_view text) {
    std::memcpy(control_.data() + sizeof(Header) + sizeof(Record) + text_bytes_, text.data(), text.size());
    text_bytes_ += text.size();
  }

  // Of claims that end. No thread spins for the answer: a client that takes payloads goes on meanwhile.
  void tell_each() {
    each_ = true;
    if (std::exchange(expects_, false)) --engine_.expecting;
  }

  void add(Want&& want) {
    const Kind kind = want.range ? Kind::read_range : Kind::read;
    const auto begin = static_cast<std::uint32_t>(want.offset / kRangeUnit);
    add(Record{static_cast<std::uint8_t>(kind), want.rank, 0, want.slot, want.generation, begin, want.key, want.size});
    wants_.push_back(std::move(want));
  }

  void post_receives() {
    pieces_.clear();
    pieces_.push_back({status_.data(), status_.size()});
    requests_.assign(wants_.size(), nullptr);
    for (std::size_t at = 0; at < wants_.size(); ++at) {
      Want& want = wants_[at];
      if (!link_->small(want.size)) {
        receive_payload(at);
      } else if (want.size != 0) {
        pieces_.push_back({want.data, want.size});
      }
    }
    ++under_way_;
    const ucp_tag_t tag = tag_of(link_->tag_base_, number_);
    if (pieces_.size() > 1)
      endpoint().receive_pieces(pieces_.data(), pieces_.size(), tag, {&Operation::status_arrived, this}, self_);
    else
      endpoint().receive(status_.data(), status_.size(), tag, {&Operation::status_arrived, this}, self_);
  }

  std::uint32_t send() {
    if (asked_ != 0) post_receives();
    const std::size_t length = sizeof(Header) + records_ * sizeof(Record) + text_bytes_;
    store(control_.data(), Header{0, kVersion, static_cast<std::uint8_t>(Kind::control),
                                  static_cast<std::uint16_t>(records_), number_, 0, 0});
    seal(control_.data(), length);
    ++under_way_;
    endpoint().send(control_.data(), length,
                    tag_of(link_->their_base_, number_), {&Operation::control_sent, this}, self_);
    FAULT_POINT("read.asked");
    engine_.expect_soon();
    one_less();
    return number_;
  }

 private:
  Endpoint& endpoint() const { return *link_->endpoint_; }

  void receive_payload(std::size_t at) {
    Want& want = wants_[at];
    ++under_way_;
    Request* const request = endpoint().receive(
        want.data, want.size, tag_of(link_->tag_base_, number_, static_cast<std::uint32_t>(1 + before_ + at)),
        {&Operation::payload_arrived, this, static_cast<std::uint32_t>(at)}, self_, want.memory);
    requests_[at] = request;
  }

  // --- what comes back ----------------------------------------------------------------------------
  static void control_sent(void* self, std::uint32_t, ucs_status_t status, std::size_t) {
    auto& operation = *static_cast<Operation*>(self);
    operation.note(status);
    operation.one_less();
  }

  static void status_arrived(void* self, std::uint32_t, ucs_status_t status, std::size_t length) {
    auto& operation = *static_cast<Operation*>(self);
    FAULT_POINT("read.answered");
    operation.note(status);
    if (status == UCS_OK) operation.read_status(length);
    if (operation.protocol_ || status != UCS_OK) operation.take_back_all();
    operation.one_less();
  }

  static void payload_arrived(void* self, std::uint32_t at, ucs_status_t status, std::size_t length) {
    auto& operation = *static_cast<Operation*>(self);
    operation.requests_[at] = nullptr;
    const bool taken_back = status == UCS_ERR_CANCELED && (operation.outcomes_[at] != 0 || operation.protocol_);
    if (!taken_back) operation.note(status);
    if (status == UCS_OK && length != operation.wants_[at].size) operation.outcomes_[at] = kWrongLength;
    operation.one_less();
  }

  void note(ucs_status_t status) {
    if (status != UCS_OK && failure_ == UCS_OK) failure_ = status;
  }

  // Everything in the message is checked before it is believed.
  void read_status(std::size_t length) {
    protocol_ = true;  // until it is found to fit
    const std::byte* const said = status_.data();
    if (status_fault(said, length, number_, before_, asked_) != nullptr) return;
    const auto size_of = [this](std::size_t at) { return wants_[at].size; };
    if (joined_fault(said, length, wants_.size(), link_->inline_limit_, size_of) != nullptr) return;
    protocol_ = false;
    for (std::size_t at = 0; at < asked_; ++at) {
      const Answer answer = answer_at(said, at);
      if (outcomes_[at] == 0) outcomes_[at] = answer.code;  // else its payload was here first, and too short
      if (wants_.empty()) {  // of `ask`
        value_ = static_cast<long>(answer.value);
        continue;
      }
      if (answer.code == 0 && answer.length != wants_[at].size) outcomes_[at] = kWrongLength;
      if (wants_[at].range) wants_[at].checksum = answer.checksum;
      if (outcomes_[at] != 0) {
        take_back(at);
      } else if (link_->small(wants_[at].size) && (answer.flags & kJoined) == 0) {
        receive_payload(at);
      }
    }
  }

  void take_back(std::size_t at) {
    if (requests_[at] != nullptr) endpoint().cancel(*requests_[at]);
  }
  void take_back_all() {
    for (std::size_t at = 0; at < requests_.size(); ++at) take_back(at);
  }

  void one_less() {
    if (--under_way_ == 0) engine_.defer(*this);
  }

  // --- the end: everything is here, or nothing more will come --------------------------------------
  void run() override {
    FAULT_POINT("read.arrived");
    const std::shared_ptr<Operation> keep = std::move(self_);
    const std::shared_ptr<Link> link = std::move(link_);
    --link->under_way_;
    if (expects_) --engine_.expecting;
    const bool good = failure_ == UCS_OK && !protocol_;
    if (good)
      for (std::size_t at = 0; at < wants_.size(); ++at) {
        const Want& want = wants_[at];
        if (outcomes_[at] == 0 && want.verify && checksum(want.data, want.size) != want.checksum)
          outcomes_[at] = kWrongChecksum;
      }
    if (token_ != nullptr) engine_.emit(event(link));
    if (good) {
      for (Want& want : wants_) engine_.release(std::move(want.keep));
      wants_.clear();
      link->idle_.push_back(keep);
    } else {
      engine_.release(keep);  // UCX may not be out of it before the link is aborted: not to be used again
    }
  }

  Event event(const std::shared_ptr<Link>& link) {
    void* const token = std::exchange(token_, nullptr);
    if (failure_ != UCS_OK) {
      const ucs_status_t seen = link->endpoint_->failure();
      return {token, failure_ == UCS_ERR_CANCELED && seen != UCS_OK ? seen : failure_, nullptr, link->endpoint_};
    }
    if (protocol_) return {token, kProtocol};
    if (wants_.empty() && !each_)
      return {token, 0, std::make_unique<std::vector<long>>(std::vector<long>{outcomes_[0], value_})};
    if (wants_.size() == 1) return {token, outcomes_[0]};
    return {token, 0, std::make_unique<std::vector<long>>(outcomes_)};
  }

  Engine& engine_;
  std::shared_ptr<Link> link_;
  std::shared_ptr<Operation> self_;  // while under way
  void* token_ = nullptr;
  std::uint32_t number_ = 0;
  std::size_t before_ = 0, asked_ = 0, records_ = 0;  // records without an answer, with one, all
  std::size_t text_bytes_ = 0;
  std::size_t under_way_ = 0;
  ucs_status_t failure_ = UCS_OK;
  bool protocol_ = false, each_ = false, expects_ = false;
  long value_ = 0;
  std::vector<std::byte> control_, status_;
  std::vector<Want> wants_;
  std::vector<long> outcomes_;
  std::vector<ucp_dt_iov_t> pieces_;
  std::vector<Request*> requests_;  // of payloads that come as messages of their own
};

Link::Link(std::shared_ptr<Endpoint> endpoint, std::uint32_t tag_base, std::uint32_t their_base,
           std::uint64_t inline_limit)
    : endpoint_(std::move(endpoint)),
      tag_base_(tag_base),
      their_base_(their_base),
      inline_limit_(inline_limit) {}

Link::~Link() = default;

std::shared_ptr<Operation> Link::begin(void* token, std::span<const Record> before, std::size_t asked) {
  if (before.size() + asked > kMostRecords || before.size() + asked == 0)
    throw std::invalid_argument("a message has 1 to 63 records");
  if (next_number_ >= kMessageNumbers) throw std::invalid_argument("the connection has no message numbers left");
  std::shared_ptr<Operation> operation;
  if (idle_.empty()) {
    operation = std::make_shared<Operation>(endpoint_->engine());
  } else {
    operation = std::move(idle_.back());
    idle_.pop_back();
  }
  operation->open(shared_from_this(), token, next_number_++, before.size(), asked);
  for (const Record& record : before) operation->add(record);
  return operation;
}

std::uint32_t Link::read(void* token, std::span<Want> wants, std::span<const Record> acks) {
  for (const Want& want : wants)
    if (want.memory != UCS_MEMORY_TYPE_HOST && (small(want.size) || want.verify))
      throw std::invalid_argument("device memory needs a payload above inline_limit and no checksum here");
  for (const Want& want : wants)
    if (want.range && (want.offset % kRangeUnit != 0 ||
                       want.offset / kRangeUnit > std::numeric_limits<std::uint32_t>::max()))
      throw std::invalid_argument("a range begins at a multiple of 64");
  const auto operation = begin(token, acks, wants.size());
  for (Want& want : wants) operation->add(std::move(want));
  return operation->send();
}

std::uint32_t Link::ask(void* token, const Record& record, std::span<const Record> before) {
  const auto operation = begin(token, before, 1);
  operation->add(record);
  return operation->send();
}

std::uint32_t Link::settle(void* token, std::span<const Record> records) {
  const auto operation = begin(token, {}, records.size());
  for (const Record& record : records) operation->add(record);
  operation->tell_each();
  return operation->send();
}

std::uint32_t Link::end(void* token, Record record, std::string_view reason, std::string_view consumer) {
  reason = whole_text(reason, kMostReason);
  consumer = whole_text(consumer, kMostConsumer);
  record.key = std::uint64_t{consumer.size()} << 32 | reason.size();
  const auto operation = begin(token, {}, 1);
  operation->add(record);
  operation->add(reason);
  operation->add(consumer);
  operation->tell_each();
  return operation->send();
}

std::uint32_t Link::tell(std::span<const Record> records) {
  return begin(nullptr, records, 0)->send();
}

}  // namespace transport::ucp
