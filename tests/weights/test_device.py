"""Weights from device memory, and into it: bytes, proofs, order with streams, and what is held until when."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import shard_members
from helpers import asynchronous, noise
from weights_engines import BUCKET, TOTAL, build, engine, engines, transfer
from weights_members import checksum_of, version_of

from transport.adapters.engines.checkpoint import CheckpointAdapter
from transport.errors import (
    BufferUnsuitableError,
    MissingDependencyError,
    UsageError,
    WeightsChecksumError,
)
from transport.weights.engine import WeightsEngine
from transport.weights.versions.copies import Held, neighbours
from transport.weights.versions.layout import row_of, specs_of, weights_checksum
from transport.weights.worker import ReferenceWorker, Replica

pytestmark = pytest.mark.ucx


def on_device(cupy: Any, version: int, but: str = "") -> dict[str, Any]:
    """A version's tensors, as kernels of the current stream write them."""
    return {name: value if name == but else cupy.on_device(value) for name, value in version_of(version).items()}


def copied(cupy: Any, kind: str) -> int:
    """Bytes of all copies of a kind."""
    return sum(size for each, size, _ in cupy.fake.copies if each == kind)


async def held_by(made: list[WeightsEngine], version: int, weights: dict[str, Any]) -> list[Held]:
    """What the replicas hold, the group not yet left."""
    await build(made)
    _, *held = await asyncio.gather(
        made[0].send_weights(iter(weights.items()), version), *(each.receive(version) for each in made[1:])
    )
    return held


@pytest.mark.nightly(keep=1)
# --- out of device memory -------------------------------------------------------------------------------------
@pytest.mark.parametrize("specs", [None, specs_of(version_of(0))])
@asynchronous
async def test_a_version_from_a_device_is_the_one_from_the_host(cupy: Any, specs: Any) -> None:
    async with engines("ab", specs=specs) as made:
        for version in (1, 2):
            found = await transfer(made, version, on_device(cupy, version, but="layers.0.up"))
            assert found == checksum_of(version)


