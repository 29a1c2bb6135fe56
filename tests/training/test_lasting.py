"""How long a trainer's claims last, what it says of payloads without a version, and how it begins and ends."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
from found_rings import LONG_S, ring_of
from helpers import NETWORK_WIRE, cut_connections, eventually, on_loop
from interrupted_lines import at_each_line, interrupts

from transport import Schema, SharedRingBuffer, Trainer, UCXXServer
from transport.errors import TransportError
from transport.packer.consumed_record import ConsumedRecord
from transport.packer.options import ClientOptions

pytestmark = pytest.mark.ucx
SCHEMA = Schema.of(x="int64")
both = pytest.mark.parametrize("wire", ["mapped", NETWORK_WIRE])


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


@pytest.mark.nightly(keep=1)
@at_each_line
@both
def test_a_close_that_is_interrupted_at_any_line_is_finished_by_the_next_one(
    ring: SharedRingBuffer, prefix: str, wire: str, first: int
) -> None:
    of = ("transport.training", "transport.claims.batch", "transport.claims.taken_part")
    ring.write({"x": np.int64(0)})
    for closed, interrupt in enumerate(interrupts(first, of), 1):
        at = interrupt.at
        record = ConsumedRecord()
        trainer = Trainer(SCHEMA, f"rings:{prefix}", wire={wire}, record=record)  # type: ignore[arg-type]
        ring.write({"x": np.int64(closed)})
        consumed, returned = trainer.take(1, LONG_S), trainer.take(1, LONG_S)
        assert consumed is not None and returned is not None
        assert returned.in_vain.tolist() == [0], at
        consumed.consume()
        with interrupt:
            trainer.close()
        trainer.close()
        assert len(record) == 1, at
        assert trainer.statistics().client.links_in_use == 0 and not trainer._dropped.alive, at
        eventually(lambda: ring.native.depth(0)["ready"] == 1, "what was not consumed can be claimed")
        assert ring.native.depth(0)["done"] == closed


@pytest.mark.nightly
@at_each_line
def test_a_take_that_is_interrupted_at_any_line_gives_every_payload_to_a_later_one(
    ring: SharedRingBuffer, prefix: str, first: int
) -> None:
    for interrupt in interrupts(first, ("transport.claims.network", "transport.claims.taken_part")):
        with Trainer(SCHEMA, f"rings:{prefix}", wire={NETWORK_WIRE}) as trainer:  # type: ignore[arg-type]
            ring.write_many([{"x": np.int64(number)} for number in range(4)])
            assert trainer.take(4) is None
            eventually(lambda: ring.native.depth(0)["claimed"] == 4, "they have come, in one part")
            with interrupt:
                trainer.take(2, LONG_S)  # what it returns is dropped, and goes back
            accepted: list[int] = []
            while len(accepted) < 4:
                batch = trainer.take(2, LONG_S)
                assert batch is not None, interrupt.at
                batch.consume()
                accepted += [int(each["x"]) for each, ours in zip(batch, batch.accepted, strict=True) if ours]
            assert sorted(accepted) == [0, 1, 2, 3], interrupt.at


@pytest.mark.slow
@pytest.mark.nightly
@at_each_line
@pytest.mark.parametrize("lost", [False, True])
def test_a_batch_whose_answers_are_noted_again_after_an_interrupt_at_any_line_is_counted_once(
    prefix: str, first: int, lost: bool
) -> None:
    of = ("transport.training", ConsumedRecord.__module__)
    with (
        SharedRingBuffer.create(SCHEMA, slots=4, prefix=prefix) as ring,
        UCXXServer(ring, mode="thread") as server,
        Trainer(SCHEMA, f"rings:{prefix}", wire={NETWORK_WIRE}) as trainer,  # type: ignore[arg-type]
    ):
        for number, interrupt in enumerate(interrupts(first, of), 1):
            ring.write({"x": np.int64(number)})
            if lost:
                batch = trainer.take(1, LONG_S)
                assert batch is not None
                on_loop(server, partial(cut_connections, server))
                batch.consume()
                with interrupt:
                    assert len(batch.accepted) == 1
                assert batch.accepted.tolist() == [False]
            batch = trainer.take(1, LONG_S)
            assert batch is not None
            batch.consume()
            with contextlib.nullcontext() if lost else interrupt:
                assert len(batch.accepted) == 1
            assert batch.accepted.tolist() == [True]
            counted = trainer.statistics()
            assert (counted.consumed, counted.lost_claims) == (number, number if lost else 0)
