"""With a CUDA device: weights out of its memory and into it, by every way that an update goes.

`make gpu` runs these. Without a device each is skipped, and says why.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gpu_payloads import busy, bytes_of, to_device, why_not
from helpers import asynchronous
from measure import Case, measured
from weights_engines import build, engine, engines, transfer
from weights_members import checksum_of, version_of

from transport.errors import UsageError
from transport.weights.engine import WeightsEngine
from transport.weights.versions.copies import ShardHeld
from transport.weights.versions.layout import row_of, specs_of, weights_checksum

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.ucx,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "there is one"),
]

every_library = pytest.mark.parametrize("library", ["cupy", "torch"])


async def received(made: list[WeightsEngine], version: int, weights: Any) -> list[ShardHeld]:
    """What the replicas hold; the group is left by `finalize`."""
    await build(made)
    _, *held = await asyncio.gather(
        made[0].send_weights(iter(weights.items()), version), *(each.receive(version) for each in made[1:])
    )
    return held


# --- out of device memory -------------------------------------------------------------------------------------
@every_library
@pytest.mark.parametrize("known", [True, False])
@asynchronous
async def test_a_version_from_a_device_is_the_one_from_the_host(torch: Any, library: str, known: bool) -> None:
    async with engines("ab", specs=specs_of(version_of(0)) if known else None) as made:
        for version in (1, 2):
            found = await transfer(made, version, to_device(library, version_of(version)))
            assert found == checksum_of(version)


@every_library
@asynchronous
async def test_a_delta_is_found_in_device_memory(torch: Any, library: str) -> None:
    async with engines("a", delta=True) as made:
        for version in (0, 1, 2):
            found = await transfer(made, version, to_device(library, version_of(version)))
            assert found == checksum_of(version)


@asynchronous
async def test_a_version_has_what_a_kernel_queued_before_it_has_written(device: Any) -> None:
    stream = device.cuda.Stream(non_blocking=True)
    host = {"x": np.full(8 << 20, 7, np.uint8), "y": np.full(100, 7, np.uint8)}
    values = {name: device.zeros(array.shape, array.dtype) for name, array in host.items()}
    device.cuda.Device().synchronize()

    def produced() -> Iterator[tuple[str, Any]]:
        busy(device, stream)
        with stream:
            for name, array in values.items():
                array += 7
                yield name, array

    async with engines("a", specs=specs_of(host)) as made:
        await build(made)
        proof, held = await asyncio.gather(made[0].send_weights(produced(), 1), made[1].receive(1))
        assert proof == held.proof
        assert held.checksum == weights_checksum(host)


@every_library
def test_the_checksum_of_weights_on_a_device_is_that_of_their_bytes(torch: Any, library: str) -> None:
    assert weights_checksum(to_device(library, version_of(3))) == checksum_of(3)


# --- into device memory ---------------------------------------------------------------------------------------
@every_library
@asynchronous
async def test_a_version_comes_out_in_device_memory(torch: Any, library: str) -> None:
    async with engines("") as made:  # of two on one host one lands it, the other maps it
        made += [engine(f"r{at}", host="a", wires=frozenset({"tcp"}), device=library) for at in range(2)]
        await received(made, 1, version_of(1))
        for each in made[1:]:
            arrays = {name: array async for name, array in each.get_weights()}
            for name, value in version_of(1).items():
                assert bytes_of(arrays[name]) == value.tobytes(), name
                assert tuple(arrays[name].shape) == value.shape
                assert library in type(arrays[name]).__module__
            assert weights_checksum(arrays) == checksum_of(1)
        for each in made:
            await each.finalize()


@asynchronous
async def test_torch_has_what_cupy_lacks(torch: Any) -> None:
    values = {"x": np.arange(64).astype(ml_dtypes.float8_e4m3fn)}
    async with engines("") as made:
        made.append(engine("r", wires=frozenset({"tcp"}), device="torch"))
        await received(made, 1, to_device("torch", values))
        arrays = {name: array async for name, array in made[1].get_weights()}
        assert bytes_of(arrays["x"]) == values["x"].tobytes() and arrays["x"].dtype == torch.float8_e4m3fn
        for each in made:
            await each.finalize()


@asynchronous
async def test_taking_tensors_over_one_by_one_needs_no_second_models_worth_of_memory(device: Any) -> None:
    size, count = 16 << 20, 16
    host = {f"t{number}": np.full(size, number, np.uint8) for number in range(count)}
    own = {name: device.zeros(size, np.uint8) for name in host}
    pool = device.get_default_memory_pool()
    async with engines("", bucket_bytes=size) as made:
        made.append(engine("r", wires=frozenset({"tcp"}), bucket_bytes=size, device="cupy"))
        await received(made, 1, host)
        pool.free_all_blocks()
        before = pool.total_bytes()
        async for name, array in made[1].get_weights():
            own[name][:] = array
            del array
        assert pool.total_bytes() - before <= 4 * size
        assert {name: int(array.sum()) for name, array in own.items()} == {
            name: size * number for number, name in enumerate(host)
        }
        for each in made:
            await each.finalize()


@asynchronous
async def test_weights_are_queued_behind_the_stream_and_do_not_wait_for_it(device: Any) -> None:
    stream, done = device.cuda.Stream(non_blocking=True), device.cuda.Event()
    async with engines("") as made:
        made.append(engine("r", wires=frozenset({"tcp"}), device="cupy"))
        (held,) = await received(made, 1, version_of(1))
        dict(made[1].arrays(held))  # registers
        device.cuda.Device().synchronize()
        busy(device, stream, 1000)
        with stream:
            done.record(stream)
            arrays = dict(made[1].arrays(held))
            assert not done.done, "giving out the weights waited for the stream"
            total = arrays["head"].astype(np.float64).sum()
            stream.synchronize()
        assert float(total) == float(version_of(1)["head"].astype(np.float64).sum())
        for each in made:
            await each.finalize()


@asynchronous
async def test_a_device_that_is_not_there_is_refused_at_once(device: Any) -> None:
    count = device.cuda.runtime.getDeviceCount()
    with pytest.raises(UsageError, match=f"this process sees {count} CUDA devices"):
        engine("r", device=f"cupy:{count}")
    assert row_of(specs_of(version_of(0))).total


# --- the measurements -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("worker", ["mapped", "delta"])
def test_updates_between_processes_are_measured_from_device_to_device(device: Any, worker: str) -> None:
    row = measured(Case(worker, 32 << 20, 2, updates=1, device=True))
    assert row.verified and (row.sent_bytes < row.model_bytes) == (worker == "delta")
