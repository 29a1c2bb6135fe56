"""Pooled buffers: nothing is reused under an array that somebody still holds, and everything comes back."""

from __future__ import annotations

import ctypes
import gc
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from transport.client.payload import ReceivedPayload
from transport.devices.buffers import Block, BufferPool
from transport.ring.packing import check_destination, views
from transport.schema import Schema
from transport.ticket import Ticket

SIZE = 8192
SCHEMA = Schema.of(obs=("float32", 1024, 2))


def take(pool: BufferPool, size: int) -> np.ndarray:
    """A block as an array, which is what most who take one make of it."""
    return np.frombuffer(pool.take(size), np.uint8)


def address(buffer: np.ndarray) -> int:
    return int(buffer.__array_interface__["data"][0])


def received(lent: Any) -> ReceivedPayload:
    ticket = Ticket(
        ring="0" * 32,
        host="host",
        addresses=(),
        ports=(),
        slot=0,
        generation=1,
        key=1,
        size=SIZE,
        schema_fingerprint=SCHEMA.fingerprint,
        created=0.0,
    )
    return ReceivedPayload(ticket, 0, "tcp", lent, SCHEMA, lambda: True)


def payload_array(lent: Any) -> np.ndarray:
    payload = received(lent)
    found = payload["obs"]
    payload.release()
    return found


# What a trainer or a library may do with a buffer; each result looks into the buffer's memory.
LOOKS: dict[str, Callable[[np.ndarray], Any]] = {
    "itself": lambda lent: lent,
    "a slice": lambda lent: lent[100:200],
    "an empty slice": lambda lent: lent[:0],
    "a slice of a slice": lambda lent: lent[100:200][10:20],
    "reshaped": lambda lent: lent.reshape(2, -1),
    "another dtype": lambda lent: lent.view(np.float32),
    "another dtype, sliced and reshaped": lambda lent: lent[64:128].view(np.float32).reshape(4, 4),
    "transposed": lambda lent: lent.reshape(2, -1).T,
    "a subclass": lambda lent: lent.view(np.recarray),
    "a flat iterator": lambda lent: lent.flat,
    "asarray": lambda lent: np.asarray(lent, dtype=np.uint8),
    "strided": lambda lent: np.lib.stride_tricks.as_strided(lent, (4,), (2,)),
    "broadcast": lambda lent: np.broadcast_to(lent, (2, SIZE)),
    "memoryview": memoryview,
    "a slice of a memoryview": lambda lent: memoryview(lent)[5:6],
    "a cast memoryview": lambda lent: memoryview(lent).cast("I").toreadonly(),
    "frombuffer": lambda lent: np.frombuffer(lent, dtype=np.int16),
    "frombuffer of a memoryview": lambda lent: np.frombuffer(memoryview(lent)[64:], dtype=np.int16),
    "ndarray(buffer=)": lambda lent: np.ndarray((4,), np.float64, buffer=lent),
    "DLPack": np.from_dlpack,
    "ctypes": lambda lent: (ctypes.c_char * SIZE).from_buffer(lent),
    "PickleBuffer": pickle.PickleBuffer,
    "arrays of payload.views": lambda lent: views(SCHEMA.layout(()), lent, writable=False)["obs"],
    "a slice of payload.views": lambda lent: views(SCHEMA.layout(()), lent, writable=True)["obs"][3, :],
    "a destination": lambda lent: check_destination(lent, 100),
    "an array of a released ReceivedPayload": payload_array,
}

# What looks into the block itself.
LOOKS_OF_BLOCK: dict[str, Callable[[Block], Any]] = {
    "itself": lambda block: block,
    "memoryview": memoryview,
    "a slice of a memoryview": lambda block: memoryview(block)[5:6],
    "an empty slice of a memoryview": lambda block: memoryview(block)[:0],
    "frombuffer": lambda block: np.frombuffer(block, np.uint8)[100:200],
    "asarray": lambda block: np.asarray(block)[1:2],
    "ndarray(buffer=)": lambda block: np.ndarray((4,), np.float64, buffer=block),
    "ctypes": lambda block: (ctypes.c_char * SIZE).from_buffer(block),
    "PickleBuffer": pickle.PickleBuffer,
    "arrays of payload.views": lambda block: views(SCHEMA.layout(()), block, writable=False)["obs"],
    "a destination": lambda block: check_destination(block, 100),
    "a ReceivedPayload": lambda block: received(block),
    "the data of a ReceivedPayload": lambda block: received(block).data,
    "an array of a released ReceivedPayload": lambda block: payload_array(block),
}


@pytest.fixture
def pool() -> Iterator[BufferPool]:
    made = BufferPool()
    yield made
    gc.collect()
    assert made.lent == 0, "an array of the test outlived it"
    made.clear()
    assert made.idle_bytes == 0


# --- the promise -----------------------------------------------------------------------------------
@pytest.mark.parametrize("look", [*LOOKS.values(), *LOOKS_OF_BLOCK.values()], ids=[*LOOKS, *LOOKS_OF_BLOCK])
def test_a_buffer_is_not_reused_while_any_look_into_it_lives(pool: BufferPool, look: Callable[[Any], Any]) -> None:
    block = pool.take(SIZE)
    first = block.address
    lent = np.frombuffer(block, np.uint8)
    lent[:] = 7
    held = look(block if look in LOOKS_OF_BLOCK.values() else lent)
    del block, lent
    gc.collect()
    others = [take(pool, SIZE) for _ in range(3)]
    for other in others:
        assert not first <= address(other) < first + SIZE
        other[:] = 0
    assert pool.lent == 4
    # read through the address, which is what the look's bytes are
    assert bytes((ctypes.c_char * SIZE).from_address(first)) == b"\7" * SIZE
    del held, others, other
    gc.collect()
    assert pool.lent == 0
    assert pool.idle_bytes == 4 * SIZE
    again = [address(each) for each in [take(pool, SIZE) for _ in range(4)]]
    assert first in again


def test_the_last_of_several_looks_gives_the_buffer_back(pool: BufferPool) -> None:
    lent = take(pool, SIZE)
    looks = [lent[:10], lent.view(np.int32), memoryview(lent)]
    del lent
    while looks:
        assert pool.lent == 1
        looks.pop()
    assert (pool.lent, pool.idle_bytes) == (0, SIZE)


def test_a_buffer_in_a_cycle_comes_back_by_collection(pool: BufferPool) -> None:
    cycle: list[Any] = [take(pool, SIZE)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert (pool.lent, pool.idle_bytes) == (0, SIZE)


def test_a_buffer_may_outlive_its_pool() -> None:
    pool = BufferPool()
    lent = take(pool, SIZE)
    lent[:] = 5
    del pool
    gc.collect()
    assert (lent == 5).all()


# --- reuse and its bound -----------------------------------------------------------------------------


def test_clear_lets_go_of_what_is_idle_only(pool: BufferPool) -> None:
    take(pool, SIZE)
    held = take(pool, 2 * SIZE)
    held[:] = 1
    pool.clear()
    assert (pool.lent, pool.idle_bytes) == (1, 0)
    assert (held == 1).all()
    del held
    assert (pool.lent, pool.idle_bytes) == (0, 2 * SIZE)


# --- what is lent --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [-1, 1.0, "1", 1 << 64])
def test_what_is_no_size_is_refused(pool: BufferPool, size: Any) -> None:
    with pytest.raises(TypeError):
        pool.take(size)


# --- size classes --------------------------------------------------------------------------------------


# --- threads -------------------------------------------------------------------------------------------