@asynchronous
async def test_each_byte_of_a_version_is_copied_from_the_device_once(cupy: Any) -> None:
    async with engines("a", specs=specs_of(version_of(0))) as made:
        await transfer(made, 1, on_device(cupy, 1))
        tensors = sum(value.nbytes for value in version_of(0).values())
        assert copied(cupy, "d2h") == tensors and copied(cupy, "h2d") == 0
        buckets = -(-TOTAL // BUCKET)
        assert len(cupy.fake.copies) < buckets + 2 * len(version_of(0)), "a bucket's worth at a time"


@asynchronous
async def test_a_version_has_what_the_stream_of_the_iterator_was_to_write(cupy: Any) -> None:
    def made_late() -> Iterator[tuple[str, Any]]:
        with cupy.cuda.Stream(non_blocking=True):
            yield from on_device(cupy, 1).items()

    async with engines("a", specs=specs_of(version_of(0))) as made:
        await build(made)
        proof, held = await asyncio.gather(made[0].send_weights(made_late(), 1), made[1].receive(1))
        assert proof == held.proof
        assert held.checksum == checksum_of(1)


@asynchronous
async def test_a_version_keeps_the_streams_that_its_iterator_drops(cupy: Any) -> None:
    weights = {f"t{number}": noise(1000, number) for number in range(4)}  # they share a bucket

    def made_on_streams_of_their_own() -> Iterator[tuple[str, Any]]:
        for name, value in weights.items():
            with cupy.cuda.Stream(non_blocking=True):
                yield name, cupy.on_device(value)

    async with engines("a", specs=specs_of(weights)) as made:
        await build(made)
        _, held = await asyncio.gather(made[0].send_weights(made_on_streams_of_their_own(), 1), made[1].receive(1))
        assert held.checksum == weights_checksum(weights)


@pytest.mark.parametrize("per_thread", [False, True])
def test_verls_engine_takes_tensors_from_the_stream_of_the_thread_that_makes_them(cupy: Any, per_thread: bool) -> None:
    made = [
        CheckpointAdapter(BUCKET, is_master=not at, address="127.0.0.1", tensors="numpy", specs=specs_of(version_of(0)))
        for at in range(2)
    ]
    try:
        metadata = [each.prepare() for each in made]
        actor, rollout = CheckpointAdapter.build_topology(1, 1, metadata)

        async def update() -> int:
            await asyncio.gather(
                *(
                    asyncio.to_thread(each.init_process_group, **{key: values[0] for key, values in arguments.items()})
                    for each, arguments in zip(made, (actor, rollout), strict=True)
                )
            )
            cupy.fake.per_thread = per_thread
            with cupy.cuda.Stream(non_blocking=True):
                sending = made[0].send_weights(iter(on_device(cupy, 1).items()), 1)
                taking = asyncio.ensure_future(collect())
                await sending
            return weights_checksum(await taking)

        async def collect() -> dict[str, Any]:
            return {name: array async for name, array in made[1].receive_weights(1)}

        assert asyncio.run(update()) == checksum_of(1)
    finally:
        for each in made:
            each.close()


@pytest.mark.nightly
@asynchronous
async def test_changes_are_found_in_device_memory(cupy: Any) -> None:
    async with engines("ab", delta=True) as made:
        await transfer(made, 0, on_device(cupy, 0))
        sent = made[0].statistics().bytes_sent
        for version in (1, 2):
            found = await transfer(made, version, on_device(cupy, version, but="layers.0.norm"))
            assert found == checksum_of(version)
        assert made[0].statistics().bytes_sent - sent < TOTAL / 2


@asynchronous
async def test_a_bucket_that_cannot_be_copied_is_given_back(cupy: Any) -> None:
    async with engines("a", specs=specs_of(version_of(0))) as made:
        await build(made)
        receiving = asyncio.ensure_future(made[1].receive(1))
        cupy.fake.copies_left = 2
        with pytest.raises(cupy.cuda.runtime.CUDARuntimeError):
            await made[0].send_weights(iter(on_device(cupy, 1).items()), 1)
        assert not any(cupy.fake.queues.values()), "a copy into a bucket is queued"
        await asyncio.gather(receiving, return_exceptions=True)
        cupy.fake.copies_left = 1 << 30
        assert await transfer(made, 2, on_device(cupy, 2)) == checksum_of(2)


def test_the_checksum_of_weights_on_a_device_is_that_of_their_bytes(cupy: Any) -> None:
    assert weights_checksum(on_device(cupy, 3)) == checksum_of(3)
    large = noise((5 << 20) + 7)
    assert weights_checksum({"x": cupy.on_device(large)}) == weights_checksum({"x": large})
    assert len(cupy.fake.pinned_on) == 2, "one piece of pinned memory for each"


# --- into device memory ---------------------------------------------------------------------------------------
@asynchronous
async def test_a_version_comes_out_in_device_memory(cupy: Any) -> None:
    async with engines("aa") as made:  # one lands it, the other maps it
        for each in made[1:]:
            await each.close()
        made[1:] = [engine(f"r{at}", host="a", wires=frozenset({"tcp"}), device="cupy") for at in range(2)]
        await held_by(made, 1, version_of(1))
        for each in made[1:]:
            arrays = {name: array async for name, array in each.get_weights()}
            cupy.fake.run_all()
            for name, value in version_of(1).items():
                assert isinstance(arrays[name], cupy.ndarray) and arrays[name].dtype == value.dtype, name
                assert arrays[name].shape == value.shape and arrays[name].host.tobytes() == value.tobytes()
        for each in made:
            await each.finalize()


@asynchronous
async def test_tensors_come_in_groups_of_one_copy_each(cupy: Any) -> None:
    host = {f"t{number}": noise(1000, number) for number in range(10)} | {"large": noise(50_000), "last": noise(10)}
    layout = row_of(specs_of(host))
    groups = [[place.name for place in group] for group in neighbours(layout, 4096)]
    assert groups == [[f"t{at}" for at in range(first, min(first + 4, 10))] for first in (0, 4, 8)] + [
        ["large"],
        ["last"],
    ]
    async with engines("a") as made:
        (held,) = await held_by(made, 1, host)
        engine_of_cupy = engine("device", device="cupy", bucket_bytes=4096)
        arrays = dict(engine_of_cupy.arrays(held))
        assert [size for _, size, _ in cupy.fake.copies] == [4 * 1024 - 24, 4 * 1024 - 24, 2024, 50_000, 10]
        held.settle()
        assert {name: array.host.tobytes() for name, array in arrays.items()} == {
            name: value.tobytes() for name, value in host.items()
        }
        assert cupy.fake.registered, "the copies run at the speed of the bus"
        held.release()
        await engine_of_cupy.close()
    assert not cupy.fake.registered


@asynchronous
async def test_a_version_is_given_back_only_when_the_copies_out_of_it_have_run(cupy: Any) -> None:
    async with engines("a") as made:
        made[1]._device = engine("device", device="cupy")._device
        cupy.fake.stopped = True
        stream = cupy.cuda.Stream(non_blocking=True)
        (held,) = await held_by(made, 1, version_of(1))
        with stream:
            arrays = dict(made[1].arrays(held))
            seen = arrays["head"].astype(np.float64)  # a kernel of the consumer's
        assert {used for _, _, used in cupy.fake.copies} == {stream.ptr}
        cupy.fake.stopped = False
        held.release()
        assert arrays["head"].host.tobytes() == version_of(1)["head"].tobytes()
        cupy.fake.run_all()
        assert (seen.host == version_of(1)["head"]).all()
        for each in made:
            await each.finalize()


@asynchronous
async def test_a_copy_to_the_device_that_fails_leaves_the_version_whole(cupy: Any) -> None:
    async with engines("a") as made:
        made[1]._device = engine("device", device="cupy")._device
        (held,) = await held_by(made, 1, version_of(1))
        cupy.fake.copies_left, cupy.fake.marks_left = 100, 1
        with pytest.raises(cupy.cuda.runtime.CUDARuntimeError):
            dict(made[1].arrays(held))
        assert not any(cupy.fake.queues.values()), "a copy out of the version is queued, and nobody knows"
        cupy.fake.marks_left = 100
        arrays = dict(made[1].arrays(held))
        cupy.fake.run_all()
        assert weights_checksum(arrays) == checksum_of(1)
        for each in made:
            await each.finalize()


class OnDevice(ReferenceWorker):
    """Serves the arrays that it is given; ``spoils`` one of them first."""

    spoils = False

    def load(self, weights: Any, version: int) -> Any:
        assert all(weights[name].host.tobytes() == value.tobytes() for name, value in version_of(version).items())
        self.weights, self.version = dict(weights), version
        if self.spoils:
            self.weights["head"].host[0, 0] += 1


@asynchronous
async def test_a_worker_is_given_arrays_that_are_there_and_what_it_serves_is_hashed_on_its_device(cupy: Any) -> None:
    async with engines("") as made:
        worker = OnDevice()
        worker.serves_given = False  # else nothing is hashed in the pause
        cupy.fake.stopped = True  # streams run only where somebody waits for them
        replica = Replica(engine("r", wires=frozenset({"tcp"}), device="cupy"), worker)
        made.append(replica.engine)
        for version in (1, 2):
            worker.spoils = version == 2
            await build(made)
            sending = asyncio.ensure_future(made[0].send_weights(iter(version_of(version).items()), version))
            if worker.spoils:
                await replica.land(version)
                with pytest.raises(WeightsChecksumError, match="its load changed or lost tensors"):
                    await replica.load()
                with pytest.raises(WeightsChecksumError, match="its load changed or lost tensors"):
                    await replica.restore()  # it spoils that one, too
                assert await replica.prove() is None
            else:
                await replica.land(version)
                assert replica.engine.held.checksum == checksum_of(version)
                assert await replica.load() is not None
                assert not any(cupy.fake.queues.values()) and isinstance(worker.weights["head"], cupy.ndarray)
            await asyncio.gather(sending, return_exceptions=True)
            for each in made:
                await each.finalize()


class Staging(OnDevice):
    """Serves what its `stage` makes of the arrays; ``spoils`` what it makes."""

    def stage(self, weights: Any, version: int) -> Any:
        made = dict(weights)
        if self.spoils:
            made["head"].host[0, 0] += 1
        return made

    def load(self, weights: Any, version: int) -> Any:
        self.weights, self.version = weights, version

    def served_checksum(self) -> int | None:
        raise AssertionError("what is served as it was proven is not hashed in the pause")


@asynchronous
@pytest.mark.parametrize("spoils", [False, True])
async def test_what_a_worker_stages_on_its_device_is_hashed_and_what_it_then_serves_is_not(
    cupy: Any, spoils: bool
) -> None:
    async with engines("") as made:
        worker = Staging()
        worker.spoils = spoils
        replica = Replica(engine("r", wires=frozenset({"tcp"}), device="cupy"), worker)
        made.append(replica.engine)
        await build(made)
        sending = asyncio.ensure_future(made[0].send_weights(iter(version_of(1).items()), 1))
        await replica.land(1)
        if spoils:
            with pytest.raises(WeightsChecksumError, match="its stage changed or lost tensors"):
                await replica.load()
        else:
            assert await replica.load() is not None
        await asyncio.gather(sending, return_exceptions=True)
        for each in made:
            await each.finalize()


@asynchronous
async def test_a_dtype_that_the_library_lacks_and_a_device_that_is_not_there_are_named(cupy: Any) -> None:
    import ml_dtypes

    with pytest.raises(UsageError, match="this process sees 1 CUDA devices"):
        engine("r", device="cupy:1")
    async with engines("a") as made:
        (held,) = await held_by(made, 1, {"x": np.zeros(16, ml_dtypes.float8_e5m2)})
        giving = engine("device", device="cupy")
        with pytest.raises(BufferUnsuitableError, match="x: CuPy has no float8_e5m2"):
            dict(giving.arrays(held))
        await giving.close()
        for each in made:
            await each.finalize()


def test_pinned_memory_is_looked_through_again_only_when_a_copy_without_a_mark_has_run(cupy: Any) -> None:
    values = noise(5000)
    array = cupy.on_device(values)
    cupy.fake.marks_left = 0
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError):
        weights_checksum({"x": array})
    assert not any(cupy.fake.queues.values()), "a copy into pinned memory is queued, and nobody waits for it"
    cupy.fake.marks_left = 100
    assert weights_checksum({"x": array}) == weights_checksum({"x": values})


