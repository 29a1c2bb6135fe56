"""Random operations on a store and on a model of it that is a dictionary: both must always agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from store_conformance import Harness

from transport.store import ABSENT, Change, Entry

KEYS = st.sampled_from(["a", "a/1", "a/2", "b"])
LEASES = st.sampled_from([None, 5.0, 60.0])
VALUES = st.one_of(st.none(), st.binary(max_size=4), st.just(b"7"))


class _Record(NamedTuple):
    value: bytes
    version: int
    lease_ends: float | None


class StoreMachine(RuleBasedStateMachine):
    """A mechanism's test module makes a subclass with ``make_harness``, and runs its ``TestCase``."""

    make_harness: Callable[[], Harness]

    @initialize()
    def begin(self) -> None:
        self.harness = type(self).make_harness()
        self.store = self.harness.open()
        self.now = 0.0
        self.model: dict[str, _Record] = {}
        self.given = 0  # the highest version yet
        self.old = [ABSENT, 1]  # versions that are or were somewhere

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.close()

    def _wrote(self, key: str, value: bytes, version: int, lease_ends: float | None) -> None:
        assert version > self.given
        self.given = version
        self.old.append(version)
        self.model[key] = _Record(value, version, lease_ends)

    def _version(self, key: str) -> int:
        return self.model[key].version if key in self.model else ABSENT

    @rule(
        data=st.data(),
        writes=st.lists(st.tuples(KEYS, VALUES, LEASES), max_size=3, unique_by=lambda write: write[0]),
    )
    def put_many(self, data: st.DataObject, writes: list[tuple[str, bytes | None, float | None]]) -> None:
        changes = []
        for key, value, lease_s in writes:
            expected = data.draw(st.one_of(st.none(), st.just(self._version(key)), st.sampled_from(self.old)))
            changes.append(Change(key, value, expected, lease_s))
        fits = all(change.expected in (None, self._version(change.key)) for change in changes)
        versions = self.store.put_many(changes)
        assert (versions is not None) == fits
        for change, version in zip(changes, versions or (), strict=False):
            if change.value is None:
                assert version == ABSENT
                self.model.pop(change.key, None)
            else:
                ends = None if change.lease_s is None else self.now + change.lease_s
                self._wrote(change.key, change.value, version, ends)

    @rule(key=KEYS, amount=st.integers(-3, 3))
    def add(self, key: str, amount: int) -> None:
        before = self.model.get(key, _Record(b"0", ABSENT, None))
        try:
            total = int(before.value) + amount if str(int(before.value)).encode() == before.value else None
        except ValueError:
            total = None
        try:
            assert self.store.add(key, amount) == total
        except ValueError:
            assert total is None
        else:
            entry = self.store.get(key)
            assert entry is not None
            self._wrote(key, b"%d" % (total or 0), entry.version, before.lease_ends)

    @rule(data=st.data(), keys=st.sets(KEYS), lease_s=st.sampled_from([5.0, 60.0]))
    def renew(self, data: st.DataObject, keys: set[str], lease_s: float) -> None:
        leases = {key: data.draw(st.sampled_from([self._version(key), *self.old])) for key in sorted(keys)}
        kept = {
            key
            for key, version in leases.items()
            if key in self.model and self.model[key].version == version and self.model[key].lease_ends is not None
        }
        assert self.store.renew(leases, lease_s) == kept
        for key in kept:
            self.model[key] = self.model[key]._replace(lease_ends=self.now + lease_s)

    @rule(seconds=st.sampled_from([1.0, 5.0, 60.0]))
    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.harness.advance(seconds)
        self.model = {
            key: record
            for key, record in self.model.items()
            if record.lease_ends is None or record.lease_ends > self.now
        }

    @rule(key=KEYS, version=st.integers(0, 3))
    def watch(self, key: str, version: int) -> None:
        record = self.model.get(key)
        assert self.store.watch(key, version, 0) == (Entry(record.value, record.version) if record else None)

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = self.harness.open()

    @invariant()
    def every_read_agrees(self) -> None:
        if not hasattr(self, "store"):
            return
        expected = {key: Entry(record.value, record.version) for key, record in sorted(self.model.items())}
        assert list(self.store.scan("").items()) == list(expected.items())
        assert list(self.store.scan("a/")) == [key for key in expected if key.startswith("a/")]
        assert self.store.get_many(["b", "a"]) == [expected.get("b"), expected.get("a")]
