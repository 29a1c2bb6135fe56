// The client's side of a connection after its handshake: one CONTROL message, its STATUS, the payloads.
//
//   read ──► receives posted, CONTROL sent ──► STATUS ──► payloads ──► checksums ──► event with the outcome
//                                                └ refused: its receive is taken back
//
// Every receive is posted before its message can have been sent, straight into the payload's destination. Small
// payloads stand behind the answers in the STATUS message itself, unless one of them was refused: then those accepted
// come as messages of their own. After a failure nothing is reused: what UCX may still write into dies with the link.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "ucp/engine.hpp"
#include "ucp/frames.hpp"

namespace transport::ucp {

// One payload to read, and memory of exactly its size.
struct Want {
  std::uint32_t slot, generation;
  std::uint8_t rank;
  std::uint64_t key, size;
  std::byte* data;
  ucs_memory_type_t memory = UCS_MEMORY_TYPE_HOST;  // other kinds only for payloads that are not small
  bool verify = false;                              // against `checksum`; host memory only
  std::uint64_t checksum = 0;
  std::shared_ptr<void> keep;
  // `size` bytes from here on, a multiple of kRangeUnit, and not the whole payload; verified against the answer.
  bool range = false;
  std::uint64_t offset = 0;
};

// Outcomes beside 0 (good) and the listener's refusals (1 to 255).
inline constexpr long kWrongChecksum = 1000;
inline constexpr long kWrongLength = 1001;  // the listener accepted, and announced another length
inline constexpr long kProtocol = 1002;     // of the whole operation: an answer that does not fit its request

class Operation;
class TakeOperation;
struct TakeTerms;
struct TakeRoom;

class Link : public std::enable_shared_from_this<Link> {
 public:
  Link(std::shared_ptr<Endpoint> endpoint, std::uint32_t tag_base, std::uint32_t their_base, std::uint64_t inline_limit);
  ~Link();
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  // Each returns its message number; `token` gets one event. Wants are moved from. At most kMostRecords in all.
  std::uint32_t read(void* token, std::span<Want> wants, std::span<const Record> acks);
  std::uint32_t ask(void* token, const Record& record, std::span<const Record> before);  // outcomes: code, value
  std::uint32_t tell(std::span<const Record> records);
  // Records of one kind that are each answered with a code; outcomes: the codes.
  std::uint32_t settle(void* token, std::span<const Record> records);
  // An END with its texts, which are cut to what a listener accepts; outcomes: one code.
  std::uint32_t end(void* token, Record record, std::string_view reason, std::string_view consumer);
  std::uint32_t take(void* token, const TakeTerms& terms, TakeRoom room);  // takes.hpp
  std::uint64_t token() const { return taker_token(their_base_, tag_base_); }

  std::uint32_t next_number() const { return next_number_; }
  void set_next_number(std::uint32_t number) { next_number_ = number; }
  bool small(std::uint64_t size) const { return size <= inline_limit_; }
  std::size_t under_way() const { return under_way_; }
  bool alive() const { return endpoint_->alive(); }
  // For a request, and a farewell after it.
  bool usable() const { return alive() && next_number_ + 1 < kMessageNumbers; }

 private:
  friend class Operation;
  friend class TakeOperation;
  std::shared_ptr<Operation> begin(void* token, std::span<const Record> before, std::size_t asked);

  const std::shared_ptr<Endpoint> endpoint_;
  const std::uint32_t tag_base_, their_base_;
  const std::uint64_t inline_limit_;
  std::uint32_t next_number_ = 0;
  std::size_t under_way_ = 0;
  std::vector<std::shared_ptr<Operation>> idle_;
};

}  // namespace transport::ucp
