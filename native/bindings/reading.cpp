// Link for transport/client/connections/connection.py.
#include <nanobind/stl/shared_ptr.h>

#include <array>
#include <vector>

#include "bindings/ucp_bindings.hpp"
#include "ucp/reading.hpp"

namespace transport::ucp::python {

using namespace nb::literals;

namespace {

template <typename Number>
Number number_at(const nb::tuple& row, std::size_t at) {
  return nb::cast<Number>(row[at]);
}

// (ticket, rank, destination, checksum or None, where a range begins or None), as link.Want
Want want_of(nb::handle object) {
  const auto row = nb::cast<nb::tuple>(object);
  if (row.size() != 5) throw nb::value_error("a wanted payload has five fields");
  const nb::handle ticket = row[0];
  Want want{};
  want.slot = nb::cast<std::uint32_t>(ticket.attr("slot"));
  want.generation = nb::cast<std::uint32_t>(ticket.attr("generation"));
  want.key = nb::cast<std::uint64_t>(ticket.attr("key"));
  want.size = nb::cast<std::uint64_t>(ticket.attr("size"));
  want.rank = number_at<std::uint8_t>(row, 1);
  const nb::object expected = row[3];
  want.verify = !expected.is_none();
  if (want.verify) want.checksum = nb::cast<std::uint64_t>(expected);
  Place place = Place::of(row[2], true);
  const nb::object offset = row[4];
  want.range = !offset.is_none();
  if (want.range) {
    want.offset = nb::cast<std::uint64_t>(offset);
    if (want.offset > want.size || place.size > want.size - want.offset)
      throw nb::value_error("a range is a part of its payload");
    want.size = place.size;
  }
  if (place.size != want.size) throw nb::value_error("a destination has exactly its payload's size");
  want.data = place.data;
  want.memory = place.memory;
  want.keep = std::move(place.keep);
  return want;
}

// (kind, slot, generation, rank, key, length, attempts, joined_most), as wire.Record, or (ring, slot, generation, rank, key), as acks.Ack
Record record_of(nb::handle object) {
  const auto row = nb::cast<nb::tuple>(object);
  const bool ack = row.size() == 5;
  if (!ack && row.size() != 8) throw nb::value_error("a record has eight fields, an acknowledgement five");
  Record record{};
  record.kind = ack ? static_cast<std::uint8_t>(Kind::ack) : number_at<std::uint8_t>(row, 0);
  record.slot = number_at<std::uint32_t>(row, 1);
  record.generation = number_at<std::uint32_t>(row, 2);
  record.rank = number_at<std::uint8_t>(row, 3);
  record.key = number_at<std::uint64_t>(row, 4);
  if (ack) return record;
  record.length = number_at<std::uint64_t>(row, 5);
  record.attempts = number_at<std::uint16_t>(row, 6);
  record.joined_most = number_at<std::uint32_t>(row, 7);
  return record;
}

// As many as a message carries, without an allocation.
class Records {
 public:
  explicit Records(const nb::list& rows) {
    if (rows.size() > records_.size()) throw nb::value_error("a message has at most 63 records");
    for (nb::handle row : rows) records_[count_++] = record_of(row);
  }
  std::span<const Record> view() const { return {records_.data(), count_}; }

 private:
  std::array<Record, kMostRecords> records_{};
  std::size_t count_ = 0;
};

// Begins an operation that is to tell `token`; one that is refused before it has begun does not tell it.
template <typename Begin>
std::uint32_t begun(nb::handle token, Begin&& begin) {
  void* const owned = own(token);
  try {
    return begin(owned);
  } catch (const std::invalid_argument&) {
    token.dec_ref();
    throw;
  }
}

std::uint32_t read(Link& link, nb::handle token, const nb::list& rows, const nb::list& acks) {
  const Records before(acks);
  if (rows.size() == 0 || rows.size() + before.view().size() > kMostRecords)
    throw nb::value_error("a message has 1 to 63 records");
  if (rows.size() == 1) {
    Want want = want_of(rows[0]);
    return begun(token, [&](void* owned) { return link.read(owned, {&want, 1}, before.view()); });
  }
  std::vector<Want> wants;
  wants.reserve(rows.size());
  for (nb::handle row : rows) wants.push_back(want_of(row));
  return begun(token, [&](void* owned) { return link.read(owned, wants, before.view()); });
}

std::uint32_t ask(Link& link, nb::handle token, nb::handle record, const nb::list& before) {
  const Records told(before);
  const Record asked = record_of(record);
  return begun(token, [&](void* owned) { return link.ask(owned, asked, told.view()); });
}

std::uint32_t tell(Link& link, const nb::list& records) { return link.tell(Records(records).view()); }

}  // namespace

void bind_reading(nb::module_& module) {
  module.attr("WRONG_CHECKSUM") = kWrongChecksum;
  module.attr("WRONG_LENGTH") = kWrongLength;
  module.attr("PROTOCOL") = kProtocol;
  nb::class_<Link> link(module, "Link", nb::is_final(), "The client's side of a connection after the handshake.");
  link.def(nb::new_([](const std::shared_ptr<Endpoint>& endpoint, std::uint32_t tag_base, std::uint32_t their_base,
                       std::uint64_t inline_limit) {
             return std::make_shared<Link>(endpoint, tag_base, their_base, inline_limit);
           }),
           "endpoint"_a, "tag_base"_a, "their_base"_a, "inline_limit"_a)
      .def("read", read, "token"_a, "wants"_a, "acks"_a)
      .def("ask", ask, "token"_a, "record"_a, "before"_a)
      .def("tell", tell, "records"_a)
      .def_prop_rw("next_number", &Link::next_number, &Link::set_next_number)
      .def_prop_ro("alive", &Link::alive)
      .def_prop_ro("usable", &Link::usable)
      .def_prop_ro("under_way", &Link::under_way);
  bind_takes(module, link);
}

}  // namespace transport::ucp::python
