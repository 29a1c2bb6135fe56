"""How long a trainer's claims last, what it says of payloads without a version, and how it begins and ends."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
from found_rings import LONG_S, ring_of
from helpers import NETWORK_WIRE, cut_connections, eventually, on_loop
from interrupted_lines import Interrupted

from transport import Schema, SharedRingBuffer, Trainer, UCXXServer
from transport.errors import TransportError
from transport.packer.consumed_record import ConsumedRecord
from transport.packer.options import ClientOptions

pytestmark = pytest.mark.ucx
SCHEMA = Schema.of(x="int64")
both = pytest.mark.parametrize("wire", ["mapped", NETWORK_WIRE])


@pytest.fixture
def prefix() -> str:
    return f"lasting-{secrets.token_hex(4)}-"


@pytest.fixture
def ring(prefix: str) -> Iterator[SharedRingBuffer]:
    with ring_of(prefix, schema=SCHEMA, slot_bytes=None) as made:
        yield made


@both
def test_a_trainer_that_lives_keeps_what_it_holds_for_longer_than_its_lease(
    ring: SharedRingBuffer, prefix: str, wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSPORT_CLAIM_LEASE_S", "0.4")
    ring.write({"x": np.int64(1)})
    with (
        Trainer(SCHEMA, f"rings:{prefix}", wire={wire}) as trainer,  # type: ignore[arg-type]
        Trainer(SCHEMA, f"rings:{prefix}", wire={wire}) as other,  # type: ignore[arg-type]
    ):
        batch = trainer.take(1, LONG_S)
        assert batch is not None
        assert other.take(1, 1.5) is None  # the time that passes is what is tested
        batch.consume()
        assert batch.accepted.all()


@both
def test_payloads_without_a_version_pass_with_a_warning(
    ring: SharedRingBuffer, prefix: str, wire: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Trainer(SCHEMA, f"rings:{prefix}", wire={wire}, max_age=0) as trainer:  # type: ignore[arg-type]
        trainer.version = 5
        for version, said in ((5, 0), (None, 1), (None, 1)):  # once
            ring.write({"x": np.int64(1)}, policy_version=version)
            batch = trainer.take(1, LONG_S)
            assert batch is not None
            batch.consume()
            assert len([each for each in caplog.messages if "max_age" in each]) == said


@pytest.mark.parametrize("wrong", [{"client": ClientOptions(device_receive="nothing")}, {"rings": "redis://nowhere"}])
def test_a_trainer_that_cannot_be_made_leaves_neither_loop_nor_client(wrong: dict[str, object]) -> None:
    with pytest.raises(TransportError):
        Trainer(**{"schema": SCHEMA, "rings": "rings:nobody-", **wrong})  # type: ignore[arg-type]
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("transport")]


@both
def test_a_close_that_is_interrupted_at_any_line_is_finished_by_the_next_one(
    ring: SharedRingBuffer, prefix: str, wire: str
) -> None:
    of = ("transport.training", "transport.claims.batch", "transport.claims.taken_part")
    ring.write({"x": np.int64(0)})
    at, interrupted = 0, True
    while interrupted:
        at += 1
        interrupt = Interrupted(at, of)
        record = ConsumedRecord()
        trainer = Trainer(SCHEMA, f"rings:{prefix}", wire={wire}, record=record)  # type: ignore[arg-type]
        ring.write({"x": np.int64(at)})
        first, second = trainer.take(1, LONG_S), trainer.take(1, LONG_S)
        assert first is not None and second is not None
        assert second.in_vain.tolist() == [0], at
        first.consume()
        with interrupt:
            trainer.close()
        interrupted = interrupt.left <= 0
        trainer.close()
        assert len(record) == 1, at
        assert trainer.statistics().client.links_in_use == 0 and not trainer._dropped.alive, at
        eventually(lambda: ring.native.depth(0)["ready"] == 1, "what was not consumed can be claimed")
        assert ring.native.depth(0)["done"] == at


def test_a_take_that_is_interrupted_at_any_line_gives_every_payload_to_a_later_one(
    ring: SharedRingBuffer, prefix: str
) -> None:
    at, interrupted = 0, True
    while interrupted:
        at += 1
        interrupt = Interrupted(at, ("transport.claims.network", "transport.claims.taken_part"))
        with Trainer(SCHEMA, f"rings:{prefix}", wire={NETWORK_WIRE}) as trainer:  # type: ignore[arg-type]
            ring.write_many([{"x": np.int64(number)} for number in range(4)])
            assert trainer.take(4) is None
            eventually(lambda: ring.native.depth(0)["claimed"] == 4, "they have come, in one part")
            with interrupt:
                trainer.take(2, LONG_S)  # what it returns is dropped, and goes back
            interrupted = interrupt.left <= 0
            accepted: list[int] = []
            while len(accepted) < 4:
                batch = trainer.take(2, LONG_S)
                assert batch is not None, at
                batch.consume()
                accepted += [int(each["x"]) for each, ours in zip(batch, batch.accepted, strict=True) if ours]
            assert sorted(accepted) == [0, 1, 2, 3], at


@pytest.mark.slow
def test_a_batch_whose_answers_are_noted_again_after_an_interrupt_at_any_line_is_counted_once(prefix: str) -> None:
    of = ("transport.training", ConsumedRecord.__module__)
    at, interrupted = 0, True
    with (
        SharedRingBuffer.create(SCHEMA, slots=4, prefix=prefix) as ring,
        UCXXServer(ring, mode="thread") as server,
        Trainer(SCHEMA, f"rings:{prefix}", wire={NETWORK_WIRE}) as trainer,  # type: ignore[arg-type]
    ):
        while interrupted:
            at += 1
            interrupted = False
            ring.write({"x": np.int64(at)})
            for lost in (True, False):
                batch = trainer.take(1, LONG_S)
                assert batch is not None
                if lost:
                    on_loop(server, partial(cut_connections, server))
                batch.consume()
                interrupt = Interrupted(at, of)
                with interrupt:
                    assert len(batch.accepted) == 1
                interrupted = interrupted or interrupt.left <= 0
                assert batch.accepted.tolist() == [not lost]
            counted = trainer.statistics()
            assert (counted.consumed, counted.lost_claims) == (at, at)
    assert at > 10
