"""TransferQueue's storage backend "PayloadTransport"; importing this module registers it.

    backend:
      storage_backend: PayloadTransport

A put writes into rings of the process that puts, a get reads from there, once per slot, and a clear frees. Only the
process that calls `transfer_queue.init` first must have imported this module: for verl its entry point does that, see
transport/adapters/transferqueue_plugin.py. The others are told by the configuration, see `Loader`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import os
import sys
import threading
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from transport.config import Configuration, configuration
from transport.decoders import convert
from transport.errors import (
    ConfigurationError,
    MissingDependencyError,
    PayloadLostError,
    RefusedError,
    SchemaError,
    StaleSlotError,
    TransportError,
)
from transport.runtime.installing import install
from transport.runtime.releases import require_fitting

require_fitting("TransferQueue")
try:
    import numpy as np
    import zmq
    from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
    from torch import Tensor
    from transfer_queue.metadata import BatchMeta, extract_field_schema
    from transfer_queue.storage.bootstrap.provider import StorageBootstrapProvider
    from transfer_queue.storage.managers.base import StorageManager, StorageManagerFactory
    from transfer_queue.utils.zmq_utils import ZMQMessage, ZMQRequestType, create_zmq_socket

    from transport.adapters.transferqueue import checkpoints
    from transport.adapters.transferqueue.gathering import Gathering
    from transport.adapters.transferqueue.packing import SAMPLES, ValuePlace, dense, pack
    from transport.adapters.transferqueue.reader import UnreadValue, ValueReader
    from transport.adapters.transferqueue.rings import Rings, StorageOptions, place_for
except ImportError as error:
    raise MissingDependencyError(
        f"TransferQueue's storage managers cannot be imported ({error}): {install('TransferQueue')}"
    ) from error

BACKEND = "PayloadTransport"

log = logging.getLogger(__name__)

_SLOT_BYTES = 16 << 20  # of one slot, roughly: readers elsewhere get a slot as a whole
_SIZED = (Tensor, str, bytes)
_rings: dict[Any, Rings] = {}
_making = threading.Lock()


class Loader:
    """Mark in the configuration: a process that unpickles it has imported this module, and hence the backend."""


def options_of(config: Any) -> StorageOptions:
    """Return the backend's options of TransferQueue's configuration. ConfigurationError names a wrong option."""
    try:
        plain = {str(name): value for name, value in dict(config or {}).items() if not isinstance(value, Loader)}
    except (TypeError, ValueError):
        raise ConfigurationError(f"backend.{BACKEND} is a {type(config).__name__}: give options by name") from None
    try:
        options = convert(plain, StorageOptions, strict=False)
    except msgspec.ValidationError as error:
        known = ", ".join(StorageOptions.__struct_fields__)
        raise ConfigurationError(f"backend.{BACKEND}: {error}; there are {known}") from None
    positive = ("ring_bytes", "most_bytes", "timeout_s", "linger_s")
    given = {name: value for name in positive if (value := getattr(options, name)) is not None}
    if not 1 <= options.samples <= SAMPLES or not all(0 < value < math.inf for value in given.values()):
        shown = ", ".join(f"{name}={value}" for name, value in given.items())
        raise ConfigurationError(
            f"backend.{BACKEND}: samples={options.samples} must be 1 to {SAMPLES}, and {shown} above 0 and finite"
        )
    return options


def _secret(options: StorageOptions) -> bytes | None:
    return Configuration(secret_file=options.secret_file).secret() if options.secret_file else configuration().secret()


class PayloadTransportStorageManager(StorageManager):  # type: ignore[misc]
    """TransferQueue's view of the rings: one for each of its clients."""

    def __init__(self, controller_info: Any, config: Any, zmq_context: Any = None) -> None:
        self._options = options_of(config)
        self._secret = _secret(self._options)
        self._reader = ValueReader(self._options, self._secret)
        self._dropped: dict[tuple[Any, int], set[str]] = defaultdict(set)
        super().__init__(controller_info, config)

    # --- put ----------------------------------------------------------------------------------------------------------
    async def put_data(
        self, data: TensorDict, metadata: BatchMeta, data_parser: Callable[[Any], Any] | None = None
    ) -> None:
        """Write the values, and tell the controller where they are.

        ``data_parser`` is called here, in the process that puts; what it returns is written.

        Raises:
            SchemaError: a field is not of these samples, or of what cannot be put.
            RingFullError: there is no room for them.
            RefusedError: the controller does not take their metadata; what the samples had before stays.
        """
        size = len(metadata.global_indexes)
        if data.batch_size[0] != size:
            raise ValueError(f"{data.batch_size[0]} samples of data, {size} in the metadata")
        if not size:
            return
        loop = asyncio.get_running_loop()
        places = await _handed_over(lambda: self._put(data, size, data_parser), self._free_all)
        names = sorted(data.keys())
        told = {
            index: dict.fromkeys(names, place) for index, place in zip(metadata.global_indexes, places, strict=True)
        }
        try:
            await self.notify_data_update(
                metadata.partition_ids[0], metadata.global_indexes, extract_field_schema(data), told
            )
        except Exception:  # refused, or not sent. A cancelled one may have been taken: its samples can be cleared
            await loop.run_in_executor(None, self._free_all, places)
            raise
        replaced = []
        for known, place in zip(metadata._custom_backend_meta, places, strict=True):
            replaced += [(name, known[name]) for name in names if name in known]
            known.update(dict.fromkeys(names, place))
        await loop.run_in_executor(None, self._replaced, replaced)

    def _put(self, data: TensorDict, size: int, data_parser: Callable[[Any], Any] | None) -> list[bytes]:
        """Return the encoded place of each sample."""
        columns = {name: _column(f"field {name!r}", data.get(name), size) for name in sorted(data.keys())}
        if data_parser is not None:
            columns = _parsed(columns, size, data_parser)
        names, values = list(columns), list(columns.values())
        each = sum(map(_bytes, values)) // size
        rows = max(1, min(self._options.samples, _SLOT_BYTES // (each + 1)))
        payloads = [pack(names, values, first, min(rows, size - first)) for first in range(0, size, rows)]
        with _making:
            rings = place_for(_rings, self._options, self._options, self._secret)
        tickets = rings.write(payloads)
        return [
            ValuePlace.of(ticket, row, len(names)).encode()
            for ticket, payload in zip(tickets, payloads, strict=True)
            for row in range(payload.rows)
        ]

    # --- get ----------------------------------------------------------------------------------------------------------
    async def get_data(self, metadata: BatchMeta) -> TensorDict:
        """Read the values, any number of times.

        Raises:
            PayloadLostError: they were cleared, or the process that put them, or its host, is gone.
        """
        if not metadata.field_names or not metadata.size:
            return TensorDict({}, batch_size=metadata.size)
        return await asyncio.get_running_loop().run_in_executor(None, self._get, metadata)

    def _get(self, metadata: BatchMeta) -> TensorDict:
        names = sorted(metadata.field_names)
        size = metadata.size
        wanted: dict[Any, dict[str, tuple[list[int], list[int]]]] = {}
        places: dict[Any, ValuePlace] = {}
        decode = functools.lru_cache(maxsize=None)(ValuePlace.decode)
        for at in range(size):
            known = metadata._custom_backend_meta[at]
            for name in names:
                if name not in known:
                    raise PayloadLostError(
                        f"sample {metadata.global_indexes[at]} has no value of field {name!r}: it was not put through "
                        f"{BACKEND}, or has been cleared"
                    )
                place = decode(known[name]) if type(known[name]) is bytes else ValuePlace.decode(known[name])
                places.setdefault(place.identity, place)
                samples, rows = wanted.setdefault(place.identity, {}).setdefault(name, ([], []))
                samples.append(at)
                rows.append(place.row)
        gathering = Gathering(size, {name: _hints(metadata, name) for name in names})
        try:
            self._reader.read(places.values(), lambda place, data: gathering.add(data, wanted[place.identity]))
        except UnreadValue as unread:
            which = {at for samples, _ in wanted[unread.place.identity].values() for at in samples}
            raise self._lost(unread, [metadata.global_indexes[at] for at in sorted(which)]) from unread.error
        return TensorDict(gathering.result(), batch_size=size)

    def _lost(self, unread: UnreadValue, samples: Sequence[int]) -> PayloadLostError:
        shown = ", ".join(map(str, samples[:8])) + (f" and {len(samples) - 8} more" if len(samples) > 8 else "")
        if isinstance(unread.error, StaleSlotError):
            return PayloadLostError(
                f"samples {shown}: their values were cleared, or put again ({unread.error}); ask the controller for "
                "their metadata anew"
            )
        where = unread.place.address or "a host that serves no other (serve: false)"
        return PayloadLostError(
            f"samples {shown}: the process that put them does not answer at {where}: {unread.error}. If it or its host "
            "has ended, their values are lost: clear these samples and put them again"
        )

    # --- clear --------------------------------------------------------------------------------------------------------
    async def clear_data(self, metadata: BatchMeta) -> None:
        """Free whole samples. A slot is free when all of its samples are cleared, by whichever processes.

        Where their values are, the controller says: metadata has the fields that were asked for, or that all samples
        have in common.
        """
        samples: dict[str, set[int]] = defaultdict(set)
        for partition, index in zip(metadata.partition_ids, metadata.global_indexes, strict=True):
            samples[partition].add(index)
        told: set[Any] = set()
        for partition, indexes in samples.items():
            known = (await self._ask(ZMQRequestType.GET_PARTITION_META, {"partition_id": partition}))["metadata"]
            if known is not None:
                rows = zip(known.global_indexes, known._custom_backend_meta, strict=True)
                told.update(place for index, of in rows if index in indexes for place in of.values())
        failed = await asyncio.get_running_loop().run_in_executor(None, self._free_all, told)
        if failed is not None:
            raise failed

    def _free_all(self, places: Iterable[bytes]) -> TransportError | None:
        """Free every place that can be freed; the first error of the others."""
        failed: TransportError | None = None
        for encoded in places:
            try:
                self._free(ValuePlace.decode(encoded))
            except TransportError as error:
                failed = failed or error
        return failed

    def _free(self, place: ValuePlace) -> None:
        self._dropped.pop((place.identity, place.row), None)
        self._reader.free(place)

    def _replaced(self, values: Iterable[tuple[str, bytes]]) -> None:
        """Values that were put again. A sample of a slot is freed when all of its values were, by this process."""
        for name, encoded in values:
            try:
                place = ValuePlace.decode(encoded)
                gone = self._dropped[place.identity, place.row]
                gone.add(name)
                if len(gone) >= place.fields:
                    self._free(place)
            except TransportError as error:  # the new value is there
                log.warning("the value that field %r had before was not freed: %s", name, str(error))

    # --- the controller -----------------------------------------------------------------------------------------------
    async def _notify_and_wait(self, request_msg: list[Any]) -> None:
        """TransferQueue's notice of a put. Its own does not look into the answer, and returns without one."""
        if not (await self._answer(request_msg)).get("success"):
            raise RefusedError(
                "TransferQueue's controller did not take the metadata of these values; its log says why. A field has "
                "one dtype in a partition: put its values with the dtype that it has there"
            )

    async def _ask(self, kind: ZMQRequestType, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body of the controller's answer, for which this waits as TransferQueue's clients do."""
        message = ZMQMessage.create(request_type=kind, sender_id=self.storage_manager_id, body=body).serialize()
        asked = asyncio.run_coroutine_threadsafe(self._answer(message), self._notify_loop)
        return await asyncio.wrap_future(asked)

    async def _answer(self, message: list[Any]) -> dict[str, Any]:
        """RefusedError for an answer that is an error. Runs in the loop that has this manager's sockets."""
        identity = f"{self.storage_manager_id}-{uuid.uuid4().hex[:8]}".encode()
        socket = create_zmq_socket(self.zmq_context, zmq.DEALER, self.controller_info.ip, identity=identity)
        try:
            socket.connect(self.controller_info.to_addr("request_handle_socket"))
            await socket.send_multipart(message)
            answer = ZMQMessage.deserialize(await socket.recv_multipart(copy=False))
        finally:
            socket.close(linger=0)
        if answer.request_type == "REQUEST_ERROR":
            raise RefusedError(f"TransferQueue's controller answers: {answer.body.get('message')}")
        return dict(answer.body)

    # --- checkpoints --------------------------------------------------------------------------------------------------
    async def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Save the values that the controller knows, from whichever processes, beside its state.

        Nothing is put or cleared meanwhile. Raises PayloadLostError for a value that cannot be read any more.
        """
        await asyncio.get_running_loop().run_in_executor(None, self._save, Path(checkpoint_dir))

    def _save(self, folder: Path) -> None:
        try:
            checkpoints.save(folder, self._reader)
        except UnreadValue as unread:
            raise self._lost(unread, []) from unread.error

    async def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Put the saved values into rings of this process, and their places into the controller's state in that folder.

        No other run may load from the folder until the controller has loaded, too.
        Raises CheckpointDamagedError for files that are not as they were saved, and RingFullError; nothing is put then.
        """

        def load() -> None:
            with _making:
                rings = place_for(_rings, self._options, self._options, self._secret)
            checkpoints.load(Path(checkpoint_dir), rings, self._reader)

        await asyncio.get_running_loop().run_in_executor(None, load)

    def close(self) -> None:
        """End reading. What this process has put stays readable until it is cleared, or the process ends."""
        self._end()
        with _making:
            for (pid, _), rings in _rings.items():
                if pid == os.getpid():
                    rings.leave()

    def _end(self) -> None:
        super().close()
        reader = getattr(self, "_reader", None)  # without one where a configuration was refused
        if reader is not None:
            reader.close()

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # In any thread, at any time, also within a put: the rings are left alone, and no lock of theirs is taken.
        if finalizing():  # the module may be empty by now, hence the default argument
            return
        try:
            self._end()
        except Exception:  # a destructor cannot raise: Python would print any error, and go on
            log.debug("%s was not closed in order", type(self).__name__, exc_info=True)


async def _handed_over(put: Callable[[], list[bytes]], free: Callable[[list[bytes]], Any]) -> list[bytes]:
    """Return what ``put`` returns, which runs in a thread. If its caller is cancelled, it is freed instead."""
    lock = threading.Lock()
    written: list[bytes] = []
    cancelled = False

    def put_for_caller() -> list[bytes]:
        places = put()
        with lock:
            written.extend(places)
            left_behind = cancelled
        if left_behind:
            free(places)
        return places

    loop = asyncio.get_running_loop()
    try:
        return await loop.run_in_executor(None, put_for_caller)
    except asyncio.CancelledError:
        with lock:
            cancelled = True
        if written:
            free(written)
        raise


def _column(what: str, value: Any, size: int) -> Any:
    """Return a dense tensor with a row for each sample, or a list with a value for each. SchemaError for all else."""
    if isinstance(value, NonTensorData) and isinstance(value.data, list | np.ndarray):
        value = list(value.data)  # rows, as for TransferQueue's own backends; a TensorDict makes it of an array of text
    elif isinstance(value, NonTensorData | NonTensorStack):
        value = value.tolist()  # of any other NonTensorData its one value for each sample
    elif isinstance(value, TensorDictBase) or (isinstance(value, Tensor) and not dense(value)):
        value = list(value.unbind(0))
    if not isinstance(value, list | Tensor) or (isinstance(value, Tensor) and not value.dim()):
        raise SchemaError(
            f"{what} is a {type(value).__name__}: give a tensor, a TensorDict, a NonTensorStack or a list, of as many "
            f"rows as there are samples ({size}), or a NonTensorData"
        )
    if len(value) != size:
        raise SchemaError(f"{what} has {len(value)} values for {size} samples")
    if isinstance(value, list) and len({isinstance(each, TensorDictBase) for each in value}) > 1:
        raise SchemaError(f"{what} has TensorDicts and other values: make all of them TensorDicts, or none")
    return value


def _parsed(columns: dict[str, Any], size: int, data_parser: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the columns that the parser returns, which may be the given ones: as many values, under the same names."""
    names = sorted(columns)
    parsed = data_parser(columns)
    if not isinstance(parsed, dict):
        raise TypeError(f"data_parser returned a {type(parsed).__name__}: return the columns, as a dict")
    if sorted(parsed) != names:
        raise ValueError(f"data_parser was given the fields {names}, and returned {sorted(parsed)}: keep them")
    return {name: _column(f"field {name!r} of data_parser", parsed[name], size) for name in names}


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return int(value.nbytes)
    return sum(
        each.nbytes if isinstance(each, Tensor) else len(each) if isinstance(each, str | bytes) else 64
        for each in value
    )


def _hints(metadata: BatchMeta, name: str) -> tuple[Any, Sequence[Any]]:
    if name not in metadata.field_schema:
        return None, ()
    dtypes = metadata.get_dtypes(name)
    return (dtypes[0] if dtypes else None), metadata.get_shapes(name)


def provide(conf: Any) -> dict[str, Any]:
    """TransferQueue asks for the backend's resources: there are none, but other processes are told of this module."""
    backends = conf.backend
    if backends.get(BACKEND) is None:
        backends[BACKEND] = {}
    options_of(backends[BACKEND])
    backends[BACKEND].loader = Loader()
    return {"loader": __name__}


def register() -> None:
    """Register the manager and its provider with TransferQueue. Idempotent."""
    StorageManagerFactory.register(BACKEND)(PayloadTransportStorageManager)
    StorageBootstrapProvider.register_provider(BACKEND)(provide)


register()
