// Creating, taking over, attaching and removing while others do the same, stop, or die at it.
#include <algorithm>
#include <memory>

#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "crash.hpp"

using namespace transport;
using namespace transport::test;

namespace {

// From now on the kernel knows no file without a name, for this process and its children.
void refuse_nameless_files() {
  sock_filter rules[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_openat, 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[2])),
      BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, O_TMPFILE & ~O_DIRECTORY, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EOPNOTSUPP),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{std::size(rules), rules};
  CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
}

}  // namespace

TEST(a_creator_killed_anywhere_without_nameless_files_leaves_what_the_next_one_or_any_process_removes) {
  for (const std::string_view point : points_starting({"create."}, true)) {
    if (point == "create.found" || point == "create.waits") continue;
    for (const bool removed : {false, true}) {
      const NameGuard guard{ring_name("named")};
      CHECK(killed([&] {
        refuse_nameless_files();
        fault::set(index_of(point), SIGKILL, 0);
        Ring::create(guard.name, kSlots, kCapacity, Bytes16{});
      }));
      const bool complete = point == "create.initialised";
      CHECK(refused(Fault::not_ready, [&] { Ring::attach(guard.name, Role::reader, false, true); }) != complete);
      if (removed) {
        CHECK(Segment::unlink_if_dead(guard.name, kGivesUpNone));
        CHECK(refused(Fault::not_found, [&] { Ring::attach(guard.name, Role::reader, false); }));
      }
      CHECK(!killed([&] {
        refuse_nameless_files();
        const auto ring = Ring::create(guard.name, kSlots, kCapacity, Bytes16{});
        CHECK(ring->taken_over() == (complete && !removed));
        check_survivors(*ring);
      }));
    }
  }
}

TEST(nobody_removes_what_a_living_creator_makes_under_its_name) {
  const NameGuard guard{ring_name("made")};
  stopped_at(
      "create.allocated",
      [&] {
        refuse_nameless_files();
        check_survivors(*Ring::create(guard.name, kSlots, kCapacity, Bytes16{}));
      },
      [&] {
        CHECK(!Segment::unlink_if_dead(guard.name, kGivesUpNone) && !Segment::unlink_if_dead(guard.name));
        CHECK(refused(Fault::exists, [&] { Ring::create(guard.name, kSlots, kCapacity, Bytes16{}); }));
      });
}

TEST(a_creator_killed_anywhere_leaves_a_whole_ring_or_nothing) {
  for (const std::string_view point : points_starting({"create."}, true)) {
    if (point == "create.found" || point == "create.waits") continue;  // not passed without an older file; see below
    const NameGuard guard{ring_name("creator")};
    CHECK(killed([&] {
      fault::set(index_of(point), SIGKILL, 0);
      Ring::create(guard.name, kSlots, kCapacity, Bytes16{});
    }));
    const bool complete = point == "create.initialised";
    if (!complete) CHECK(refused(Fault::not_found, [&] { Ring::attach(guard.name, Role::reader, false); }));
    const auto ring = Ring::create(guard.name, kSlots, kCapacity, Bytes16{});
    CHECK(ring->taken_over() == complete);
    check_survivors(*ring);
  }
}

TEST(a_ring_that_is_set_up_is_found_when_it_begins_and_by_those_who_ask_for_it_before) {
  const NameGuard guard{ring_name("set-up")};
  const auto ring = Ring::create(guard.name, kSlots, kCapacity, Bytes16{}, {}, Kept::no, false);
  CHECK(!ring->begun());
  for (const Role role : {Role::observer, Role::writer, Role::listener, Role::reader})
    CHECK(refused(Fault::not_ready, [&] { Ring::attach(guard.name, role, false); }));
  const auto listener = Ring::attach(guard.name, Role::listener, false, true);
  CHECK(!listener->begun() && ring->owners().size() == 2);
  ring->begin();
  CHECK(ring->begun() && listener->begun() && Ring::attach(guard.name, Role::reader, false)->begun());
  ring->close();
  CHECK(ring->begun());
}

TEST(a_writer_that_takes_a_ring_over_takes_its_end_back_when_it_begins) {
  const NameGuard guard{ring_name("successor")};
  Ring::create(guard.name, kSlots, kCapacity, Bytes16{})->end_data();
  const auto seen = Ring::attach(guard.name, Role::observer, false);
  Ring::create(guard.name, kSlots, kCapacity, Bytes16{}, {}, Kept::no, false);  // its set-up fails
  CHECK(seen->ended());
  const auto ring = Ring::create(guard.name, kSlots, kCapacity, Bytes16{});
  CHECK(ring->taken_over() && !seen->ended());
}

