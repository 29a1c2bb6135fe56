"""What the matrix of misuse has found, each by itself."""

from __future__ import annotations

import asyncio
import math
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import until
from packers import Packer

from transport import BlockingClient, FoundRings, Rollout, Schema, SharedRingBuffer, Trainer, UCXXClient, UCXXServer
from transport.cooldown import open_destination
from transport.errors import SchemaError, UsageError
from transport.rendezvous import Rendezvous, Rules
from transport.store.memory import MemoryStore
from transport.testing import run

SCHEMA = Schema.of(step=("int64",))
ANYTHING: Any = 3


@pytest.mark.parametrize("path", ["", ".", "..", "../kept", "a/../../kept", "/kept", "a//b", "a/"])
def test_a_path_that_leaves_a_destination_or_is_all_of_it_is_refused(path: str, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("another's")
    (tmp_path / "root" / "run").mkdir(parents=True)
    (tmp_path / "root" / "run" / "checkpoint").write_text("weights")
    with open_destination(str(tmp_path / "root")) as destination:
        with pytest.raises(UsageError, match="no path below a destination"):
            destination.delete(path)
        with pytest.raises(UsageError, match="no path below a destination"):
            destination.put(path, b"new")
        assert destination.names("run") == ["checkpoint"]
    assert (tmp_path / "kept").read_text() == "another's"


@pytest.mark.ucx
def test_a_refused_setup_of_a_packer_leaves_no_thread_and_no_client() -> None:
    with pytest.raises(UsageError, match="schemas is one Schema"):
        Packer().setup_ucxx_packer(wire={"tcp"}, schemas=SCHEMA)  # type: ignore[arg-type]
    # leak_check looks for the rest


def test_a_refused_attachment_keeps_no_owner_place() -> None:
    with SharedRingBuffer.create(SCHEMA, slots=1) as ring:
        for schema in (ANYTHING, "text", Schema):
            with pytest.raises((UsageError, AttributeError)):
                SharedRingBuffer.attach(ring.name, schema, role="reader")
            assert len(ring.native.owners()) == 1
        with pytest.raises(UsageError, match="choose 'writer'"):
            SharedRingBuffer.attach(ring.name, SCHEMA, role="owner")  # type: ignore[arg-type]


@pytest.mark.ucx
def test_what_is_at_hand_in_place_of_what_is_meant_is_refused_by_name() -> None:
    one: Any = SCHEMA
    for refused in (
        lambda: Rollout({"step": "int64"}, mode="thread"),  # type: ignore[arg-type]
        lambda: Rollout(SCHEMA, mode="thread", drain_s=-1.0),
        lambda: Packer().setup_ucxx_packer(schemas=one),
    ):
        with pytest.raises(UsageError):
            refused()
    with Rollout(SCHEMA, slots=2, mode="thread", drain_s=0.0) as rollout, Packer() as packer:
        array: Any = np.zeros(3)
        with pytest.raises(SchemaError, match="mapping"):
            rollout.write_to_buffer(array)
        with pytest.raises(SchemaError, match="mapping"):
            rollout.write_many_to_buffer([array])
        packer.setup_ucxx_packer(schemas=[SCHEMA])
        tickets: Any = []
        with pytest.raises(UsageError, match="collect_prefetch"):
            packer.consume(tickets)


@pytest.mark.ucx
@pytest.mark.parametrize("timeout", [math.inf, 1e30])
def test_a_packer_waits_for_its_batch_without_an_end(timeout: float) -> None:
    packer = Packer()
    with SharedRingBuffer.create(SCHEMA, slots=2) as ring, UCXXServer(ring, mode="thread"):
        packer.setup_ucxx_packer(wire={"tcp"}, schemas=[SCHEMA])
        try:
            packer.start_prefetch([ring.write({"step": np.int64(3)})])
            assert packer.wait_prefetch(timeout)
            batch = packer.collect_prefetch(timeout)
            assert batch is not None and len(batch.payloads) == 1
            batch.release()
        finally:
            packer.cleanup_ucxx_packer()


@pytest.mark.ucx
def test_a_client_that_another_thread_closes_meanwhile_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    client = BlockingClient(wire={"tcp"})
    close, others = client._client.close, list[threading.Thread]()

    def meanwhile() -> Any:
        if not others:  # between the look and the call
            others.append(threading.Thread(target=client.close))
            others[0].start()
            others[0].join()
        return close()

    monkeypatch.setattr(client._client, "close", meanwhile)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the coroutine that came too late
        client.close()
    assert client._thread.closed


@pytest.mark.ucx
def test_a_client_of_another_loop_refuses() -> None:
    with SharedRingBuffer.create(SCHEMA, slots=2) as ring, UCXXServer(ring, mode="thread"):
        ticket = ring.write({"step": np.int64(3)})

        async def use(client: UCXXClient) -> None:
            for call in (
                client.read(ticket),
                client.state(ticket),
                client.discard(ticket),
                client.warm(),
                client.close(),
            ):
                with pytest.raises(UsageError, match="belongs to another event loop or thread"):
                    await call

        async def own() -> None:
            async with UCXXClient(wire={"tcp"}, schemas=[SCHEMA]) as client:
                await asyncio.to_thread(asyncio.run, use(client))
                assert (await client.read(ticket))["step"] == 3

        run(own())


def test_a_rank_that_came_after_a_join_was_cancelled_is_returned_by_the_next() -> None:
    async def body() -> None:
        rules = Rules(poll_s=0.02, last_call_s=0.0)
        async with Rendezvous(MemoryStore(), "run", rules) as member:
            joining = asyncio.create_task(member.join())
            await until(lambda: member._joining)
            joining.cancel()
            with pytest.raises(asyncio.CancelledError):
                await joining
            await until(lambda: member.place)
            assert await member.join() == member.place

    run(body())


def test_an_error_that_no_argument_explains_stays_what_it_is() -> None:
    """A callee's own defect is not blamed on its caller."""

    class Broken(FoundRings):
        def take_parts(self, *_: Any, **__: Any) -> Any:
            raise KeyError("a defect")

    with Broken() as rings, Trainer(None, rings) as trainer, pytest.raises(KeyError, match="a defect"):
        trainer.take(1)
