"""A rollout's wait for its turn: how long it takes where its directory's store does not answer."""

from __future__ import annotations

from store_proxy import HangingStore

from transport import FoundRings, SharedRingBuffer
from transport.claims.lead import Lead, LeadSaid
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
