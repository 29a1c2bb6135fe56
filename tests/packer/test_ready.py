"""Rollout needs no subclass, and ``with`` cleans up: its own, and the mixins' beside a base class."""

from __future__ import annotations

import contextlib
import inspect
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import NETWORK, Child, eventually
from loopback import at

from transport import (
    RingOptions,
    Rollout,
    Schema,
    SharedRingBuffer,
    Trainer,
    UCXXDataPackerMixin,
    UCXXRolloutMixin,
    UpTo,
)
from transport.errors import ClosedError, StopRequestedError, UsageError
from transport.runtime.signals import until_stopped

SCHEMA = Schema.of(obs=("float32", UpTo(16), 2))
VALUES = {"obs": np.ones((3, 2), np.float32)}
DRAINS = """
import numpy as np
from transport import Rollout, Schema
from transport.runtime.signals import until_stopped
from transport.server.server import UCXXServer

drain = UCXXServer._drain
def told(self, *limits):
    print("draining", flush=True)
    drain(self, *limits)
UCXXServer._drain = told

with until_stopped(), Rollout(Schema.of(obs=("float32", 2)), slots=4, mode="thread") as rollout:
    rollout.write_to_buffer({"obs": np.zeros(2, np.float32)})
print("ended", flush=True)
"""
WRITES = """
import numpy as np
from transport import Rollout, Schema, UpTo
from transport.runtime.signals import until_stopped

written = 0
schema = Schema.of(obs=("float32", UpTo(16), 2))
with until_stopped() as stopped, Rollout(schema, slots=4, mode="thread", drain_s=600) as rollout:
    print(rollout.ring.name, flush=True)
    while not stopped.is_set():
        rollout.write_to_buffer({"obs": np.ones((3, 2), np.float32)})
        written += 1
print("written", written, flush=True)
"""
SERVES = """
import numpy as np
import transport.server.server as server
from loopback import LOOPBACK
from transport import Rollout, Schema, UpTo
from transport.packer.options import ServerOptions
from transport.runtime.signals import until_stopped

server.TELL_S = 1000.0
schema, here = Schema.of(obs=("float32", UpTo(16), 2)), ServerOptions(addresses=(LOOPBACK,))
with (
    until_stopped() as stopped,
    Rollout(schema, slots=4, server=here) as first,
    Rollout(schema, slots=4, server=here) as second,
):
    for rollout in (first, second):
        rollout.write_to_buffer({"obs": np.ones((3, 2), np.float32)})
    print(*first.ports, *second.ports, flush=True)
    stopped.wait()
print("ended", flush=True)
"""


@pytest.fixture
def run() -> str:
    return f"rings:ready-{secrets.token_hex(4)}-"


@pytest.mark.ucx
def test_a_rollout_and_a_trainer_end_with_their_block(run: str) -> None:
    with Rollout(SCHEMA, run, slots=4, mode="thread") as rollout, Trainer(SCHEMA, run) as trainer:
        rollout.write_to_buffer(VALUES)
        batch = trainer.take(1, 20.0)
        assert batch is not None and np.array_equal(batch[0]["obs"], VALUES["obs"])
        batch.consume()
        segment = Path("/dev/shm") / rollout.ring.name.removeprefix("/")
        assert segment.exists()
    assert not segment.exists()
    assert repr(rollout) == "<Rollout closed>"
    assert repr(trainer).endswith(" closed>")
    with pytest.raises(ClosedError):
        trainer.take(1)
    with pytest.raises(ClosedError, match="Rollout"):
        rollout.write_to_buffer(VALUES)


@pytest.mark.ucx
def test_the_end_of_a_with_waits_for_what_is_unread_unless_an_exception_ends_it(run: str) -> None:
    waited = []

    class Watched(Rollout):
        def cleanup_ucxx(self, drain_s: float = 0.0) -> None:
            waited.append(drain_s)
            super().cleanup_ucxx()

    with Watched(SCHEMA, slots=4, rings=run, mode="thread", drain_s=7.0):
        waited.clear()
    assert waited[0] == 7.0
    with pytest.raises(KeyboardInterrupt), Watched(SCHEMA, slots=4, rings=run, mode="thread", drain_s=7.0):
        waited.clear()
        raise KeyboardInterrupt
    assert waited == [0.0]
    with pytest.raises(UsageError, match="drain_s"):
        Rollout(SCHEMA, rings=run, drain_s=float("nan"))


@pytest.mark.ucx
@pytest.mark.parametrize("interrupted", [True, False])
@pytest.mark.parametrize("payloads", [0, 3])
def test_a_rollout_warns_of_what_no_trainer_has_consumed_when_it_closes(
    interrupted: bool, payloads: int, caplog: pytest.LogCaptureFixture
) -> None:
    with contextlib.suppress(KeyboardInterrupt), Rollout(SCHEMA, slots=4, mode="thread", drain_s=0) as rollout:
        for _ in range(payloads):
            rollout.write_to_buffer(VALUES)
        if interrupted:
            raise KeyboardInterrupt
    counted = [each.args[1] for each in caplog.records if each.name == "transport.packer.rollout" and each.args]
    assert counted == [f"{payloads} payloads"] * bool(payloads)


