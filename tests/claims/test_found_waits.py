"""FoundRings with rings on this host and elsewhere: it waits for either, and looks at neither meanwhile."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from found_rings import LONG_S, HereAndElsewhere, consume, contents, ring_of, some, take
from helpers import eventually, in_thread

from transport import FoundRings
from transport.claims.network import NetworkSource
from transport.claims.taken_part import TakenPart
from transport.errors import ClosedError

pytestmark = pytest.mark.ucx


def taken(rings: FoundRings) -> bytes:
    """The next payload, consumed."""
    parts = some(rings, 1)
    [data] = contents(parts)
    assert consume(parts) == [True]
    return data


def test_a_trainer_waits_for_rings_here_and_elsewhere_without_looking_at_either(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    take_parts = NetworkSource.take_parts

    def counted(self: NetworkSource, *arguments: Any, **named: Any) -> list[TakenPart]:
        looks.append(1)
        return take_parts(self, *arguments, **named)

    monkeypatch.setattr(NetworkSource, "take_parts", counted)
    with (
        ring_of(f"{prefix}here-") as here,
        ring_of(f"{prefix}there-") as there,
        FoundRings(HereAndElsewhere(f"{prefix}here-", f"{prefix}there-")) as queue,
    ):
        here.write_raw(b"0")
        there.write_raw(b"1")
        assert sorted([taken(queue), taken(queue)]) == [b"0", b"1"]
        for number in range(20):
            timer = threading.Timer(0.02, (here, there)[number % 2].write_raw, [b"%d" % number])
            timer.start()
            assert taken(queue) == b"%d" % number
            timer.join()
        looks.clear()
        began = time.monotonic()
        assert take(queue, 1, 1.0) == []
        # A look at each slice of a tenth of a second; it was one at each millisecond.
        assert len(looks) <= 3 + 20 * (time.monotonic() - began)


def test_closing_ends_a_wait_for_rings_here_and_elsewhere(prefix: str) -> None:
    with ring_of(f"{prefix}here-"), ring_of(f"{prefix}there-"):
        queue = FoundRings(HereAndElsewhere(f"{prefix}here-", f"{prefix}there-"))
        outcomes, thread = in_thread(lambda: closed_in(queue))
        eventually(lambda: "1 places" in repr([rank.demands for rank in queue._network._ranks.values()]), "it waits")
        queue.close()
        thread.join()
        assert outcomes == ["closed"]


def closed_in(queue: FoundRings) -> str:
    with pytest.raises(ClosedError):
        take(queue, 1, LONG_S)
    return "closed"
