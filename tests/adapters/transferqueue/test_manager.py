"""The storage backend for TransferQueue: its manager with real rings, and of the controller the partition only.
test_run.py has the whole of TransferQueue."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import Child
from interrupted_lines import at_each_line, interrupts

from transport.errors import (
    CheckpointDamagedError,
    PayloadLostError,
    RefusedError,
    RingFullError,
    SchemaError,
    TicketError,
    TransportError,
)

pytest.importorskip("transfer_queue", reason="TransferQueue is not installed: pip install TransferQueue")
import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from transfer_queue.controller import DataPartitionStatus
from transfer_queue.metadata import BatchMeta, extract_field_schema
from transfer_queue.utils.zmq_utils import ZMQMessage, ZMQRequestType

from transport.adapters.transferqueue import PayloadTransportStorageManager
from transport.adapters.transferqueue.manager import _rings
from transport.adapters.transferqueue.packing import Unpacked, ValuePlace, pack
from transport.adapters.transferqueue.rings import Rings, StorageOptions

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")

PUTTER = Path(__file__).resolve().parents[2] / "support" / "transferqueue_putter.py"


class Alone(PayloadTransportStorageManager):
    """A manager whose controller is the one partition that it has here, which other managers may share."""

    partition: DataPartitionStatus

    def _connect_to_controller(self) -> None:
        self.partition = DataPartitionStatus("train")

    @property
    def known(self) -> dict[int, dict[str, bytes]]:
        """What the controller knows: of each sample its places by field."""
        return self.partition.field_custom_backend_meta

    async def _answer(self, message: list[Any]) -> dict[str, Any]:
        asked = ZMQMessage.deserialize(message)
        if asked.request_type == ZMQRequestType.NOTIFY_DATA_UPDATE:
            schema, told = asked.body["field_schema"], asked.body["custom_backend_meta"]
            indexes = asked.body["global_indexes"]
            return {"success": self.partition.update_production_status(indexes, [*schema], schema, told)}
        indexes = sorted(self.partition.global_indexes)
        places = [self.known.get(index, {}) for index in indexes]
        return {"metadata": BatchMeta(indexes, ["train"] * len(indexes), _custom_backend_meta=places)}


@contextlib.contextmanager
def manager(**options: Any) -> Iterator[Alone]:
    made = Alone(SimpleNamespace(id="none", ip="127.0.0.1"), {"serve": False, "ring_bytes": 1 << 20, **options})
    try:
        yield made
    finally:
        for rings in _rings.values():
            for served in rings._rings:
                served.close()
        _rings.clear()
        made.close()


def meta_of(data: TensorDict, indexes: list[int] | None = None) -> BatchMeta:
    indexes = indexes or list(range(data.batch_size[0]))
    return BatchMeta(
        global_indexes=indexes,
        partition_ids=["train"] * len(indexes),
        field_schema=extract_field_schema(data),
        production_status=np.ones(len(indexes), dtype=np.int8),
    )


def put(to: Alone, data: TensorDict, indexes: list[int] | None = None) -> BatchMeta:
    meta = meta_of(data, indexes)
    asyncio.run(to.put_data(data, meta))
    return meta


def get(of: Alone, meta: BatchMeta) -> TensorDict:
    return asyncio.run(of.get_data(meta))


def clear(of: Alone, meta: BatchMeta) -> None:
    asyncio.run(of.clear_data(meta))


def slots() -> tuple[int, int]:
    """Of all rings of this process: those in use, and how many there are."""
    counts = [served.ring.native.state_counts() for rings in _rings.values() for served in rings._rings]
    return sum(sum(each[1:]) for each in counts), sum(map(sum, counts))


def rows(field: Any) -> list[Any]:
    return list(field.unbind()) if isinstance(field, torch.Tensor) else list(field)


def strided(tensors: list[torch.Tensor]) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it is a prototype
        return torch.nested.nested_tensor(tensors, layout=torch.strided)


MIXED = {
    "float": torch.arange(35, dtype=torch.float32).reshape(7, 5),
    "half": torch.arange(35, dtype=torch.bfloat16).reshape(7, 5),
    "bool": torch.arange(14).reshape(7, 2) % 2 == 0,
    "deep": torch.arange(7 * 24, dtype=torch.int16).reshape(7, 2, 3, 4),
    "transposed": torch.arange(21).reshape(3, 7).T,
    "scalar": torch.arange(7),
    "jagged": torch.nested.as_nested_tensor([torch.arange(n) for n in (3, 1, 4, 0, 5, 9, 2)], layout=torch.jagged),
    "strided": strided([torch.ones(n, 2 + n) for n in range(1, 8)]),
    "text": NonTensorStack(*"abcdefg"),
    "objects": NonTensorStack(*[{"n": n, "pair": (n, {n})} for n in range(7)]),
    "numbers": NonTensorStack(*[2**n for n in (1, 62, 63, 64, 100, 0, 3)]),
    "words": np.array(["one", "two", "three", "4", "five", "6", "7"]),
    "bytes": np.array([b"one", b"two", b"", b"4", b"five", b"6", b"7"]),
    "dicts": np.array([{"n": n} for n in range(7)], dtype=object),
}


@pytest.mark.parametrize("name", MIXED)
def test_what_was_put_is_got(name: str) -> None:
    data = TensorDict({name: MIXED[name]}, batch_size=7)
    with manager(samples=3) as both:
        got = get(both, put(both, data))[name]
        for found, expected in zip(rows(got), rows(data[name]), strict=True):
            if isinstance(expected, torch.Tensor):
                assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
                assert torch.equal(found, expected)
            else:
                assert (type(found), found) == (type(expected), expected)


def test_tensordicts_are_got_stacked() -> None:
    inner = TensorDict({"a": torch.arange(14.0).reshape(7, 2), "deep": TensorDict({"b": torch.arange(7)}, [7])}, [7])
    with manager(samples=3) as both:
        meta = put(both, TensorDict({"v": inner}, batch_size=7))
        assert (get(both, meta)["v"] == inner).all()
        assert (get(both, meta.select_samples([5, 1]))["v"] == inner[[5, 1]]).all()


def test_a_nontensordata_is_the_value_of_each_sample() -> None:
    with manager(samples=3) as both:
        meta = put(both, TensorDict({"v": NonTensorData("sums", batch_size=[7])}, batch_size=7))
        assert list(get(both, meta)["v"]) == ["sums"] * 7


def test_a_nontensordata_of_a_list_is_its_rows() -> None:
    with manager(samples=3) as both:
        meta = put(both, TensorDict({"v": NonTensorData([*range(7)], batch_size=[7])}, batch_size=7))
        assert list(get(both, meta)["v"]) == [*range(7)]


@pytest.mark.parametrize("column", [{1, 2}, [1, 2, 3], torch.tensor(1), [TensorDict({}, []), 1]])
def test_a_column_that_is_not_of_the_samples_is_refused_by_its_name(column: Any) -> None:
    data = TensorDict({"a": torch.ones(2, 8)}, batch_size=2)
    with manager() as both:
        with pytest.raises(SchemaError, match="'a'"):
            asyncio.run(both.put_data(data, meta_of(data), lambda _: {"a": column}))
        assert not both.known


def test_many_values_share_a_slot_and_their_place_is_short() -> None:
    data = TensorDict({f"field{n}": torch.ones(64, 4) for n in range(10)}, batch_size=64)
    with manager() as both:
        put(both, data)
        assert slots()[0] == 4  # 640 values
        assert {len(place) for known in both.known.values() for place in known.values()} == {61}


def test_any_samples_and_fields_are_got_in_any_order_any_number_of_times() -> None:
    data = TensorDict({name: MIXED[name] for name in ("float", "jagged", "text")}, batch_size=7)
    with manager(samples=3) as both:
        meta = put(both, data)
        for chosen in ([6, 0, 3], [5], [1, 2, 3, 4], [0, 0]):
            for names in (["float"], ["jagged", "text"]):
                some = meta.select_samples(chosen).select_fields(names)
                got = get(both, some)
                for name in names:
                    found, expected = rows(got[name]), [rows(data[name])[at] for at in chosen]
                    assert all(map(torch.equal, found, expected)) if name != "text" else found == expected


def test_what_was_got_is_the_callers_own() -> None:
    data = TensorDict({"a": torch.ones(4, 8)}, batch_size=4)
    with manager() as both:
        meta = put(both, data)
        get(both, meta)["a"].values().zero_()
        assert get(both, meta)["a"].values().sum() == 32


def test_a_slot_is_freed_by_the_clear_of_its_last_sample_in_whichever_process() -> None:
    data = TensorDict({"a": torch.ones(6, 8), "b": torch.ones(6, 2)}, batch_size=6)
    with manager(samples=3) as both:
        meta = put(both, data)
        other = Alone(SimpleNamespace(id="none", ip="127.0.0.1"), {"serve": False})
        other.partition = both.partition
        try:
            clear(both, meta.select_samples([0, 4]))
            clear(other, meta.select_samples([1]))
            clear(other, meta.select_samples([1]))  # twice is once
            assert slots()[0] == 2
            assert torch.equal(get(both, meta.select_samples([2]))["a"].values(), torch.ones(8))
            clear(other, meta.select_samples([2]))
            assert slots()[0] == 1
            clear(both, meta)
            assert slots()[0] == 0
        finally:
            other.close()


def test_a_clear_frees_what_the_controller_knows_whichever_fields_its_metadata_has() -> None:
    with manager(samples=2) as both:
        meta = put(both, TensorDict({"a": torch.ones(4, 8)}, batch_size=4))
        put(both, TensorDict({"b": torch.ones(2, 8)}, batch_size=2))  # of the first two samples only
        assert slots()[0] == 3
        clear(both, meta.select_fields(["a"]).select_samples([0, 1]))
        assert slots()[0] == 1
        clear(both, BatchMeta([2, 3], ["train"] * 2))  # as for samples that have no field in common
        assert slots()[0] == 0


def test_a_clear_of_samples_without_values_frees_nothing() -> None:
    with manager() as both:
        put(both, TensorDict({"a": torch.ones(4, 8)}, batch_size=4))
        both.partition.global_indexes.update([4, 5])  # they have tags
        clear(both, BatchMeta([4, 5], ["train"] * 2))
        assert slots()[0] == 1


def test_a_cleared_sample_is_an_error_that_names_it() -> None:
    with manager() as both:
        meta = put(both, TensorDict({"a": torch.ones(4, 8)}, batch_size=4))
        clear(both, meta)
        with pytest.raises(PayloadLostError, match=r"samples 0, 1, 2, 3: their values were cleared, or put again"):
            get(both, meta)


def test_a_value_that_is_put_again_frees_the_old_one() -> None:
    with manager() as both:
        meta = put(both, TensorDict({"a": torch.zeros(4, 8), "b": torch.zeros(4, 8)}, batch_size=4))
        asyncio.run(both.put_data(TensorDict({"a": torch.ones(4, 8)}, batch_size=4), meta))
        assert slots()[0] == 2  # b is in the old slot
        assert get(both, meta.select_fields(["a"]))["a"].values().sum() == 32
        asyncio.run(both.put_data(TensorDict({"b": torch.ones(4, 8)}, batch_size=4), meta))
        assert slots()[0] == 2
        assert get(both, meta.select_fields(["b"]))["b"].values().sum() == 32


def test_rings_grow_by_need_and_empty_ones_make_room() -> None:
    with manager(most_bytes=4 << 20) as both:
        small = put(both, TensorDict({"a": torch.ones(16, 64)}, batch_size=16))
        large = put(both, TensorDict({"a": torch.ones(1, 400_000)}, batch_size=1), [16])
        with pytest.raises(RingFullError, match=r"most_bytes=4194304 has no room for more; clear samples"):
            put(both, TensorDict({"a": torch.ones(1, 800_000)}, batch_size=1))
        assert get(both, large)["a"].values().sum() == 400_000
        clear(both, small)
        clear(both, large)
        again = put(both, TensorDict({"a": torch.ones(1, 800_000)}, batch_size=1))
        assert get(both, again)["a"].values().sum() == 800_000


def test_memory_follows_what_is_put_and_not_how_many_sizes_it_has() -> None:
    with manager(ring_bytes=16 << 20) as both:
        sizes = [1 << (10 + n) for n in range(8)]
        for at, size in enumerate(sizes):
            put(both, TensorDict({"a": torch.ones(1, size)}, batch_size=1), [at])
        held = [served for rings in _rings.values() for served in rings._rings]
        assert sum(served.total for served in held) <= 16 << 20
        before = len(held)
        for at in range(64):
            put(both, TensorDict({"a": torch.ones(1, sizes[-1])}, batch_size=1), [len(sizes) + at])
        held = [served for rings in _rings.values() for served in rings._rings]
        assert len(held) <= before + 8  # 40 MiB of 64 values, by doubling up to 16 MiB


def test_a_put_that_fails_leaves_nothing_in_the_rings() -> None:
    with manager(most_bytes=1 << 20, ring_bytes=1 << 18) as both:
        with pytest.raises(RingFullError):
            put(both, TensorDict({"a": torch.ones(64, 8192)}, batch_size=64))
        assert slots()[0] == 0
        assert not both.known


def test_a_put_that_is_cancelled_leaves_nothing_in_the_rings() -> None:
    data = TensorDict({"a": torch.ones(4, 8)}, batch_size=4)
    wrote, goes_on = threading.Event(), threading.Event()

    def parse(batch: dict[str, Any]) -> dict[str, Any]:
        wrote.set()
        assert goes_on.wait(60)
        return batch

    async def cancelled(both: Alone) -> None:
        putting = asyncio.ensure_future(both.put_data(data, meta_of(data), parse))
        await asyncio.to_thread(wrote.wait, 60)
        putting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await putting
        goes_on.set()

    with manager() as both:
        asyncio.run(cancelled(both))  # it waits for its threads
        assert slots()[1] > 0
        assert slots()[0] == 0


def test_a_put_that_the_controller_is_not_told_of_leaves_nothing_in_the_rings() -> None:
    data = TensorDict({"a": torch.ones(4, 8)}, batch_size=4)

    async def fail(*_: Any) -> None:
        raise ValueError("the metadata does not fit")

    with manager() as both:
        both.notify_data_update = fail
        meta = meta_of(data)
        with pytest.raises(ValueError, match="does not fit"):
            asyncio.run(both.put_data(data, meta))
        assert slots()[0] == 0
        assert not any(meta._custom_backend_meta)


def test_a_put_that_the_controller_refuses_leaves_what_was_there() -> None:
    data = TensorDict({"a": torch.ones(4, 8)}, batch_size=4)
    with manager() as both:
        meta = put(both, data)
        with pytest.raises(RefusedError, match="put its values with the dtype that it has there"):
            asyncio.run(both.put_data(data.to(torch.bfloat16), meta))
        assert slots()[0] == 1
        assert torch.equal(get(both, meta)["a"].values(), torch.ones(32))


def test_a_place_that_cannot_be_freed_does_not_keep_the_others() -> None:
    data = TensorDict({"a": torch.ones(6, 8)}, batch_size=6)
    with manager(samples=1) as both:
        meta = put(both, data)
        both.known[0]["b"] = b"of another"
        both.known[3]["a"] = b"of another backend"
        with pytest.raises(TicketError, match="put through another backend"):
            clear(both, meta)
        assert slots()[0] == 1


def test_a_value_that_replaces_another_backends_is_put() -> None:
    data = TensorDict({"a": torch.ones(4, 8)}, batch_size=4)
    with manager() as both:
        meta = meta_of(data)
        meta._custom_backend_meta[1]["a"] = b"of another backend"
        asyncio.run(both.put_data(data, meta))
        assert get(both, meta)["a"].values().sum() == 32


def test_a_get_of_no_samples_has_no_rows() -> None:
    with manager() as both:
        meta = put(both, TensorDict({"a": torch.ones(4, 8), "text": NonTensorStack(*"abcd")}, batch_size=4))
        assert get(both, meta.select_samples([])).batch_size[0] == 0


def test_what_data_parser_returns_is_put() -> None:
    def changed(batch: dict[str, Any]) -> dict[str, Any]:
        batch["a"] = [each * 2 for each in batch["a"]]
        return batch

    def another(batch: dict[str, Any]) -> dict[str, Any]:
        return {"a": batch["a"] * 2}

    data = TensorDict({"a": torch.ones(4, 8)}, batch_size=4)
    for parse in (changed, another):
        with manager() as both:
            meta = meta_of(data)
            asyncio.run(both.put_data(data, meta, parse))
            assert torch.cat([each.reshape(-1) for each in get(both, meta)["a"]]).sum() == 64


@pytest.mark.parametrize("wrong", [None, {}, {"a": torch.ones(3, 8)}, {"a": torch.ones(4, 8), "b": [1, 2, 3, 4]}])
def test_what_data_parser_may_not_return_is_refused(wrong: Any) -> None:
    data = TensorDict({"a": torch.ones(4, 8)}, batch_size=4)
    with manager() as both:
        with pytest.raises((TypeError, ValueError), match="data_parser"):
            asyncio.run(both.put_data(data, meta_of(data), lambda _: wrong))
        assert not both.known


def test_nothing_is_put_for_an_empty_batch_and_a_wrong_size_is_refused() -> None:
    data = TensorDict({"a": torch.ones(4, 8)}, batch_size=4)
    with manager() as both:
        with pytest.raises(ValueError, match="4 samples of data, 3 in the metadata"):
            asyncio.run(both.put_data(data, meta_of(data).select_samples([0, 1, 2])))
        assert not both.known


def test_a_value_of_another_backend_is_refused_with_what_it_is() -> None:
    with manager() as both:
        meta = put(both, TensorDict({"a": torch.ones(4, 8)}, batch_size=4))
        meta._custom_backend_meta[2]["a"] = {"key": "of another"}
        with pytest.raises(TicketError, match=r"put through another backend"):
            get(both, meta)
        del meta._custom_backend_meta[2]["a"]
        with pytest.raises(PayloadLostError, match="sample 2 has no value of field 'a'"):
            get(both, meta)


@pytest.mark.ucx
@pytest.mark.slow
def test_a_killed_putters_values_stay_readable_and_a_dead_hosts_are_said_to_be_lost() -> None:
    """With linger_s its listeners outlive the process; then they are killed, as the host's end does."""
    with subprocess.Popen([sys.executable, str(PUTTER)], stdout=subprocess.PIPE, start_new_session=True) as putter:
        assert putter.stdout is not None
        meta, listeners = pickle.loads(bytes.fromhex(putter.stdout.readline().decode()))
        os.kill(putter.pid, signal.SIGKILL)
        putter.wait()
    with manager(serve=True, timeout_s=5.0) as reader:
        try:
            place = ValuePlace.decode(meta._custom_backend_meta[0]["a"])
            elsewhere = ValuePlace(**{**{f: getattr(place, f) for f in place.__struct_fields__}, "segment": bytes(8)})
            for known in meta._custom_backend_meta:
                known["b"] = known["a"]
            assert get(reader, meta.select_fields(["a"]))["a"].values().sum() == 4 * 8
            for row, known in enumerate(meta._custom_backend_meta):  # as another host sees it
                known["a"] = ValuePlace(
                    **{**{f: getattr(elsewhere, f) for f in elsewhere.__struct_fields__}, "row": row}
                ).encode()
        finally:
            for pid in listeners:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    with (
        manager(serve=True, timeout_s=5.0) as reader,
        pytest.raises(PayloadLostError, match=r"samples 0, 1, 2, 3: the process that put them does not answer at "),
    ):
        get(reader, meta.select_fields(["a"]))
    Path("/dev/shm" + place.ticket().segment).unlink()  # goes with a host