@asynchronous
async def test_shards_go_out_of_device_memory_and_into_it(cupy: Any) -> None:
    source = shard_members.Shards(0, 1)
    worker = shard_members.Serving(0, 1)
    sender = WeightsEngine("t", source.layout, bucket_bytes=4096, address="127.0.0.1")
    receiver = WeightsEngine("r", worker.layout, bucket_bytes=4096, address="127.0.0.1", device="cupy")
    try:
        for version in (1, 2):
            host = dict(source.weights(version))
            weights = {name: value if name == "down" else cupy.on_device(value) for name, value in host.items()}
            await build([sender, receiver])
            _, held = await asyncio.gather(sender.send_weights(weights, version), receiver.receive(version))
            assert held.checksum == shard_members.checksum_of(worker.layout, version)
            arrays = dict(receiver.arrays(held))
            held.settle()
            found = {name: cupy.asnumpy(array) for name, array in arrays.items()}
            assert weights_checksum(found) == held.checksum, "in the order in which a worker's tensors are hashed"
            del arrays
            for each in (sender, receiver):
                await each.finalize()
    finally:
        await sender.close()
        await receiver.close()


@asynchronous
async def test_strided_tensors_are_made_contiguous_on_their_device(cupy: Any) -> None:
    wide = np.arange(4000, dtype=np.float32).reshape(40, 100)
    async with engines("a", specs=specs_of({"x": wide[::2, ::2]})) as made:
        found = await transfer(made, 1, {"x": cupy.on_device(wide)[::2, ::2]})
        assert found == weights_checksum({"x": wide[::2, ::2]})
    assert copied(cupy, "d2h") == 4000


def test_weights_on_a_device_without_cupy_say_what_to_install(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = on_device(cupy, 0)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(MissingDependencyError, match="pip install 'cupy-cuda12x"):
        weights_checksum(weights)
    with pytest.raises(MissingDependencyError, match="pip install 'cupy-cuda12x"):
        engine("replica", device="cupy")