TEST(a_forked_child_that_lives_on_does_not_keep_its_killed_parent_alive) {
  const NameGuard guard{ring_name("orphan")};
  int alive[2], gate[2];
  CHECK(pipe2(alive, O_CLOEXEC) == 0 && pipe2(gate, O_CLOEXEC) == 0);
  CHECK(killed([&] {
    const auto writer = Ring::create(guard.name, kSlots, kCapacity, Bytes16{});
    writer->try_take();
    if (fork() == 0) {  // with the memory still mapped
      char byte = 0;
      close(gate[1]);
      CHECK(write(alive[1], &byte, 1) == 1 && read(gate[0], &byte, 1) == 0);
      _exit(0);
    }
    char byte = 0;
    CHECK(read(alive[0], &byte, 1) == 1);
    std::raise(SIGKILL);
  }));
  const auto ring = Ring::create(guard.name, kSlots, kCapacity, Bytes16{});
  CHECK(ring->taken_over());
  check_survivors(*ring);
  for (const int fd : {alive[0], alive[1], gate[0], gate[1]}) close(fd);
}

TEST(a_killed_writer_is_succeeded_with_its_payloads) {
  const NameGuard guard{ring_name("successor")};
  int gate[2];
  CHECK(pipe2(gate, O_CLOEXEC) == 0);
  CHECK(killed([&] {
    const auto writer = Ring::create(guard.name, kSlots, kCapacity, Bytes16{});
    const Lease lease = published(*writer, 2);
    writer->consume(lease.slot, lease.generation, 1);
    writer->set_ports({4242});
    const Bytes16 id = writer->identity().ring_id;
    CHECK(write(gate[1], id.data(), id.size()) == static_cast<ssize_t>(id.size()));
    writer->try_take();
    std::raise(SIGKILL);
  }));
  Bytes16 id{};
  CHECK(read(gate[0], id.data(), id.size()) == static_cast<ssize_t>(id.size()));
  close(gate[0]);
  close(gate[1]);
  CHECK(refused(Fault::layout, [&] { Ring::create(guard.name, kSlots + 1, kCapacity, Bytes16{}); }));
  CHECK(refused(Fault::layout, [&] { Ring::create(guard.name, kSlots, kCapacity, Bytes16{1}); }));
  const auto ring = Ring::create(guard.name, kSlots, kCapacity, Bytes16{});
  CHECK(ring->taken_over() && ring->identity().ring_id == id && ring->ports() == std::vector<std::uint32_t>{4242});
  const auto counts = ring->state_counts();
  CHECK(counts[0] == kSlots - 1 && counts[2] == 1);
  check_survivors(*ring);
}

TEST(of_racing_creators_exactly_one_wins) {
  constexpr int kCreators = 4, kRounds = 40;
  for (int round = 0; round < kRounds; ++round) {
    const NameGuard guard{ring_name("race")};
    if (round % 2 == 0)  // half of the races begin with what a creator has left
      CHECK(killed([&] {
        fault::set(index_of("create.initialised"), SIGKILL, 0);
        Ring::create(guard.name, kSlots, kCapacity, Bytes16{});
      }));
    int start[2], done[2], results[2];
    CHECK(pipe2(start, O_CLOEXEC) == 0 && pipe2(done, O_CLOEXEC) == 0 && pipe2(results, O_CLOEXEC) == 0);
    for (int i = 0; i < kCreators; ++i) {
      if (fork() != 0) continue;
      close(start[1]), close(done[1]);
      char byte = 0, result = 'e';
      std::unique_ptr<Ring> ring;
      CHECK(read(start[0], &byte, 1) == 0);  // until the parent closes its end
      if (round % 8 < 4) refuse_nameless_files();
      try {
        ring = Ring::create(guard.name, kSlots, kCapacity, Bytes16{});
        result = 'w';
      } catch (const RingFault& fault) {
        if (fault.code() != Fault::exists) result = '?';
      }
      CHECK(write(results[1], &result, 1) == 1);
      CHECK(read(done[0], &byte, 1) == 0);
      _exit(0);
    }
    close(start[0]), close(start[1]), close(done[0]), close(results[1]);
    std::string outcome(kCreators, ' ');
    for (char& result : outcome) CHECK(read(results[0], &result, 1) == 1);
    CHECK(std::count(outcome.begin(), outcome.end(), 'w') == 1);
    CHECK(std::count(outcome.begin(), outcome.end(), 'e') == kCreators - 1);
    close(done[1]), close(results[0]);
    for (int i = 0; i < kCreators; ++i) CHECK(wait(nullptr) > 0);
  }
}

