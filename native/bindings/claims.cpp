// Claims: the ring as the queue.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "bindings/batches.hpp"
#include "bindings/ring_bindings.hpp"
#include "ring/futex_any.hpp"
#include "ring/ring.hpp"

namespace transport::python {

using namespace nb::literals;

namespace {

constexpr const char* kEndings[] = {"discarded", "dead", "aged", "lost"};

Ended ending(const std::string& name) {
  const auto found = std::find(std::begin(kEndings), std::end(kEndings), name);
  if (found == std::end(kEndings)) fail(Fault::argument, "a delivery does not end " + name);
  return static_cast<Ended>(found - std::begin(kEndings));
}

// With the GIL but for sleeping, as every transition (ring.hpp). Dead claimers may hold all that is there.
std::vector<Claimed> claim(Ring& ring, std::size_t most, double timeout_s, unsigned rank, std::uint64_t most_bytes,
                           std::int64_t oldest_version, unsigned most_attempts, const std::string& consumer,
                           double most_held_s) {
  const auto most_held_ns = static_cast<std::uint64_t>(std::clamp(most_held_s, 0.0, 1e9) * 1e9);
  const Asked asked{rank, most, most_bytes, oldest_version, most_attempts, consumer, most_held_ns};
  const Deadline deadline(timeout_s);
  std::vector<Claimed> claimed;
  bool woken = false;
  for (;;) {
    EventWord& published = ring.published();
    const std::uint32_t before = seen(published);
    if (ring.claim(asked, claimed) > 0) return claimed;
    if (!std::exchange(woken, false) && ring.reclaim() > 0) continue;
    const std::uint64_t left_ns = deadline.left_ns();
    if (left_ns == 0) return claimed;
    const std::uint64_t now_ns = monotonic_ns(), due_ns = ring.next_due_ns(rank);
    const std::uint64_t wait_ns = due_ns <= now_ns ? 0 : std::min(left_ns, due_ns - now_ns);
    const std::shared_ptr<Mapping> keep = ring.mapping();
    woken = sleep_without_gil(published, before, Deadline(static_cast<double>(wait_ns) * 1e-9));
  }
}

// An interrupt may come before the caller has what is returned; what it will find is in its list.
std::vector<Claimed> claim_into(Ring& ring, std::size_t most, double timeout_s, unsigned rank, std::uint64_t most_bytes,
                                std::int64_t oldest_version, unsigned most_attempts, const std::string& consumer,
                                double most_held_s, const std::optional<nb::list>& into) {
  std::vector<Claimed> claimed = claim(ring, most, timeout_s, rank, most_bytes, oldest_version, most_attempts, consumer,
                                       most_held_s);
  if (into)
    for (const Claimed& one : claimed) nb::borrow<nb::list>(*into).append(one.id);
  return claimed;
}

nb::object claim_batch(nb::handle_t<Ring> ring, std::size_t most, double timeout_s, unsigned rank,
                       std::uint64_t most_bytes, std::int64_t oldest_version, unsigned most_attempts,
                       const std::string& consumer, double most_held_s) {
  return claimed_batch(ring, claim(*nb::inst_ptr<Ring>(ring), most, timeout_s, rank, most_bytes, oldest_version,
                                   most_attempts, consumer, most_held_s));
}

// Until one of the rings has something new to claim, an interval for looking again is over, or the time is.
constexpr std::size_t kMostWaited = kMostWords - 1;  // and a bell

// Wakes threads of this process that wait for rings.
class Bell {
 public:
  std::uint32_t rung() const { return seen(word_); }
  void ring() { advance(word_); }
  EventWord& word() { return word_; }