def test_a_slots_index_gives_each_row_its_own_bytes() -> None:
    packed = pack(["a", "b"], [torch.arange(12).reshape(6, 2), [torch.arange(n) for n in range(6)]], 2, 3)
    memory = bytearray(packed.size)
    packed.into(memoryview(memory))
    slot = Unpacked(memory)
    assert [slot.tensor(slot.columns["a"], row).tolist() for row in range(3)] == [[4, 5], [6, 7], [8, 9]]
    assert [slot.tensor(slot.columns["b"], row).tolist() for row in range(3)] == [[0, 1], [0, 1, 2], [0, 1, 2, 3]]


# --- checkpoints --------------------------------------------------------------------------------------
class State(SimpleNamespace):
    """What a controller's file has of a partition, as far as it matters here."""


def saved_by_a_controller(folder: Path, told: dict[int, dict[str, bytes]]) -> Path:
    folder.mkdir(parents=True)
    state = {"partitions": {"train": State(field_custom_backend_meta=told)}, "controller_id": "c"}
    (folder / "controller_state.pkl").write_bytes(pickle.dumps(state))
    return folder


def loaded(folder: Path, meta: BatchMeta) -> BatchMeta:
    """The same metadata with the places that the controller's file has now."""
    known = pickle.loads((folder / "controller_state.pkl").read_bytes())["partitions"][
        "train"
    ].field_custom_backend_meta
    meta._custom_backend_meta = [known[index] for index in meta.global_indexes]
    return meta


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, TensorDict]:
    """A checkpoint of seven samples in slots of three, of which sample 0 is cleared; its rings are gone."""
    data = TensorDict(MIXED, batch_size=7)
    with manager(samples=3) as first:
        meta = put(first, data)
        clear(first, meta.select_samples([0]))
        first.known.pop(0)
        folder = saved_by_a_controller(tmp_path / "step", first.known)
        asyncio.run(first.save_checkpoint(str(folder)))
    return folder, data