@pytest.mark.parametrize("given", [None, 7.0])
def test_its_end_waits_shorter_by_default_once_a_signal_ends_the_program(run: str, given: float | None) -> None:
    waited = []

    class Watched(Rollout):
        def close(self, drain_s: float = 0.0) -> None:
            waited.append(drain_s)
            super().close()

    with until_stopped() as stopped:
        with Watched(SCHEMA, slots=4, rings=run, mode="thread", drain_s=given):
            pass
        with Watched(SCHEMA, slots=4, rings=run, mode="thread", drain_s=given):
            os.kill(os.getpid(), signal.SIGTERM)
            assert stopped.wait()
    usual, told = waited
    if given is None:
        assert usual == 30.0
        assert 0.0 <= told <= 2.0
    else:
        assert usual == told == given


@pytest.mark.nightly
@pytest.mark.ucx
def test_a_signal_during_the_drain_shortens_it() -> None:
    """In a process of its own, whose drain would be thirty seconds; the test's time limit is shorter."""
    child = subprocess.Popen([sys.executable, "-c", DRAINS], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "draining\n"
        child.send_signal(signal.SIGTERM)
        assert child.communicate(timeout=15)[0] == "ended\n"
        assert child.returncode == 0
    finally:
        child.kill()
        child.wait()


@pytest.mark.nightly(keep=1)
@pytest.mark.ucx
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_rollouts_that_a_signal_ends_wait_together_for_trainers_that_are_yet_to_hear_it(
    number: signal.Signals,
) -> None:
    """Without a signal each would wait for longer than the test may last."""
    with Child(SERVES) as child:
        ports = [int(port) for port in child.line().split()]
        with Trainer(SCHEMA, f"rings://{','.join(map(at, ports))}", wire=NETWORK) as trainer:
            batch = trainer.take(2, 20.0, fill_s=20.0)
            assert batch is not None
            batch.consume()
            assert batch.accepted.all()
            del batch
            trainer.rings.rest_at_once()  # as in a long step
            child.process.send_signal(number)
            assert child.line() == "ended"
            assert child.wait() == 0


@pytest.mark.ucx
def test_a_request_to_stop_ends_a_write_that_waits_and_what_was_written_still_goes_to_a_trainer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRANSPORT_RUN", f"stopped-{os.getpid()}")
    with Child(WRITES) as child:
        with SharedRingBuffer.attach(child.line(), role="observer") as ring:
            eventually(lambda: ring.statistics().full_waits, "a write waits")
            child.process.send_signal(signal.SIGTERM)
            eventually(lambda: ring.native.ended, "the rollout ends, and no payload was consumed")
        trained = 0
        with Trainer(SCHEMA) as trainer:
            for batch in trainer.batches(4, fill_s=0.0):
                batch.consume()
                trained += int(batch.accepted.sum())
        assert child.line() == f"written {trained}"
        assert child.wait() == 0


@pytest.mark.ucx
@pytest.mark.parametrize("overflow", ["block", "error"])
def test_many_that_do_not_find_room_once_a_stop_is_requested_say_which_were_written(overflow: Any) -> None:
    options = RingOptions(overflow=overflow)
    with until_stopped(), Rollout(SCHEMA, slots=4, mode="thread", ring=options, drain_s=0.0) as rollout:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(StopRequestedError) as told:
            rollout.write_many_to_buffer([VALUES] * 6)
        assert len(told.value.written) == 4
        with pytest.raises(StopRequestedError):
            rollout.write_to_buffer(VALUES)


class Base:
    """A framework's class with a ``with`` of its own."""

    def __init__(self) -> None:
        self.story: list[Any] = []

    def __enter__(self) -> Base:
        self.story.append("entered")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        self.story.append(kind)
        return True


class Worker(UCXXRolloutMixin, Base):
    pass


class Both(UCXXRolloutMixin, UCXXDataPackerMixin):
    pass


@pytest.mark.ucx
def test_the_with_of_the_class_that_a_mixin_is_mixed_into_still_runs() -> None:
    with Worker() as worker:
        worker.setup_ucxx(SCHEMA, slots=4, mode="thread")
        raise ValueError("swallowed by the base, as it would be without the mixin")
    assert worker.story == ["entered", ValueError]
    with pytest.raises(ClosedError):
        _ = worker.ring


@pytest.mark.ucx
def test_a_class_with_both_mixins_cleans_up_both() -> None:
    with Both() as both:
        both.setup_ucxx(SCHEMA, slots=4, mode="thread")
        both.setup_ucxx_packer(schemas=[SCHEMA])
    assert both._ucxx is None
    assert both._ucxx_ring is None
    with Both():  # nothing was set up
        pass


def test_arguments_and_defaults_are_those_of_the_setup() -> None:
    expected = inspect.signature(UCXXRolloutMixin.setup_ucxx).parameters
    given = inspect.signature(Rollout).parameters
    assert set(given) - set(expected) == {"drain_s"}
    assert {name: given[name] for name in expected if name != "self"} == {
        name: each for name, each in expected.items() if name != "self"
    }
