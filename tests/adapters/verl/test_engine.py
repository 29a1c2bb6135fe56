"""Our checkpoint engine by itself, and as verl's registry makes it where verl is installed."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from helpers import asynchronous
from verl_adapter import verl
from weights_members import checksum_of, version_of

from transport.adapters.engines.checkpoint import CheckpointAdapter
from transport.errors import MissingDependencyError, RingError
from transport.weights.versions.layout import weights_checksum

pytestmark = [pytest.mark.ucx, pytest.mark.adapters("verl")]

HAS_VERL = importlib.util.find_spec("verl") is not None


def made_by(base: str, **options: Any) -> Any:
    options = {"bucket_size": 16384, "address": "127.0.0.1", "tensors": "numpy", **options}
    if base == "alone":
        return CheckpointAdapter(**options)
    from verl.checkpoint_engine.base import CheckpointEngineRegistry

    return CheckpointEngineRegistry.new(verl.BACKEND, **options)


@pytest.fixture(
    params=["alone", pytest.param("verl", marks=pytest.mark.skipif(not HAS_VERL, reason="verl is not installed"))]
)
def engines(request: pytest.FixtureRequest) -> Iterator[list[Any]]:
    """A sender, a trainer that does not send, and two replicas of one host."""
    made = [made_by(request.param, is_master=at == 0) for at in range(4)]
    yield made
    for engine in made:
        engine.close()


def build(engines: list[Any]) -> None:
    """As verl's manager does it: every call is made in every worker at once."""
    metadata = [engine.prepare() for engine in engines]
    actor, rollout = type(engines[0]).build_topology(2, 2, metadata)
    arguments = [{key: values[at] for key, values in side.items()} for side in (actor, rollout) for at in range(2)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda pair: pair[0].init_process_group(**pair[1]), zip(engines, arguments, strict=True)))


async def transfer(engines: list[Any], version: int) -> list[dict[str, Any]]:
    async def receive(engine: Any) -> dict[str, Any]:
        return {name: tensor async for name, tensor in engine.receive_weights(global_steps=version)}

    drained = iter(version_of(version).items())
    metrics, nothing, *received = await asyncio.gather(
        engines[0].send_weights(iter(version_of(version).items()), global_steps=version),
        engines[1].send_weights(drained, global_steps=version),
        receive(engines[2]),
        receive(engines[3]),
    )
    assert metrics["payload_transport/bytes_sent"] > 0
    assert metrics["payload_transport/version"] == version
    assert nothing == {}
    assert next(drained, None) is None  # a trainer that does not send has produced its tensors all the same
    return received


@asynchronous
async def test_a_version_goes_from_the_first_trainer_to_every_replica(engines: list[Any]) -> None:
    for version in (1, 2):
        build(engines)
        for weights in await transfer(engines, version):
            assert weights_checksum(weights) == checksum_of(version)
        for engine in engines:
            engine.finalize()
        cached = {name: tensor async for name, tensor in engines[2].get_weights()}
        assert weights_checksum(cached) == checksum_of(version)


def test_finalize_is_legal_before_anything_was_begun(engines: list[Any]) -> None:
    for engine in engines:
        engine.finalize()
        engine.finalize()


@asynchronous
async def test_a_consumer_that_stops_in_the_middle_leaves_the_version_before(engines: list[Any]) -> None:
    build(engines)
    await transfer(engines, 1)
    build(engines)

    async def stop(engine: Any) -> None:
        receiving = engine.receive_weights(global_steps=2)
        await anext(receiving)
        await receiving.aclose()

    await asyncio.gather(
        engines[0].send_weights(iter(version_of(2).items()), global_steps=2), stop(engines[2]), stop(engines[3])
    )
    cached = {name: tensor async for name, tensor in engines[2].get_weights()}
    assert weights_checksum(cached) == checksum_of(1)
    engines[2].finalize()


async def drained(engine: Any, version: int) -> None:
    async for _ in engine.receive_weights(global_steps=version):
        pass


async def stopped_in_the_middle(engines: list[Any], version: int, *, at: int, in_time: list[str]) -> None:
    """Replica ``at`` stops after its first tensor; what its stopping raises is noted in ``in_time``."""

    async def receive(engine: Any) -> None:
        if engine is not engines[at]:
            await drained(engine, version)
            return
        receiving = engine.receive_weights(global_steps=version)
        await anext(receiving)
        try:
            await receiving.aclose()
        except Exception as error:
            in_time.append(f"{type(error).__name__}: {error}")

    sent = engines[0].send_weights(iter(version_of(version).items()), global_steps=version)
    await asyncio.gather(sent, receive(engines[2]), receive(engines[3]))


@asynchronous
async def test_a_version_that_cannot_be_taken_back_is_said(engines: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    build(engines)
    await transfer(engines, 1)
    build(engines)
    replica = engines[2]

    def fail() -> None:
        raise RingError("the copy of version 2 cannot be given back")

    monkeypatch.setattr(replica._engine, "revert", fail)
    raised: list[str] = []
    await stopped_in_the_middle(engines, 2, at=2, in_time=raised)
    assert raised == ["RingError: the copy of version 2 cannot be given back"]


@asynchronous
async def test_a_first_version_that_is_not_taken_is_kept_and_said(
    engines: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    build(engines)
    raised: list[str] = []
    await stopped_in_the_middle(engines, 1, at=2, in_time=raised)
    assert raised == []
    (record,) = [record for record in caplog.records if record.name == "transport.adapters.engines.checkpoint"]
    assert record.levelname == "WARNING"
    assert "the consumer stopped before the end of version 1, which is kept" in record.message
    assert "no version is before it" in record.message


@asynchronous
async def test_a_consumer_that_ends_after_the_manager_has_restored_changes_nothing(engines: list[Any]) -> None:
    build(engines)
    await transfer(engines, 1)
    replica = engines[2]
    for version, restored in ((2, 2), (3, 2)):
        build(engines)
        late = replica.receive_weights(global_steps=version)
        sent = engines[0].send_weights(iter(version_of(version).items()), global_steps=version)
        await asyncio.gather(sent, anext(late), drained(engines[3], version))
        assert replica.restore(restored)
        await late.aclose()
        again = {name: tensor async for name, tensor in replica.receive_weights(global_steps=restored)}
        assert weights_checksum(again) == checksum_of(restored)
        assert replica.state() == {"version": restored, "loading": False}


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
@asynchronous
async def test_torch_tensors_come_and_go(engines: list[Any]) -> None:
    import torch

    build(engines)
    sent = {"a": torch.arange(10_000, dtype=torch.bfloat16).reshape(100, 100), "b": torch.ones(3)}
    for engine in engines[2:]:
        engine._tensors = "torch"

    async def receive(engine: Any) -> dict[str, Any]:
        return {name: tensor async for name, tensor in engine.receive_weights()}

    _, *received = await asyncio.gather(engines[0].send_weights(iter(sent.items())), *map(receive, engines[2:]))
    for weights in received:
        assert all(torch.equal(weights[name], sent[name]) for name in sent)


@pytest.mark.skipif(HAS_VERL, reason="verl is installed")
def test_without_verl_registering_says_what_is_missing() -> None:
    with pytest.raises(MissingDependencyError, match=r"pip install 'verl>=0\.9,<0\.10'"):
        verl.register()
