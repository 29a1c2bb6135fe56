"""Checkpoints of TransferQueue: the slots that its controller knows, in two files beside the controller's state.

    controller_state.pkl                TransferQueue's own. Its places name rings, which end with their processes
    payload_transport/slots.index       for each slot its place, and which of its samples are not cleared
    payload_transport/slots.data        the slots, one behind the other; each has its checksum in its place

TransferQueue saves the controller before the storage, and loads it after it. So `load` puts the slots into rings of the
process that loads, and gives the controller's file their new places. The file as it was saved stays beside it, as
``controller_state.saved.pkl``: a checkpoint can be loaded any number of times, one after the other. Between the two the
new places are in the controller's file: runs that load at the same time need a folder each.
"""

from __future__ import annotations

import mmap
import pickle
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from transport import _ring
from transport.adapters.transferqueue.packing import Packed, ValuePlace
from transport.adapters.transferqueue.reader import ValueReader
from transport.adapters.transferqueue.rings import Rings
from transport.decoders import msgpack_decoder
from transport.errors import CheckpointDamagedError, TicketError, TransportError
from transport.runtime.durable import flush, write_whole

FORMAT: Final = 1
_STATE, _SAVED = "controller_state.pkl", "controller_state.saved.pkl"
_FOLDER, _INDEX, _DATA = "payload_transport", "slots.index", "slots.data"

_CHECKSUM: Final = struct.Struct("<Q")  # of the index, before it

Identity = tuple[bytes, int, int]


class _Slot(msgspec.Struct, frozen=True, array_like=True):
    place: bytes
    samples: list[int]  # that are not cleared


class _Index(msgspec.Struct, frozen=True):
    format: int
    slots: list[_Slot]


def save(folder: Path, reader: ValueReader) -> None:
    """Write every slot that the saved controller knows.

    Raises:
        UnreadValue: a value cannot be read any more; nothing of this checkpoint counts.
    """
    samples: dict[Identity, tuple[ValuePlace, set[int]]] = {}
    for known in _values(_state(folder / _STATE)):
        for encoded in known.values():
            place = ValuePlace.decode(encoded)
            samples.setdefault(place.identity, (place, set()))[1].add(place.row)
    inner = folder / _FOLDER
    inner.mkdir(parents=True, exist_ok=True)
    slots: list[_Slot] = []
    with (inner / _DATA).open("wb") as file:

        def keep(place: ValuePlace, data: Any) -> None:
            file.write(data)
            slots.append(_Slot(place.encode(), sorted(samples[place.identity][1])))

        reader.read([place for place, _ in samples.values()], keep)
    flush(inner / _DATA)
    body = msgspec.msgpack.encode(_Index(FORMAT, slots))
    write_whole(inner / _INDEX, [_CHECKSUM.pack(_ring.checksum(body)), body])
    flush(folder)


def load(folder: Path, rings: Rings, reader: ValueReader) -> None:
    """Put the slots into these rings, and their new places into the controller's file.

    Raises:
        CheckpointDamagedError: a file is missing, truncated or changed, or of a newer format; nothing was put.
        RingFullError: there is no room for all of them; nothing is left.
    """
    inner = folder / _FOLDER
    try:
        found = (inner / _INDEX).read_bytes()
        body = found[_CHECKSUM.size :]
        if found[: _CHECKSUM.size] != _CHECKSUM.pack(_ring.checksum(body)):
            raise CheckpointDamagedError(f"{inner / _INDEX} has other bytes than were saved")
        index = msgpack_decoder(_Index)(body)
        places = [ValuePlace.decode(slot.place) for slot in index.slots]
        size = (inner / _DATA).stat().st_size
    except (OSError, msgspec.MsgspecError, TicketError) as error:
        raise CheckpointDamagedError(f"{inner}: the saved slots cannot be read: {error}") from error
    if index.format != FORMAT or size != sum(place.size for place in places):
        raise CheckpointDamagedError(
            f"{inner}: format {index.format} (this build reads {FORMAT}), {size} bytes of slots"
        )
    if not (folder / _SAVED).exists():
        write_whole(folder / _SAVED, [(folder / _STATE).read_bytes()])
    state = _state(folder / _SAVED)
    written: list[tuple[ValuePlace, ValuePlace]] = []  # of each slot the place that it had, and the one that it has
    try:
        if size:
            with (inner / _DATA).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                _put(data, places, rings, written, inner)
        new = {old.identity: place for old, place in written}
        for slot, place in zip(index.slots, places, strict=True):
            for row in set(range(place.rows)) - set(slot.samples):
                reader.free(msgspec.structs.replace(new[place.identity], row=row))
        for known in _values(state):
            for name, encoded in known.items():
                old = ValuePlace.decode(encoded)
                if old.identity not in new:
                    raise CheckpointDamagedError(f"{inner}: the slot of a value of field {name!r} was not saved")
                known[name] = msgspec.structs.replace(new[old.identity], row=old.row, fields=old.fields).encode()
        write_whole(folder / _STATE, [pickle.dumps(state, protocol=pickle.HIGHEST_PROTOCOL)])
    except BaseException:  # an interrupt, too: nothing of a checkpoint that is not loaded stays in the rings
        for _, place in written:
            _discard(place, reader)
        raise


def _put(
    data: Any, places: list[ValuePlace], rings: Rings, written: list[tuple[ValuePlace, ValuePlace]], inner: Path
) -> None:
    begin = 0
    with memoryview(data) as memory:
        pieces = []
        for place in places:
            pieces.append(memory[begin : begin + place.size])
            begin += place.size
        try:
            for place, piece in zip(places, pieces, strict=True):
                if place.checksum != _ring.checksum(piece):
                    raise CheckpointDamagedError(f"{inner / _DATA}: a slot has other bytes than were saved")
            packed = [Packed([piece], len(piece), place.rows) for place, piece in zip(places, pieces, strict=True)]
            tickets = rings.write(packed)
            written += [
                (old, ValuePlace.of(ticket, 0, old.fields)) for old, ticket in zip(places, tickets, strict=True)
            ]
            packed.clear()
        finally:
            for piece in pieces:
                piece.release()


def _discard(place: ValuePlace, reader: ValueReader) -> None:
    for row in range(place.rows):
        try:
            reader.free(msgspec.structs.replace(place, row=row))
        except TransportError:
            return


def _state(path: Path) -> dict[str, Any]:
    """Return the controller's state. TransferQueue unpickles the same file."""
    try:
        with path.open("rb") as file:
            state: dict[str, Any] = pickle.load(file)
        return state
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError) as error:
        raise CheckpointDamagedError(f"{path}: the controller's state cannot be read: {error}") from error


def _values(state: dict[str, Any]) -> Iterator[dict[str, bytes]]:
    """Yield each sample's places by field; a change there changes the state."""
    for partition in state["partitions"].values():
        yield from partition.field_custom_backend_meta.values()