TEST(a_creator_that_was_overtaken_harms_nobody) {
  for (const char* point : {"create.opened", "create.header", "create.found"}) {
    const NameGuard guard{ring_name("overtaken")};
    if (std::strcmp(point, "create.found") == 0)  // what both creators find
      CHECK(killed([&] {
        fault::set(index_of("create.initialised"), SIGKILL, 0);
        Ring::create(guard.name, kSlots, kCapacity, Bytes16{});
      }));
    std::unique_ptr<Ring> ring;
    stopped_at(
        point, [&] { CHECK(refused(Fault::exists, [&] { Ring::create(guard.name, kSlots, kCapacity, Bytes16{}); })); },
        [&] { ring = Ring::create(guard.name, kSlots, kCapacity, Bytes16{}); });
    CHECK(Ring::attach(guard.name, Role::observer, false)->identity().ring_id == ring->identity().ring_id);
    check_survivors(*ring);
  }
}

TEST(whoever_attaches_while_the_name_is_removed_is_told_so) {
  for (const Role role : {Role::writer, Role::listener, Role::reader})
    for (const bool by_hand : {false, true}) {
      const NameGuard guard{ring_name("removed")};
      auto ring = Ring::create(guard.name, kSlots, kCapacity, Bytes16{});
      const auto seen = Ring::attach(guard.name, Role::observer, false);
      stopped_at(
          "attach.found", [&] { CHECK(refused(Fault::not_found, [&] { Ring::attach(guard.name, role, false); })); },
          [&] { CHECK(seen->still_named() && (by_hand ? Segment::unname(guard.name) : ring->unlink_if_last())); });
      CHECK(!seen->still_named());  // who has no place learns it with the next look
    }
}

TEST(no_writer_comes_between_the_look_for_unread_payloads_and_the_removal_of_the_name) {
  for (const bool last : {true, false}) {
    const NameGuard guard{ring_name("look")};
    CHECK(killed([&] {
      auto dead = Ring::create(guard.name, kSlots, kCapacity, Bytes16{});
      ::raise(SIGKILL);
    }));
    stopped_at(
        "unlink.checked",
        [&] {
          if (last)
            CHECK(Ring::attach(guard.name, Role::observer, false)->unlink_if_last(false, kGivesUpNone));
          else
            CHECK(Segment::unlink_if_dead(guard.name, kGivesUpNone));
        },
        [&] {
          CHECK(refused(Fault::exists, [&] { Ring::create(guard.name, kSlots, kCapacity, Bytes16{}); }));
          CHECK(refused(Fault::no_owner, [&] { Ring::attach(guard.name, Role::writer, true); }));
        });
    CHECK(refused(Fault::not_found, [&] { Ring::attach(guard.name, Role::reader, false); }));
  }
}

TEST(a_creator_waits_for_a_process_that_removes_the_name) {
  const NameGuard guard{ring_name("restarted")};
  CHECK(killed([&] {
    const auto dead = Ring::create(guard.name, kSlots, kCapacity, Bytes16{});
    ::raise(SIGKILL);
  }));
  const auto seen = Ring::attach(guard.name, Role::observer, false);
  pid_t creator = 0;
  int status = 0;
  stopped_at(
      "unlink.checked", [&] { CHECK(Segment::unlink_if_dead(guard.name, kGivesUpNone)); },
      [&] {
        CHECK(!seen->keeper_alive());
        creator = fork();
        if (creator == 0) {
          fault::set(index_of("create.waits"), SIGSTOP, 0);
          const auto ring = Ring::create(guard.name, kSlots, kCapacity, Bytes16{});
          CHECK(!ring->taken_over());
          check_survivors(*ring);
          _exit(0);
        }
        CHECK(waitpid(creator, &status, WUNTRACED) == creator && WIFSTOPPED(status));
      });
  CHECK(kill(creator, SIGCONT) == 0 && waitpid(creator, &status, 0) == creator && status == 0);
}

int main(int argc, char** argv) { return run_all(argc, argv); }