 private:
  EventWord word_{};
};

void wait_any(const std::vector<Ring*>& rings, const std::vector<std::uint32_t>& before, double timeout_s, Bell* bell,
              std::uint32_t rung) {
  if (rings.size() != before.size() || rings.empty() || rings.size() > kMostWaited)
    fail(Fault::argument, std::to_string(rings.size()) + " rings to wait for, 1 to " + std::to_string(kMostWaited));
  std::vector<std::shared_ptr<Mapping>> keep;
  std::vector<EventWord*> words;
  std::vector<std::uint32_t> counts = before;
  if (bell != nullptr) {
    words.push_back(&bell->word());
    counts.insert(counts.begin(), rung);
  }
  for (const Ring* ring : rings) {
    words.push_back(&ring->published());
    keep.push_back(ring->mapping());
  }
  {
    const nb::gil_scoped_release release;
    sleep_on_any(words, counts, Deadline(timeout_s));
  }
  check_signals();
}

nb::str describe(const ClaimId& id) {
  return nb::str("<ClaimId {}@{} rank {} attempt {}>").format(id.slot, id.generation, id.rank, id.attempts);
}
nb::str describe_claim(const Claimed& claimed) {
  return nb::str("<NativeClaim {}@{} rank {} attempt {}, {} bytes>")
      .format(claimed.id.slot, claimed.id.generation, claimed.id.rank, claimed.id.attempts, claimed.length);
}

// Which of a batch were accepted, in one call.
std::vector<bool> finish_all(Ring& ring, const std::vector<ClaimId>& claims, bool keep_pins, bool arrived) {
  std::vector<bool> accepted;
  accepted.reserve(claims.size());
  for (const ClaimId& claim : claims) accepted.push_back(ring.finish(claim, keep_pins, arrived));
  return accepted;
}

nb::dict depth(const Ring& ring, unsigned rank) {
  const Ring::Depth depth = ring.depth(rank);
  nb::dict counts;
  counts["ready"] = depth.ready;
  counts["claimed"] = depth.claimed;
  for (std::size_t i = 0; i < depth.tallies.size(); ++i) counts[kTallyNames[i]] = depth.tallies[i];
  return counts;
}

nb::tuple claim_word(const Ring& ring, std::uint64_t slot, unsigned rank) {
  const ClaimWord word = ring.claim_word(slot, rank);
  return nb::make_tuple(static_cast<int>(word.holder()) - 1, word.attempts());
}

nb::list failures(const Ring& ring) {
  nb::list all;
  for (const Failure& failure : ring.failures())
    all.append(nb::make_tuple(
        failure.slot, failure.generation, failure.rank, failure.attempts, kEndings[static_cast<unsigned>(failure.how)],
        nb::steal(PyUnicode_DecodeUTF8(failure.reason.data(), static_cast<Py_ssize_t>(failure.reason.size()), "replace")),
        nb::steal(
            PyUnicode_DecodeUTF8(failure.consumer.data(), static_cast<Py_ssize_t>(failure.consumer.size()), "replace")),
        failure.sequence));
  return all;
}

}  // namespace

void bind_claim_types(nb::module_& module) {
  module.attr("MAX_WAITED") = kMostWaited;
  nb::class_<Bell>(module, "Bell", nb::is_final(), "Wakes threads of this process that wait for rings.")
      .def(nb::init<>())
      .def_prop_ro("rung", &Bell::rung)
      .def("ring", &Bell::ring);
  module.attr("NO_VERSION") = kNoVersion;
  module.attr("MAX_ATTEMPTS") = ClaimWord::kMostAttempts;

  nb::class_<ClaimId>(module, "ClaimId", nb::is_final(), "Which claim: of a payload, a rank, an attempt.")
      .def(nb::init<std::uint32_t, std::uint32_t, unsigned, unsigned>(), "slot"_a, "generation"_a, "rank"_a,
           "attempts"_a)
      .def_ro("slot", &ClaimId::slot)
      .def_ro("generation", &ClaimId::generation)
      .def_ro("rank", &ClaimId::rank)
      .def_ro("attempts", &ClaimId::attempts)
      .def("__repr__", describe);

  nb::class_<Claimed>(module, "NativeClaim", nb::is_final(), "A claim and what stands beside its payload.")
      .def_ro("id", &Claimed::id)
      .def_prop_ro("slot", [](const Claimed& claimed) { return claimed.id.slot; })
      .def_prop_ro("generation", [](const Claimed& claimed) { return claimed.id.generation; })
      .def_prop_ro("rank", [](const Claimed& claimed) { return claimed.id.rank; })
      .def_prop_ro("attempts", [](const Claimed& claimed) { return claimed.id.attempts; })
      .def_ro("readers", &Claimed::readers)
      .def_ro("length", &Claimed::length)
      .def_ro("checksum", &Claimed::checksum)
      .def_ro("sequence", &Claimed::sequence)
      .def_ro("created_ns", &Claimed::created_ns)
      .def_ro("deadline_ns", &Claimed::deadline_ns)
      .def_ro("policy_version", &Claimed::policy_version)
      .def("__repr__", describe_claim);
}

void bind_claims(nb::class_<Ring>& ring) {
  ring.def_static("wait_any", wait_any, "rings"_a, "seen"_a, "timeout_s"_a, "bell"_a = nb::none(), "rung"_a = 0u);
  ring.def("claim", claim_into, "most"_a, "timeout_s"_a, nb::kw_only(), "rank"_a = 0u,
           "most_bytes"_a = ~std::uint64_t{0}, "oldest_version"_a = kNoVersion, "most_attempts"_a = 0u,
           "consumer"_a = "", "most_held_s"_a = 0.0, "into"_a = nb::none())
      .def("claim_batch", claim_batch, "most"_a, "timeout_s"_a, nb::kw_only(), "rank"_a = 0u,
           "most_bytes"_a = ~std::uint64_t{0}, "oldest_version"_a = kNoVersion, "most_attempts"_a = 0u,
           "consumer"_a = "", "most_held_s"_a = 0.0)
      .def("renew", &Ring::renew, "claim"_a)
      .def(
          "outcome",
          [](Ring& r, std::uint64_t token, const ClaimId& claim) {
            Outcome found = r.outcome(token, claim);
            if (found == Outcome::undecided && r.reclaim() > 0) found = r.outcome(token, claim);
            return static_cast<unsigned>(found);
          },
          "token"_a, "claim"_a)
      .def(
          "finish", [](Ring& r, const ClaimId& claim, bool keep, bool arrived) { return r.finish(claim, keep, arrived); },
          "claim"_a, "keep_pin"_a = false, "arrived"_a = false)
      .def("finish_all", finish_all, "claims"_a, "keep_pins"_a = false, "arrived"_a = false)
      .def(
          "due_s",
          [](const Ring& r, unsigned rank) {
            const std::uint64_t due_ns = r.next_due_ns(rank), now_ns = monotonic_ns();
            return due_ns <= now_ns ? 0.0 : static_cast<double>(due_ns - now_ns) * 1e-9;
          },
          "rank"_a)
      .def("trained", &Ring::trained, "rank"_a, "deliveries"_a)
      .def(
          "give_back",
          [](Ring& r, const ClaimId& claim, double delay_s) {
            return r.give_back(claim, static_cast<std::uint64_t>(std::clamp(delay_s, 0.0, 1e9) * 1e9));
          },
          "claim"_a, "delay_s"_a = 0.0)
      .def(
          "end",
          [](Ring& r, const ClaimId& claim, const std::string& how, const std::string& reason,
             const std::string& consumer) { return r.end(claim, ending(how), reason, consumer); },
          "claim"_a, "how"_a, "reason"_a, "consumer"_a = "")
      .def("holds", &Ring::holds, "claim"_a)
      .def("claim_word", claim_word, "slot"_a, "rank"_a)
      .def("depth", depth, "rank"_a)
      .def("failures", failures);
}

}  // namespace transport::python
