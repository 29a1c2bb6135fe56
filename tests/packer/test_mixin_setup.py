"""The packer's set-up: where a step of it fails, loop and client have ended with it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from packers import Packer

from transport import UCXXClient
from transport.errors import ClosedError
from transport.packer import session
from transport.queue import FoundRings, RingQueue

pytestmark = pytest.mark.ucx


class Refusing(RingQueue):
    """A queue that fails at one step of the set-up."""

    fails = ""

    def connect(self, *arguments: Any) -> FoundRings:
        if self.fails == "connect":
            raise ClosedError("connecting fails")
        return super().connect(*arguments)


def named_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("transport")]


@pytest.mark.parametrize("step", ["rings", "connect", "bar", "session", "warming"])
def test_a_set_up_that_fails_leaves_neither_loop_nor_client(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[UCXXClient] = []
    end = UCXXClient.end
    monkeypatch.setattr(UCXXClient, "end", lambda client: (ended.append(client), end(client))[-1])

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError(f"{step} fails")

    packer = Packer()
    with Refusing() as queue:
        queue.fails = step
        targets = {
            "rings": (session, "FoundRings"),
            "bar": (session, "bar"),
            "session": (session.PackerSession, "__init__"),
            "warming": (session.PackerSession, "warm_up"),
        }
        if step in targets:
            monkeypatch.setattr(*targets[step], fail)
        with pytest.raises((RuntimeError, ClosedError), match="fail"):
            packer.setup_ucxx_packer(queue=None if step == "rings" else queue, wire={"tcp"}, progress="bar")
        assert named_threads() == []
        assert len(set(ended)) == 1
        monkeypatch.undo()
        queue.fails = ""
        packer.setup_ucxx_packer(queue=queue, wire={"tcp"})
        assert packer.claim_tickets(1) == []
        packer.cleanup_ucxx_packer()
