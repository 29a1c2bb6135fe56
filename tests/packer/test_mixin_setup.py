"""The packer's set-up: where a step of it fails, loop and client have ended with it."""

from __future__ import annotations

import threading

import pytest
from packers import Packer

from transport import UCXXClient
from transport.packer import session

pytestmark = pytest.mark.ucx


def named_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("transport")]


@pytest.mark.parametrize("step", ["bar", "session", "warming"])
def test_a_set_up_that_fails_leaves_neither_loop_nor_client(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[UCXXClient] = []
    end = UCXXClient.end
    monkeypatch.setattr(UCXXClient, "end", lambda client: (ended.append(client), end(client))[-1])

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError(f"{step} fails")

    packer = Packer()
    targets = {
        "bar": (session, "bar"),
        "session": (session.PackerSession, "__init__"),
        "warming": (session.PackerSession, "warm_up"),
    }
    monkeypatch.setattr(*targets[step], fail)
    with pytest.raises(RuntimeError, match="fail"):
        packer.setup_ucxx_packer(wire={"tcp"}, progress="bar")
    assert named_threads() == []
    assert len(set(ended)) == 1
    monkeypatch.undo()
    packer.setup_ucxx_packer(wire={"tcp"})
    assert packer.collect_prefetch() is None
    packer.cleanup_ucxx_packer()
