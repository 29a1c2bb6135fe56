// Claims of a ring.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "bindings/batches.hpp"
#include "bindings/owned_claim.hpp"
#include "bindings/ring_bindings.hpp"
#include "ring/futex_any.hpp"
#include "ring/ring.hpp"

namespace transport::python {

using namespace nb::literals;

namespace {

constexpr const char* kEndings[] = {"discarded", "dead", "aged"};

// What was claimed and has no object yet. It goes back where making the objects fails.
struct Unowned {
  Ring& ring;
  std::vector<Claimed> claims;
  std::size_t next = 0;

  ~Unowned() {
    for (; next < claims.size(); ++next) OwnedClaim(ring, claims[next]);
  }
};

// With the GIL but for sleeping, as every transition (ring.hpp). Python's signal handlers run while nothing is claimed.
void claim(Unowned& into, std::size_t most, double timeout_s, unsigned rank, std::optional<std::uint64_t> most_bytes,
           std::optional<std::int64_t> oldest_version, unsigned most_attempts, const std::string& consumer) {
  Ring& ring = into.ring;
  const Asked any;
  const Asked asked{rank, most, most_bytes.value_or(any.most_bytes), oldest_version.value_or(any.oldest_version),
                    most_attempts, consumer};
  const Deadline deadline(timeout_s);
  for (;;) {
    EventWord& published = ring.published();
    const std::uint32_t before = seen(published);
    if (ring.claim(asked, into.claims) > 0) return;
    const std::uint64_t left_ns = deadline.left_ns();
    if (left_ns == 0) return;
    const std::uint64_t now_ns = monotonic_ns(), due_ns = ring.next_due_ns(rank);
    const std::uint64_t wait_ns = due_ns <= now_ns ? 0 : std::min(left_ns, due_ns - now_ns);
    const std::shared_ptr<Mapping> keep = ring.mapping();
    sleep_without_gil(published, before, Deadline(static_cast<double>(wait_ns) * 1e-9));
  }
}

nb::object claim_batch(nb::handle_t<Ring> ring, std::size_t most, double timeout_s, unsigned rank,
                       std::optional<std::uint64_t> most_bytes, std::optional<std::int64_t> oldest_version,
                       unsigned most_attempts, const std::string& consumer) {
  Unowned found{*nb::inst_ptr<Ring>(ring), {}};
  claim(found, most, timeout_s, rank, most_bytes, oldest_version, most_attempts, consumer);
  std::vector<OwnedClaim> owned;
  owned.reserve(found.claims.size());
  for (; found.next < found.claims.size(); ++found.next) owned.emplace_back(found.ring, found.claims[found.next]);
  return claimed_batch(ring, std::move(owned));
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
    const GilReleased release;
    sleep_on_any(words, counts, Deadline(timeout_s));
  }
  check_signals();
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
  nb::class_<Deadline>(module, "Deadline", nb::is_final(), "A point of the monotonic clock.")
      .def(nb::init<double>(), "timeout_s"_a)
      .def_prop_ro("left_s", [](const Deadline& deadline) { return static_cast<double>(deadline.left_ns()) * 1e-9; });
  module.attr("NO_VERSION") = kNoVersion;
  module.attr("MAX_ATTEMPTS") = kMostAttemptsAsked;
}

void bind_claims(nb::class_<Ring>& ring) {
  ring.def_static("wait_any", wait_any, "rings"_a, "seen"_a, "timeout_s"_a, "bell"_a = nb::none(), "rung"_a = 0u);
  ring.def("claim_batch", claim_batch, "most"_a, "timeout_s"_a, nb::kw_only(), "rank"_a = 0u,
           "most_bytes"_a = nb::none(), "oldest_version"_a = nb::none(), "most_attempts"_a = 0u,
           "consumer"_a = "")
      .def(
          "set_lease", [](Ring& r, std::optional<double> lease_s) { r.set_lease(duration_ns(lease_s.value_or(0.0))); },
          "lease_s"_a.none())
      .def("heard", &Ring::heard)
      .def(
          "outcome",
          [](Ring& r, std::uint64_t token, std::uint32_t slot, std::uint32_t generation, unsigned rank,
             unsigned attempts) {
            const ClaimId claim{slot, generation, rank, attempts};
            Outcome found = r.outcome(token, claim);
            if (found == Outcome::undecided && r.reclaim() > 0) found = r.outcome(token, claim);
            return static_cast<unsigned>(found);
          },
          "token"_a, "slot"_a, "generation"_a, "rank"_a, "attempts"_a)
      .def(
          "due_s",
          [](const Ring& r, unsigned rank) {
            const std::uint64_t due_ns = r.next_due_ns(rank), now_ns = monotonic_ns();
            return due_ns <= now_ns ? 0.0 : static_cast<double>(due_ns - now_ns) * 1e-9;
          },
          "rank"_a)
      .def("claim_word", claim_word, "slot"_a, "rank"_a)
      .def("depth", depth, "rank"_a)
      .def("failures", failures);
}

}  // namespace transport::python
