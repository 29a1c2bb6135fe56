"""A rollout's wait for its turn: its time where a store does not answer, and what ends it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from helpers import eventually, in_thread
from store_proxy import HangingStore

from transport import FoundRings, SharedRingBuffer
from transport.claims import lead as module
from transport.claims.lead import Lead, LeadSaid
from transport.claims.notices import Notice
from transport.claims.places import OnThisHost
from transport.store.memory import MemoryStore


def test_a_wait_for_a_turn_ends_in_its_time_where_the_store_hangs(prefix: str, ring: SharedRingBuffer) -> None:
    store = HangingStore(MemoryStore())
    with FoundRings(OnThisHost(prefix), store=store) as rings:
        LeadSaid(rings, 0).say(7)
        lead = Lead(rings, ring, most=1, readers=2)
        assert not lead.wait(0.01)  # as its planner says
        store.hangs = True
        for timeout_s in (0.0, 0.01):
            assert lead.wait(timeout_s)  # nobody says that it is not its turn
        assert not store.gave_up


def test_a_wait_for_a_claim_looks_again_when_one_is_made_and_not_before(
    prefix: str, ring: SharedRingBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transport.claims.lead._SLICE_S", 1e6)
    monkeypatch.setattr("transport.claims.lead._ALONE_S", 1e6)
    looks: list[bool] = []
    look = Lead._is_untaken

    def counted(lead: Lead, later: int) -> bool:
        looks.append(look(lead, later))
        return looks[-1]

    monkeypatch.setattr(Lead, "_is_untaken", counted)
    with FoundRings(OnThisHost(prefix)) as rings, SharedRingBuffer.attach(ring.name, role="reader") as taker:
        lead = Lead(rings, ring, most=0, readers=1)
        lead.completed([ring.write_raw(b"one")])
        assert not lead.wait(0.3) and len(looks) <= 2
        turns, waiting = in_thread(lambda: lead.wait(None))
        eventually(lambda: len(looks) > 2, "it waits")
        claim = taker.native.claim_batch(1, 0.0, rank=0, oldest_version=None, most_attempts=0, consumer="")
        waiting.join()
        assert turns == [True] and len(claim) == 1


def test_a_rollout_waits_as_long_as_its_planner_is_heard(
    prefix: str, ring: SharedRingBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, left = 100.0, [2, 2, 2, 1]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(module, "_REPEAT_S", 0.0)
    with FoundRings(OnThisHost(prefix)) as rings, FoundRings(OnThisHost(prefix)) as planners:
        said, latest = LeadSaid(planners, 0), rings.latest
        said.say(2)
        lead = Lead(rings, ring, most=1, readers=1)

        def heard(topic: str, newer_than: int | None = None, timeout_s: float = 0.0) -> Notice | None:
            nonlocal now
            if newer_than is not None:
                now += 0.9 * module._ALONE_S
                said.again()
                said.say(left.pop(0))
            return latest(topic, newer_than, timeout_s)

        monkeypatch.setattr(rings, "latest", heard)
        assert lead.wait(None) and left == []
