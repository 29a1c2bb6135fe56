// TAKE and the end of claims, for transport/claims/connection.py.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string_view.h>

#include <array>
#include <vector>

#include "ring/segment.hpp"
#include "bindings/ucp_bindings.hpp"
#include "ucp/takes.hpp"

namespace transport::ucp::python {

using namespace nb::literals;

namespace {

std::uint64_t room_for(std::uint64_t most, std::uint64_t most_bytes) {
  return taken_room(most, most_bytes, kNoteCapacity);
}

std::uint32_t take(Link& link, nb::handle token, nb::handle memory, std::uint32_t most, std::uint32_t wait_ms,
                   std::uint64_t most_bytes, std::uint32_t joined_most, std::uint8_t rank, std::int64_t oldest_version,
                   std::uint16_t most_attempts, bool verify, std::uint32_t told) {
  if (most == 0 || most > kMostTaken || most_bytes > kMostTakenBytes || rank >= kRanks || most_attempts > kMostTries)
    throw nb::value_error("a demand that no listener accepts");
  if (link.next_number() >= kMessageNumbers) throw nb::value_error("the link's message numbers are used up");
  Place place = Place::of(memory, true);
  if (place.memory != UCS_MEMORY_TYPE_HOST || place.size < room_for(most, most_bytes))
    throw nb::value_error("host memory with room for the longest answer");
  return link.take(own(token),
                   {most, wait_ms, most_bytes, joined_most, rank, oldest_version, most_attempts, verify, told},
                   {place.data, place.size, std::move(place.keep)});
}

// Of an answer that was found to fit: its rows, where each ticket begins, and whether all payloads are joined.
nb::tuple taken(nb::handle memory, std::size_t count) {
  const BufferView view(memory, false);
  const std::size_t head = sizeof(Header) + count * sizeof(Taken);
  if (count > kMostTaken || view.size() < head) throw nb::value_error("no answer has so many payloads");
  const auto* const message = view.data();
  std::vector<std::uint64_t> notes;
  std::uint64_t at_bytes = head;
  bool whole = true;
  for (std::size_t at = 0; at < count; ++at) {
    const Taken one = taken_at(message, at);
    notes.push_back(at_bytes);
    at_bytes += one.note_bytes;
    whole = whole && (one.flags & kJoined) != 0;
  }
  return nb::make_tuple(nb::bytes(message + sizeof(Header), count * sizeof(Taken)),
                        nb::bytes(notes.data(), notes.size() * sizeof(std::uint64_t)), whole);
}

// `rows` are as in the answers to TAKE: Taken, one behind the other.
std::uint32_t settle(Link& link, nb::handle token, nb::handle rows, std::uint8_t kind, std::uint64_t delay_ms,
                     std::uint64_t key, bool unread) {
  const BufferView memory(rows, false);
  const std::size_t count = memory.size() / sizeof(Taken);
  if (count == 0 || count > kMostRecords || memory.size() != count * sizeof(Taken))
    throw nb::value_error("a message has 1 to 63 records");
  if (link.next_number() >= kMessageNumbers) throw nb::value_error("the link's message numbers are used up");
  std::array<Record, kMostRecords> records{};
  for (std::size_t at = 0; at < count; ++at) {
    const auto taken = load<Taken>(memory.data() + at * sizeof(Taken));
    records[at] = {kind, taken.rank, taken.attempts, taken.slot, taken.generation, unread ? kUnread : 0, key, delay_ms};
  }
  return link.settle(own(token), {records.data(), count});
}

// `row` is one of the rows of `settle`.
std::uint32_t end(Link& link, nb::handle token, nb::handle row, std::uint32_t how, std::string_view reason,
                  std::string_view consumer) {
  const BufferView memory(row, false);
  if (memory.size() != sizeof(Taken)) throw nb::value_error("one row");
  if (!ends_delivery(how)) throw nb::value_error("an end that no listener accepts");
  if (link.next_number() >= kMessageNumbers) throw nb::value_error("the link's message numbers are used up");
  const auto taken = load<Taken>(memory.data());
  return link.end(own(token),
                  {static_cast<std::uint8_t>(Kind::end), taken.rank, taken.attempts, taken.slot, taken.generation, how,
                   0, 0},
                  reason, consumer);
}

}  // namespace

void bind_takes(nb::module_& module, nb::class_<Link>& link) {
  module.attr("MOST_TAKEN") = kMostTaken;
  module.attr("MOST_TAKEN_BYTES") = kMostTakenBytes;
  module.attr("MORE_TO_COME") = kMoreToCome;
  module.def("room_for", room_for, "most"_a, "most_bytes"_a, "Bytes of the longest answer to a TAKE.");
  module.def("taken", taken, "memory"_a, "count"_a);
  link.def("take", take, "token"_a, "memory"_a, nb::kw_only(), "most"_a, "wait_ms"_a, "most_bytes"_a, "joined_most"_a,
           "rank"_a, "oldest_version"_a, "most_attempts"_a, "verify"_a, "told"_a)
      .def("settle", settle, "token"_a, "rows"_a, "kind"_a, "delay_ms"_a = 0, "key"_a = 0, "unread"_a = false)
      .def("end", end, "token"_a, "row"_a, "how"_a, "reason"_a, "consumer"_a)
      .def_prop_ro("token", &Link::token);
}

}  // namespace transport::ucp::python
