"""The store of a round, as torchrun's agents use it: a rank 0 that goes, ranks that are never assigned."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from torchrun_agents import WHY_NOT

from transport.rendezvous.records import Place, Role

pytestmark = [
    pytest.mark.skipif(bool(WHY_NOT), reason=f"torchrun is not tested: {WHY_NOT}"),
    pytest.mark.slow,
    pytest.mark.timeout(240),
]


class AMember:
    """Whose round is over after some looks, or when it asks for it."""

    def __init__(self, looks: int) -> None:
        self.looks = looks
        self.why = ""

    @property
    def in_round(self) -> bool:
        self.looks -= 1
        return self.looks >= 0 and not self.why

    def restart(self, why: str) -> None:
        self.why = why

    def wait_over(self) -> None:
        pass


@contextlib.contextmanager
def a_client() -> Iterator[tuple[Any, subprocess.Popen[str]]]:
    """A client of a store, and the process that serves it."""
    import torch.distributed as dist

    serve = "import sys, torch.distributed as d; s = d.TCPStore('127.0.0.1', 0, None, True, wait_for_workers=False); "
    serve += "print(s.port, flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", serve], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            port = int(process.stdout.readline())
            yield dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False), process
        finally:
            process.kill()


PLACE = Place(round=1, member="m", role=Role.ACTIVE, rank=1, size=3, leader="here:1")


def test_ranks_that_are_never_assigned_do_not_end_the_agent() -> None:
    from transport.adapters.torchrun.handler import RoundStore

    with a_client() as (client, _):
        assert RoundStore(client, AMember(2), PLACE).get("assigned/1") == b"[1, 3, 1, 3]"
        store = RoundStore(client, AMember(9), PLACE)
        store.set("info/1", "mine")
        assert store.multi_get(["info/0", "info/1", "info/2"]) == [b"mine"] * 3
        client.set("assigned/1", "[0, 9, 0, 9]")
        assert RoundStore(client, AMember(9), PLACE).get("assigned/1") == b"[0, 9, 0, 9]"


def test_an_agent_whose_rank_0_is_gone_asks_for_a_new_round() -> None:
    from transport.adapters.torchrun.handler import RoundStore

    with a_client() as (client, rank_0):
        rank_0.kill()
        rank_0.wait()
        member = AMember(9)
        assert RoundStore(client, member, PLACE).get("assigned/1") == b"[1, 3, 1, 3]"
        assert member.why.startswith("lost the connection to rank 0 at here:1: ")
        RoundStore(client, AMember(9), PLACE).set("info/1", "mine")


def test_a_rank_0_that_goes_between_question_and_answer_is_gone() -> None:
    from torch.distributed import DistNetworkError

    from transport.adapters.torchrun.handler import RoundStore

    class Going:
        def check(self, keys: list[str]) -> bool:
            return True

        def get(self, key: str) -> bytes:
            raise DistNetworkError("reset by peer")

    member = AMember(9)
    assert RoundStore(Going(), member, PLACE).get("assigned/1") == b"[1, 3, 1, 3]"
    assert member.why.endswith("reset by peer")


def test_a_rank_0_that_does_not_answer_holds_the_agent_no_longer_than_the_round() -> None:
    """As when its host vanishes: no connection is closed."""
    from transport.adapters.torchrun.handler import RoundStore

    with a_client() as (client, rank_0):
        store = RoundStore(client, AMember(9), PLACE)
        store.set("info/1", "mine")
        rank_0.send_signal(signal.SIGSTOP)
        try:
            assert RoundStore(client, AMember(2), PLACE).get("assigned/1") == b"[1, 3, 1, 3]"
        finally:
            rank_0.send_signal(signal.SIGCONT)
