"""Pooled buffers: nothing is reused under an array that somebody still holds, and everything comes back."""

from __future__ import annotations

import array
import ctypes
import gc
import itertools
import os
import pickle
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from transport.client.payload import ReceivedPayload
from transport.devices.buffers import Block, BufferPool, size_class
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


def test_a_copy_does_not_hold_the_buffer(pool: BufferPool) -> None:
    lent = take(pool, SIZE)
    lent[:] = 3
    copied = lent.copy()
    del lent
    assert pool.lent == 0
    assert (copied == 3).all()


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
def test_an_idle_buffer_is_used_again_for_any_size_of_its_class(pool: BufferPool) -> None:
    first = address(take(pool, 5000))
    lent = take(pool, 4500)
    assert (address(lent), len(lent), pool.idle_bytes) == (first, 4500, 0)


def test_an_idle_buffer_of_another_class_is_left_alone(pool: BufferPool) -> None:
    first = address(take(pool, 100_000))
    lent = take(pool, 10_000)
    assert address(lent) != first
    assert pool.idle_bytes == size_class(100_000)


def test_idle_bytes_are_bounded() -> None:
    pool = BufferPool(most_idle_bytes=3 * SIZE + 100)
    lent = [take(pool, SIZE) for _ in range(5)]
    assert pool.idle_bytes == 0
    while lent:
        lent.pop()
        assert pool.idle_bytes == min(5 - len(lent), 3) * SIZE
    assert pool.lent == 0


def test_a_buffer_above_the_bound_is_never_kept() -> None:
    pool = BufferPool(most_idle_bytes=SIZE)
    take(pool, 2 * SIZE)
    assert (pool.lent, pool.idle_bytes) == (0, 0)


def test_clear_lets_go_of_what_is_idle_only(pool: BufferPool) -> None:
    take(pool, SIZE)
    held = take(pool, 2 * SIZE)
    held[:] = 1
    pool.clear()
    assert (pool.lent, pool.idle_bytes) == (1, 0)
    assert (held == 1).all()
    del held
    assert (pool.lent, pool.idle_bytes) == (0, 2 * SIZE)


def test_a_buffer_that_cannot_be_had_is_not_counted_as_lent(pool: BufferPool) -> None:
    with pytest.raises(MemoryError):
        take(pool, 1 << 60)
    assert pool.lent == 0


def test_repr_says_how_much_is_lent_and_idle(pool: BufferPool) -> None:
    held = take(pool, SIZE)
    take(pool, SIZE)
    assert repr(pool) == "<BufferPool 1 lent, 8192 bytes idle>"
    del held


# --- what is lent --------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 1_000_003])
def test_a_buffer_is_exactly_as_large_as_asked_and_plain_writable_bytes(pool: BufferPool, size: int) -> None:
    for _ in range(2):  # fresh, then used again
        lent = take(pool, size)
        assert (lent.shape, lent.dtype) == ((size,), np.dtype(np.uint8))
        assert lent.flags.writeable
        assert lent.flags.c_contiguous
        lent[:] = 255
        del lent


def test_buffers_lent_together_do_not_overlap(pool: BufferPool) -> None:
    lent = [take(pool, size) for size in (0, 1, 4096, 4096, 5000, 5000)]
    assert not any(np.shares_memory(one, other) for one, other in itertools.combinations(lent, 2))


def test_a_block_tells_its_address_and_length_and_can_be_referred_to_weakly(pool: BufferPool) -> None:
    block = pool.take(5000)
    assert len(block) == memoryview(block).nbytes == 5000
    assert block.address == address(np.frombuffer(block, np.uint8))
    assert block.address % 64 == 0
    assert repr(block) == "<Block 5000 bytes>"
    reference = weakref.ref(block)
    assert reference() is block
    del block
    assert reference() is None
    assert pool.lent == 0


@pytest.mark.parametrize("size", [-1, 1.0, "1", 1 << 64])
def test_what_is_no_size_is_refused(pool: BufferPool, size: Any) -> None:
    with pytest.raises(TypeError):
        pool.take(size)


# --- size classes --------------------------------------------------------------------------------------
sizes = st.integers(0, 1 << 44) | st.integers(12, 44).flatmap(
    lambda power: st.integers((1 << power) - 2, (1 << power) + 2)
)


@given(sizes)
@example(0)
@example(4096)
@example(4097)
def test_a_size_class_holds_the_size_and_wastes_at_most_a_quarter(size: int) -> None:
    allocated = size_class(size)
    assert allocated >= max(size, 4096)
    assert size <= 4096 or (allocated - size) * 4 <= size
    assert size_class(allocated) == allocated


@given(sizes, sizes)
def test_a_larger_size_has_no_smaller_class(one: int, other: int) -> None:
    assert size_class(min(one, other)) <= size_class(max(one, other))


@pytest.mark.parametrize("power", [12, 13, 20])
def test_each_power_of_two_has_four_classes(power: int) -> None:
    step = max(1, (1 << power) // 1000)
    classes = {size_class(size) for size in range((1 << power) + 1, (2 << power) + 1, step)} | {size_class(2 << power)}
    assert classes == {(1 << power) * quarter // 4 for quarter in (5, 6, 7, 8)}


# --- threads -------------------------------------------------------------------------------------------
def test_threads_that_take_and_drop_never_share_a_buffer() -> None:
    bound = 8 * SIZE
    pool = BufferPool(most_idle_bytes=bound)
    damaged: array.array[int] = array.array("i")
    handed_over: list[np.ndarray] = []  # dropped by another thread than the one that took it
    start = threading.Barrier(4)

    def work(mark: int) -> None:
        chance = random.Random(mark)
        held: list[np.ndarray] = []
        start.wait()
        for _ in range(400):
            lent = take(pool, chance.choice((100, 5000, SIZE, 3 * SIZE)))
            lent[:] = mark
            held.append(lent[:50].reshape(5, 10))
            del lent
            if len(held) > 6:
                gone = held.pop(chance.randrange(len(held)))
                if (gone != mark).any():
                    damaged.append(mark)
                handed_over.append(gone)
                del gone
                if len(handed_over) > 8:
                    handed_over.pop()
            if pool.idle_bytes > bound:
                damaged.append(-1)
        damaged.extend(mark for each in held if (each != mark).any())

    threads = [threading.Thread(target=work, args=(mark,)) for mark in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not damaged
    assert pool.lent == len(handed_over)
    handed_over.clear()
    gc.collect()
    assert pool.lent == 0
    assert pool.idle_bytes <= bound


def test_a_forked_childs_blocks_are_its_own(pool: BufferPool) -> None:
    lent = take(pool, SIZE)
    lent[:] = 1
    child = os.fork()
    if child == 0:
        lent[:] = 2
        del lent
        took = pool.take(SIZE)  # the child's copy of what it has just let go
        os._exit(0 if (pool.lent, bytes(took)[:1]) == (1, b"\2") else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert (lent == 1).all()
    assert (pool.lent, pool.idle_bytes) == (1, 0)
    del lent
