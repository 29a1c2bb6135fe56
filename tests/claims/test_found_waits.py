"""FoundRings with rings on this host and elsewhere: it waits for either, and looks at neither meanwhile."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from found_rings import LONG_S, HereAndElsewhere, ring_of
from helpers import eventually
from queue_waits import in_thread

from transport.claims.network import NetworkSource
from transport.errors import ClosedError
from transport.queue import Claim, FoundRings

pytestmark = pytest.mark.ucx


def claimed(queue: FoundRings) -> bytes:
    """The next payload, consumed."""
    [claim] = queue.claim(1, LONG_S, consumer="test")
    came = queue.payload_bytes(claim)
    assert came is not None
    data = bytes(memoryview(came.data))
    del came
    assert queue.ack(claim)
    return data


def test_a_trainer_waits_for_rings_here_and_elsewhere_without_looking_at_either(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    claim = NetworkSource.claim

    def counted(self: NetworkSource, *arguments: Any, **named: Any) -> list[Claim]:
        looks.append(1)
        return claim(self, *arguments, **named)

    monkeypatch.setattr(NetworkSource, "claim", counted)
    with (
        ring_of(f"{prefix}here-") as here,
        ring_of(f"{prefix}there-") as there,
        FoundRings(HereAndElsewhere(f"{prefix}here-", f"{prefix}there-")) as queue,
    ):
        here.write_raw(b"0")
        there.write_raw(b"1")
        assert sorted([claimed(queue), claimed(queue)]) == [b"0", b"1"]
        for number in range(20):
            timer = threading.Timer(0.02, (here, there)[number % 2].write_raw, [b"%d" % number])
            timer.start()
            assert claimed(queue) == b"%d" % number
            timer.join()
        looks.clear()
        began = time.monotonic()
        assert queue.claim(1, 1.0, consumer="test") == []
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
        queue.claim(1, LONG_S, consumer="test")
    return "closed"
