"""What every store must do, written once. A mechanism's test module makes a subclass with a ``harness`` fixture.

The harness opens stores on one place (``open``) and moves their clock (``advance``), so that no test sleeps.
"""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from helpers import in_thread

from transport.errors import ClosedError, StoreUnavailableError, UsageError
from transport.store import ABSENT, Change, Entry, Store
from transport.store.base import MOST_KEY_BYTES, MOST_VALUE_BYTES
from transport.store.decision import Next, advance, decide
from transport.store.stored import encode

LEASE_S = 60.0


class Harness(abc.ABC):
    """Stores on one place, by a clock that a test moves on."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.stores: list[Store] = []

    def open(self, *, real_time: bool = False, **options: Any) -> Any:
        """One store more; ``real_time``: its clock is that of the place."""
        self.stores.append(self.make(None if real_time else lambda: self.now, **options))
        return self.stores[-1]

    @abc.abstractmethod
    def make(self, clock: Callable[[], float] | None, **options: Any) -> Store: ...

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def close(self) -> None:
        for store in self.stores:
            store.close()


def version_of(store: Store, key: str) -> int:
    entry = store.get(key)
    return entry.version if entry else ABSENT


class StoreConformance:
    @pytest.fixture
    def store(self, harness: Harness) -> Store:
        return harness.open()

    # --- records and versions ------------------------------------------------------------------
    def test_a_record_is_what_was_put_last(self, harness: Harness, store: Store) -> None:
        assert store.get("a") is None
        first = store.put("a", b"one")
        second = store.put("a", b"\x00\xff two")
        assert 0 < first < second
        assert harness.open().get("a") == Entry(b"\x00\xff two", second)

    def test_an_empty_value_is_a_record(self, store: Store) -> None:
        version = store.put("a", b"")
        assert store.get("a") == Entry(b"", version)

    def test_a_version_is_never_given_twice_not_even_after_a_deletion(self, harness: Harness, store: Store) -> None:
        versions = []
        for _ in range(3):
            versions.append(store.put("a", b"same"))
            versions.append(store.put("b", b"same", lease_s=LEASE_S))
            store.delete("a")
            harness.advance(LEASE_S)
        assert versions == sorted(set(versions))

    def test_compare_and_set_writes_only_over_the_version_it_names(self, store: Store) -> None:
        first = store.put("a", b"one")
        second = store.compare_and_set("a", b"two", first)
        assert second is not None
        assert store.compare_and_set("a", b"three", first) is None
        assert store.compare_and_set("a", b"three", ABSENT) is None
        assert store.get("a") == Entry(b"two", second)

    def test_compare_and_set_with_absent_makes_a_record_once(self, store: Store) -> None:
        version = store.compare_and_set("a", b"one", ABSENT)
        assert version
        assert store.compare_and_set("a", b"two", ABSENT) is None
        assert store.compare_and_set("b", b"two", version) is None
        assert store.get("b") is None

    def test_a_record_that_came_back_does_not_fool_compare_and_set(self, store: Store) -> None:
        old = store.put("a", b"one")
        store.delete("a")
        store.put("a", b"one")
        assert store.compare_and_set("a", b"two", old) is None

    def test_deletion_by_version(self, store: Store) -> None:
        old = store.put("a", b"one")
        new = store.put("a", b"two")
        assert store.compare_and_set("a", None, old) is None
        assert store.compare_and_set("a", None, new) == ABSENT
        assert store.get("a") is None
        assert store.compare_and_set("a", None, ABSENT) == ABSENT
        store.delete("a")

    # --- many at once --------------------------------------------------------------------------
    def test_put_many_writes_all_and_tells_each_version(self, store: Store) -> None:
        store.put("gone", b"x")
        versions = store.put_many([Change("a", b"1"), Change("gone", None), Change("b", b"2", ABSENT)])
        assert versions is not None
        assert versions[1] == ABSENT
        assert store.get_many(["b", "gone", "a"]) == [Entry(b"2", versions[2]), None, Entry(b"1", versions[0])]
        assert store.put_many([]) == []

    def test_put_many_writes_nothing_when_one_record_is_not_as_expected(self, store: Store) -> None:
        version = store.put("a", b"1")
        kept = store.put("kept", b"1")
        changes = [Change("b", b"2"), Change("kept", None), Change("a", b"2", version), Change("c", b"2", kept)]
        assert store.put_many(changes) is None
        assert store.scan("") == {"a": Entry(b"1", version), "kept": Entry(b"1", kept)}

    def test_get_many_gives_the_order_that_was_asked_for(self, store: Store) -> None:
        versions = {key: store.put(key, key.encode()) for key in "dbca"}
        wanted = ["c", "x", "a", "c"]
        assert store.get_many(wanted) == [
            Entry(b"c", versions["c"]), None, Entry(b"a", versions["a"]), Entry(b"c", versions["c"])
        ]  # fmt: skip
        assert store.get_many([]) == []

    def test_scan_finds_what_begins_with_the_prefix_in_order(self, store: Store) -> None:
        for key in ("run/2", "run/10", "runs", "run", "ru", "run/~", "s", "run*", "run[a]", "run?"):
            store.put(key, key.encode())
        assert list(store.scan("run/")) == ["run/10", "run/2", "run/~"]
        assert list(store.scan("run*")) == ["run*"]
        assert list(store.scan("run[")) == ["run[a]"]
        assert list(store.scan("ru")) == sorted(
            ("run/2", "run/10", "runs", "run", "ru", "run/~", "run*", "run[a]", "run?")
        )
        assert {key: entry.value for key, entry in store.scan("run").items()}["runs"] == b"runs"
        assert store.scan("nothing") == {}

    def test_thousands_of_records_are_read_at_once(self, store: Store) -> None:
        keys = [f"member/{number:05}" for number in range(3000)]
        versions = store.put_many([Change(key, key.encode()) for key in keys])
        assert versions is not None
        assert len(set(versions)) == len(keys)
        entries = store.get_many(keys)
        assert [entry and entry.value for entry in entries] == [key.encode() for key in keys]
        assert list(store.scan("member/")) == keys

    def test_reads_of_many_see_no_half_of_a_write(self, harness: Harness, store: Store) -> None:
        store.put_many([Change("x/a", b"0"), Change("x/b", b"0")])
        writer = harness.open()

        def write() -> None:
            for number in range(150):
                value = b"%d" % number
                assert writer.put_many([Change("x/a", value), Change("x/b", value)])
            writer.put("done", b"")

        _, thread = in_thread(write)
        while store.get("done") is None:
            one, other = store.get_many(["x/a", "x/b"])
            assert one and other and one.value == other.value
            assert len({entry.value for entry in store.scan("x/").values()}) == 1
        thread.join()

    # --- counters ------------------------------------------------------------------------------
    def test_a_counter_begins_at_zero_and_reads_as_decimal_text(self, store: Store) -> None:
        assert store.add("n") == 1
        assert store.add("n", 41) == 42
        entry = store.get("n")
        assert entry is not None
        assert entry.value == b"42"
        assert store.add("n", -50) == -8
        assert store.add("n", 0) == -8
        assert version_of(store, "n") > entry.version

    def test_a_counter_holds_sixty_four_bits_and_no_more(self, store: Store) -> None:
        assert store.add("n", 2**63 - 1) == 2**63 - 1
        with pytest.raises(UsageError, match="n is not a counter, or the sum exceeds 64 bits"):
            store.add("n")
        assert store.add("n", -1) == 2**63 - 2
        with pytest.raises(UsageError, match="64 bits"):
            store.add("n", 2**64)

    @pytest.mark.parametrize("value", [b"", b"one", b"1.0", b" 1", b"01", b"+1", b"-0", b"1\n", b"9" * 5000])
    def test_another_record_is_no_counter(self, store: Store, value: bytes) -> None:
        version = store.put("a", value)
        with pytest.raises(UsageError, match="a is not a counter"):
            store.add("a")
        assert store.get("a") == Entry(value, version)

    def test_members_take_different_numbers(self, harness: Harness, store: Store) -> None:
        taken: list[int] = []

        def work(own: Store) -> None:
            taken.extend([own.add("slot") for _ in range(25)])

        threads = [threading.Thread(target=work, args=(harness.open(),)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(taken) == list(range(1, 101))

    # --- leases --------------------------------------------------------------------------------
    def test_a_record_vanishes_with_its_lease(self, harness: Harness, store: Store) -> None:
        kept = store.put("kept", b"1")
        version = store.put("a", b"1", lease_s=LEASE_S)
        harness.advance(LEASE_S - 1)
        assert version_of(store, "a") == version
        harness.advance(1)
        assert store.get("a") is None
        assert store.get_many(["a", "kept"]) == [None, Entry(b"1", kept)]
        assert list(store.scan("")) == ["kept"]
        assert store.compare_and_set("a", b"2", version) is None
        assert store.renew({"a": version}, LEASE_S) == set()
        assert store.compare_and_set("a", b"2", ABSENT)

    def test_a_write_without_a_lease_stays_for_good(self, harness: Harness, store: Store) -> None:
        store.put("a", b"1", lease_s=LEASE_S)
        version = store.put("a", b"2")
        harness.advance(10 * LEASE_S)
        assert store.get("a") == Entry(b"2", version)

    def test_renewal_begins_the_lease_anew_and_keeps_the_version(self, harness: Harness, store: Store) -> None:
        version = store.put("a", b"1", lease_s=LEASE_S)
        harness.advance(LEASE_S - 1)
        assert store.renew({"a": version}, LEASE_S) == {"a"}
        harness.advance(LEASE_S - 1)
        assert store.get("a") == Entry(b"1", version)
        harness.advance(1)
        assert store.get("a") is None

    def test_renewal_tells_which_leases_were_lost(self, harness: Harness, store: Store) -> None:
        ended = store.put("ended", b"1", lease_s=1)
        replaced = store.put("replaced", b"1", lease_s=LEASE_S)
        store.put("replaced", b"2", lease_s=LEASE_S)
        for_good = store.put("for-good", b"1")
        mine = store.put("mine", b"1", lease_s=LEASE_S)
        harness.advance(1)
        leases = {"ended": ended, "replaced": replaced, "for-good": for_good, "mine": mine, "never": 1}
        assert store.renew(leases, LEASE_S) == {"mine"}
        assert store.renew({}, LEASE_S) == set()
        harness.advance(2 * LEASE_S)
        assert list(store.scan("")) == ["for-good"]

    def test_a_counter_keeps_the_lease_it_has(self, harness: Harness, store: Store) -> None:
        store.put("n", b"5", lease_s=LEASE_S)
        harness.advance(LEASE_S - 1)
        assert store.add("n") == 6
        harness.advance(1)
        assert store.get("n") is None
        assert store.add("n") == 1

    # --- watching ------------------------------------------------------------------------------
    def test_a_watch_returns_at_once_what_differs_already(self, store: Store) -> None:
        version = store.put("a", b"1")
        assert store.watch("a", ABSENT, 30) == Entry(b"1", version)
        assert store.watch("a", version + 1, 30) == Entry(b"1", version)
        assert store.watch("never", version, 30) is None

    def test_a_watch_ends_with_what_is_there_when_the_time_is_over(self, store: Store) -> None:
        version = store.put("a", b"1")
        assert store.watch("a", version, 0) == Entry(b"1", version)
        assert store.watch("a", version, 0.01) == Entry(b"1", version)
        assert store.watch("never", ABSENT, 0.01) is None

    def test_a_watch_wakes_for_another_stores_write(self, harness: Harness, store: Store) -> None:
        version = store.put("a", b"1")
        found, thread = in_thread(lambda: store.watch("a", version, 30))
        new = harness.open().put("a", b"2")
        thread.join()
        assert found == [Entry(b"2", new)]

    def test_a_watch_for_a_record_to_come_wakes_when_it_is_made(self, harness: Harness, store: Store) -> None:
        found, thread = in_thread(lambda: store.watch("a", ABSENT, 30))
        new = harness.open().compare_and_set("a", b"1", ABSENT)
        thread.join()
        assert found == [Entry(b"1", new)]

    def test_a_watch_wakes_for_a_deletion(self, harness: Harness, store: Store) -> None:
        version = store.put("a", b"1")
        found, thread = in_thread(lambda: store.watch("a", version, 30))
        harness.open().delete("a")
        thread.join()
        assert found == [None]

    def test_a_watch_wakes_for_the_end_of_a_lease(self, harness: Harness) -> None:
        store = harness.open(real_time=True)
        version = store.put("a", b"1", lease_s=0.05)
        assert store.watch("a", version, 30) is None

    def test_a_watch_wakes_for_a_counter(self, harness: Harness, store: Store) -> None:
        store.add("n")
        found, thread = in_thread(lambda: store.watch("n", version_of(store, "n"), 30))
        other = harness.open()
        while thread.is_alive():  # the watch may have begun after an addition
            other.add("n")
            thread.join(0.01)
        assert int(found[0].value) > 1

    # --- final decisions (transport.store.decision) ----------------------------------------------
    def test_the_first_proposal_is_the_decision_for_all(self, harness: Harness, store: Store) -> None:
        assert decide(store, "d", "first") == "first"
        assert decide(harness.open(), "d", "second") == "first"
        assert decide(store, "d", "third") == "first"

    def test_deciders_at_the_same_time_get_one_decision(self, harness: Harness, store: Store) -> None:
        stores = [harness.open() for _ in range(4)]
        for number in range(20):
            begin = threading.Barrier(len(stores) + 1)

            def propose(own: int, key: str = f"d/{number}", begin: threading.Barrier = begin) -> str:
                begin.wait()
                return decide(stores[own], key, f"by {own}")

            found = [in_thread(lambda own=own: propose(own)) for own in range(len(stores))]  # type: ignore[misc]
            begin.wait()
            for _, each in found:
                each.join()
            assert len({answers[0] for answers, _ in found}) == 1

    @pytest.mark.parametrize("written", [True, False])
    def test_a_decider_whose_answer_was_lost_asks_again(
        self, harness: Harness, store: Store, monkeypatch: pytest.MonkeyPatch, written: bool
    ) -> None:
        write = type(store).put_many

        def lose(self: Store, changes: Sequence[Change]) -> list[int] | None:
            if written:
                write(self, changes)
            raise StoreUnavailableError("cut")

        with monkeypatch.context() as cut:
            cut.setattr(type(store), "put_many", lose)
            with pytest.raises(StoreUnavailableError):
                decide(store, "d", "mine")
        other = decide(harness.open(), "d", "another's")
        assert decide(store, "d", "mine") == other == ("mine" if written else "another's")

    def test_a_decision_with_a_lease_is_forgotten_with_it(self, harness: Harness, store: Store) -> None:
        assert decide(store, "d", "first", lease_s=LEASE_S) == "first"
        harness.advance(LEASE_S)
        assert store.get("d") is None
        assert decide(store, "d", "second") == "second"

    # --- records that advance to a final value -----------------------------------------------------
    def test_each_value_is_made_of_the_one_that_stands_until_one_is_final(self, harness: Harness, store: Store) -> None:
        """Four advance one record at a time; with each step another record is written or not at all."""
        stores = [harness.open() for _ in range(4)]
        begin = threading.Barrier(len(stores))
        final = 40

        def lead(own: int) -> int | None:
            def step(standing: int | None) -> Next[int] | None:
                if standing == final:
                    return None
                number = (standing or 0) + 1
                return Next(number, [Change(f"also/{number}", b"by %d" % own, ABSENT)])

            begin.wait()
            while (found := advance(stores[own], "state", int, step)) != final:
                assert found is not None
            return found

        running = [in_thread(lambda own=own: lead(own)) for own in range(len(stores))]  # type: ignore[misc]
        for _, thread in running:
            thread.join()
        assert [found for found, _ in running] == [[final]] * len(stores)
        assert len(store.scan("also/")) == final

    def test_a_step_that_was_overtaken_is_made_again(self, harness: Harness, store: Store) -> None:
        other = harness.open()
        seen: list[str | None] = []

        def step(standing: str | None) -> Next[str] | None:
            seen.append(standing)
            if standing is None:
                other.put("state", encode("another's"))
            return Next(f"{standing} and mine", [Change("also", b"1")])

        assert advance(store, "state", str, step) == "another's and mine"
        assert seen == [None, "another's"]
        assert advance(other, "state", str, lambda standing: None) == "another's and mine"
        assert advance(other, "none", str, lambda standing: None) is None

    def test_a_step_that_raises_changes_nothing(self, store: Store) -> None:
        def fail(standing: int | None) -> Next[int] | None:
            raise KeyError(standing)

        store.put("state", b"1")
        with pytest.raises(KeyError):
            advance(store, "state", int, fail)
        assert store.get("state").value == b"1"

    def test_what_its_readers_would_refuse_does_not_advance_a_record(self, store: Store) -> None:
        with pytest.raises(UsageError):
            advance(store, "state", str, lambda standing: Next("\udc80"))
        with pytest.raises(UsageError):
            decide(store, "d", "\udc80")
        assert store.get_many(["state", "d"]) == [None, None]

    # --- what is refused -------------------------------------------------------------------------
    @pytest.mark.parametrize("key", ["", "a b", "ä", "a\n", "x" * (MOST_KEY_BYTES + 1)])
    def test_keys_out_of_bounds_are_refused(self, store: Store, key: str) -> None:
        with pytest.raises(UsageError, match="store key"):
            store.get(key)
        with pytest.raises(UsageError, match="store key"):
            store.get_many(["a", key])
        with pytest.raises(UsageError, match="store key"):
            store.put(key, b"")
        with pytest.raises(UsageError, match="store key"):
            store.add(key)
        with pytest.raises(UsageError, match="store key"):
            store.renew({key: 1}, 1)
        with pytest.raises(UsageError, match="store key"):
            store.watch(key, 0, 0)

    def test_the_longest_key_and_every_character_are_taken(self, store: Store) -> None:
        every = "".join(chr(code) for code in range(0x21, 0x7F))
        store.put("x" * MOST_KEY_BYTES, b"1")
        store.put(every, b"2")
        assert {key: entry.value for key, entry in store.scan("").items()} == {"x" * MOST_KEY_BYTES: b"1", every: b"2"}

    def test_values_and_leases_out_of_bounds_are_refused(self, store: Store) -> None:
        with pytest.raises(UsageError, match="bytes"):
            store.put("a", bytes(MOST_VALUE_BYTES + 1))
        for lease_s in (0, -1, float("nan"), float("inf")):
            with pytest.raises(UsageError, match="lease_s"):
                store.put("a", b"", lease_s=lease_s)
            with pytest.raises(UsageError, match="lease_s"):
                store.renew({}, lease_s)
        with pytest.raises(UsageError, match="occurs twice"):
            store.put_many([Change("a", b"1"), Change("a", b"2")])
        for wrong in ("text", 5):
            with pytest.raises(UsageError, match="give bytes"):
                store.put("a", wrong)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="give several"):
            store.get_many("ab")
        for call in (
            lambda: store.add("a", 1.5),  # type: ignore[arg-type]
            lambda: store.put("a", b"", expected="0"),  # type: ignore[arg-type]
            lambda: store.renew({"a": "1"}, 1),  # type: ignore[dict-item]
        ):
            with pytest.raises(TypeError):
                call()
        assert store.scan("") == {}

    def test_arguments_that_are_read_once_are_taken_as_lists_are(self, store: Store) -> None:
        assert store.put_many(Change(key, bytearray(b"1")) for key in ("a", "b")) is not None
        assert [entry and entry.value for entry in store.get_many(key for key in ("a", "c", "b"))] == [b"1", None, b"1"]
        store.delete_all(key for key in ("a", "b"))
        assert store.scan("") == {}
        assert store.add("n", np.int64(2)) == 2  # type: ignore[arg-type]

    # --- the end ---------------------------------------------------------------------------------
    def test_close_ends_a_watch(self, store: Store) -> None:
        version = store.put("a", b"1")

        def wait() -> str:
            with pytest.raises(ClosedError):
                store.watch("a", version, 30)
            return "ended"

        outcomes, thread = in_thread(wait)
        store.close()
        thread.join()
        assert outcomes == ["ended"]

    def test_after_close_everything_is_refused(self, store: Store) -> None:
        store.close()
        store.close()
        for call in (
            lambda: store.get("a"),
            lambda: store.get_many(["a"]),
            lambda: store.scan(""),
            lambda: store.put("a", b""),
            lambda: store.add("a"),
            lambda: store.renew({"a": 1}, 1),
            lambda: store.watch("a", 0, 1),
        ):
            with pytest.raises(ClosedError):
                call()