def test_values_are_loaded_by_another_process_any_number_of_times(saved: tuple[Path, TensorDict]) -> None:
    folder, data = saved
    for _ in range(2):
        with manager(samples=3) as second:
            asyncio.run(second.load_checkpoint(str(folder)))
            kept = TensorDict({"float": data["float"][1:], "text": NonTensorStack(*"bcdefg")}, batch_size=6)
            meta = loaded(folder, meta_of(kept, list(range(1, 7))))
            got = get(second, meta)
            assert torch.equal(torch.stack(rows(got["float"])), data["float"][1:]) and list(got["text"]) == [*"bcdefg"]
            assert slots()[0] == 3
            second.partition.global_indexes.update(meta.global_indexes)
            second.known.update(zip(meta.global_indexes, meta._custom_backend_meta, strict=True))
            clear(second, meta)
            assert slots()[0] == 0  # the sample that was cleared before is cleared


@pytest.mark.parametrize("name", ["slots.data", "slots.index"])
@pytest.mark.parametrize("damage", ["changed", "truncated", "removed"])
def test_a_damaged_checkpoint_puts_nothing(saved: tuple[Path, TensorDict], name: str, damage: str) -> None:
    folder, _ = saved
    path = folder / "payload_transport" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    if damage == "removed":
        path.unlink()
    else:
        path.write_bytes(data if damage == "changed" else data[:-1])
    before = (folder / "controller_state.pkl").read_bytes()
    with manager(samples=3) as second:
        with pytest.raises((CheckpointDamagedError, TransportError)):
            asyncio.run(second.load_checkpoint(str(folder)))
        assert slots()[0] == 0
    assert (folder / "controller_state.pkl").read_bytes() == before


