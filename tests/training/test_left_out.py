"""Rings that a trainer cannot have at first: what it says of them, and that its data has not ended."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys

import pytest
from helpers import eventually

from transport import Rollout, Schema, SharedRingBuffer, Trainer, _ring
from transport.errors import NoOwnerError
from transport.ring import attached

SCHEMA = Schema.of(x="int64")


def taken(trainer: Trainer, count: int) -> list[int]:
    """Take and consume so many payloads."""
    seen: list[int] = []
    while len(seen) < count:
        batch = trainer.take(16, 30.0)
        assert batch is not None
        seen += [int(payload["x"]) for payload in batch]
        batch.consume()
        batch.release()
    return sorted(seen)


def test_more_rings_than_one_wait_can_have_are_all_taken_from(prefix: str) -> None:
    count = _ring.MAX_WAITED + 3
    with contextlib.ExitStack() as stack:
        rings = [
            stack.enter_context(SharedRingBuffer.create(SCHEMA, slots=1, name=f"{prefix}{number}"))
            for number in range(count)
        ]
        trainer = stack.enter_context(Trainer(SCHEMA, f"rings:{prefix}", wire={"mapped"}))
        for turn in range(2):
            for number, ring in enumerate(rings):
                ring.write({"x": number}, timeout_s=30.0)
            assert taken(trainer, count) == list(range(count)), turn


def test_a_ring_without_a_place_for_a_trainer_is_named_and_its_data_has_not_ended(
    prefix: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attached, "_TRY_AGAIN_S", 0.1)
    rings = f"rings:{prefix}"
    with (
        contextlib.ExitStack() as others,
        Rollout(SCHEMA, rings, slots=4, mode="thread", drain_s=0) as crowded,
        Trainer(SCHEMA, rings, wire={"mapped"}) as trainer,
        caplog.at_level(logging.WARNING),
    ):
        with contextlib.suppress(NoOwnerError):
            while True:
                others.enter_context(SharedRingBuffer.attach(crowded.ring.name, SCHEMA, role="reader"))
        with Rollout(SCHEMA, rings, slots=4, mode="thread") as ended:
            ended.write({"x": 1})
            crowded.write({"x": 2})
            assert taken(trainer, 1) == [1]
        assert trainer.take(1) is None
        assert not trainer.finished()
        assert crowded.ring.name in trainer.why_nothing()
        assert any(crowded.ring.name in record.getMessage() for record in caplog.records)
        others.close()
        assert taken(trainer, 1) == [2]
        assert trainer.why_nothing() == ""


def test_the_counts_of_a_ring_stay_when_its_rollout_ends(prefix: str) -> None:
    with Trainer(SCHEMA, f"rings:{prefix}", wire={"mapped"}) as trainer:
        with Rollout(SCHEMA, f"rings:{prefix}", slots=4, mode="thread") as rollout:
            rollout.write({"x": 1})
            rollout.write({"x": 2})
            assert taken(trainer, 2) == [1, 2]
        eventually(lambda: trainer.take(1) is None and not trainer.rings.segments_here())
        assert trainer.rings.depth().done == 2


FEW_FILES = """
import os, resource, sys
from transport import Schema, Trainer
with Trainer(Schema.of(x="int64"), sys.argv[1], wire={sys.argv[2]}) as trainer:
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + int(sys.argv[3]),) * 2)
    count, why, parent = 0, "", os.getppid()
    while os.getppid() == parent and (not count or "ulimit -n" not in why):
        batch = trainer.take(16, 0.1)
        if batch is None:
            why = trainer.why_nothing()
            continue
        count += len(batch)
        batch.consume()
        batch.release()
    print(count, trainer.finished())
"""


@pytest.mark.nightly
@pytest.mark.ucx
@pytest.mark.parametrize(("wire", "more"), [("mapped", 30), ("tcp", 40)])
def test_a_trainer_without_descriptors_for_every_ring_takes_from_the_others_and_names_the_limit(
    prefix: str, wire: str, more: int
) -> None:
    count = 40 if wire == "mapped" else 20
    with contextlib.ExitStack() as stack:
        rollouts = [
            stack.enter_context(Rollout(SCHEMA, f"rings:{prefix}", slots=2, mode="thread", drain_s=0))
            for _ in range(count)
        ]
        for rollout in rollouts:
            rollout.write({"x": 1})
        places = f"rings:{prefix}"
        if wire == "tcp":
            places = "rings://" + ",".join(f"127.0.0.1:{rollout.ports[0]}" for rollout in rollouts)
        child = subprocess.run(
            [sys.executable, "-P", "-c", FEW_FILES, places, wire, str(more)],
            capture_output=True,
            text=True,
            check=True,
        )
    taken, finished = child.stdout.split()
    assert int(taken) < count
    assert finished == "False"
    assert "ulimit -n" in child.stderr