def test_a_ring_without_room_puts_nothing(saved: tuple[Path, TensorDict]) -> None:
    folder, _ = saved
    with manager(samples=3, most_bytes=8192) as second:
        with pytest.raises(RingFullError):
            asyncio.run(second.load_checkpoint(str(folder)))
        assert slots()[0] == 0


@pytest.mark.slow
@at_each_line
def test_a_ring_that_is_interrupted_at_any_line_of_its_start_leaves_no_listener(first: int) -> None:
    before = threading.enumerate()
    for interrupt in interrupts(first, ("transport.adapters.transferqueue.rings",)):
        rings = Rings(StorageOptions(ring_bytes=1 << 16), None)
        with interrupt:
            rings._make(pack(["a"], [[interrupt.at]], 0, 1), [], 0)
        rings.leave()
        assert threading.enumerate() == before, interrupt.at


PINS = """
import os, signal, sys
from transport import SharedRingBuffer, Ticket
ticket = Ticket.parse(sys.argv[1])
with SharedRingBuffer.attach(ticket.segment, role="reader") as ring, ring.read_raw(ticket):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_ring_whose_last_reader_was_killed_is_empty_once_its_values_are_cleared() -> None:
    rings = Rings(StorageOptions(ring_bytes=1 << 16, serve=False), None)
    packed = pack(["a"], [[1]], 0, 1)
    [ticket] = rings.write([packed])
    with Child(PINS, ticket.to_text()) as child:
        assert child.wait() == -signal.SIGKILL
    [served] = rings._rings
    served.ring.discard(ticket)
    assert served.empty()
    rings.leave()
