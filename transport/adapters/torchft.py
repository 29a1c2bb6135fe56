"""torchft's checkpoint transport: a replica that has come back takes its state from the memory of a healthy one.

    from transport.adapters.torchft import PayloadTransport

    manager = torchft.Manager(pg=pg, min_replica_size=1, state_dict=…, load_state_dict=…,
                              checkpoint_transport=PayloadTransport(timedelta(seconds=60)))

The sender copies its state into a segment of shared memory, once for all receivers, and trains on. A receiver maps it
on the same host, and reads it over UCX from another one; every byte is checked by a checksum. Nothing is unpickled.
A receiver learns from a TCPStore of the sender, as torch has it, where the state of a step is: as torchft's own
transports do, it trusts everybody who can reach its port.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, Final

from transport.adapters.torch.nested import Apart, together
from transport.client.blocking import BlockingClient
from transport.client.client import WirePolicy
from transport.errors import MissingDependencyError, UsageError
from transport.ring.buffer import SharedRingBuffer
from transport.ring.packing import describe_exact
from transport.runtime.installing import install
from transport.runtime.releases import require_fitting
from transport.server.server import UCXXServer
from transport.ticket import Ticket
from transport.wire.addresses import advertised

import torch  # isort: skip  # missing: transport.adapters.torch says what to do
from torch.distributed import TCPStore  # isort: skip
from torch.distributed.tensor import DTensor  # isort: skip

require_fitting("torchft")
try:
    from torchft.checkpointing.transport import CheckpointTransport
except ImportError as error:
    raise MissingDependencyError(f"this adapter needs torchft ({error}): {install('torchft')}") from error

_LOCAL: Final = "transport.local"  # the key of a dict that stands for a DTensor


class PayloadTransport(CheckpointTransport[Any]):  # type: ignore[misc]  # torchft is not installed for mypy
    """A transport for torchft's Manager. States are of dicts, lists, tuples, tensors, numbers, text, bytes and None.

    A state is received into new tensors in host memory, and with dicts where it had OrderedDicts.

    Args:
        timeout: for which a state is offered at most, once training goes on.
        state_dict: returns a state of the same form as those that are received, such as this replica's own. Needed for
            DTensors, whose local tensors alone travel: mesh and placements are those of this replica.
        address: where others reach this host; None: as rings find it.
        secret: that receivers elsewhere must have as well.
        wire: by which this one receives, of `BlockingClient`.
        options: of `UCXXServer`.
    """

    def __init__(
        self,
        timeout: timedelta,
        state_dict: Callable[[], object] | None = None,
        *,
        address: str | None = None,
        secret: bytes | None = None,
        wire: WirePolicy = "auto",
        **options: Any,
    ) -> None:
        self._timeout = timeout
        self._state_dict = state_dict
        self._secret, self._wire = secret, wire
        self._address = address or advertised()[0]
        self._options = {"addresses": None if address is None else (address,), "secret": secret, **options}
        self._store = TCPStore(self._address, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        self._sent = ExitStack()  # what serves the state of a step
        self._awaited: list[str] = []  # keys that its receivers set
        self._until = 0.0  # by the monotonic clock, when it is not offered any more

    def metadata(self) -> str:
        """Return where receivers ask for the state of a step."""
        return f"{self._address}:{self._store.port}"

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta) -> None:
        """Copy a state into shared memory, and offer it.

        SchemaError: it has an object that cannot travel; the message names its path. SharedMemoryError: it does not fit
        into the host's shared memory.
        """
        self._sent.close()
        apart = Apart()
        values = {"state": apart.of(_plain(state_dict), "state"), "marks": apart.marks}
        schema, _, lengths = describe_exact(values)
        with ExitStack() as opened:
            ring = SharedRingBuffer.create(slots=1, slot_bytes=schema.layout(lengths).total)
            opened.enter_context(ring)
            server = UCXXServer(ring, **self._options)
            opened.callback(server.close)
            server.start()
            ticket = ring.write(values, timeout_s=timeout.total_seconds())
            self._store.set(str(step), ticket.to_text())
            opened.callback(self._store.delete_key, str(step))
            self._sent = opened.pop_all()
        self._awaited = [f"{ticket.name} {number + 1}" for number in range(len(dst_ranks))]
        self._until = time.monotonic() + self._timeout.total_seconds()

    def disallow_checkpoint(self) -> None:
        """Free the memory of a state that all have received, or that nobody took within the timeout.

        It does not wait: what is offered is a copy, so the state may be changed.
        """
        if time.monotonic() > self._until or self._store.check(self._awaited):
            self._sent.close()

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        """Return the state of a step.

        DistStoreError, DistNetworkError: the sender has not offered it in time, or cannot be reached. An error of the
        read: the sender ended meanwhile. UsageError: it has a DTensor, and `state_dict` has none in its place.
        """
        until = time.monotonic() + timeout.total_seconds()
        host, _, port = metadata.rpartition(":")
        store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)
        ticket = Ticket.parse(store.get(str(step)).decode())
        with BlockingClient(ack="manual", secret=self._secret, wire=self._wire) as client:
            payload = client.read(ticket, timeout=max(0.01, until - time.monotonic()))
            state = together(payload["state"], payload["marks"], "state", copy=True)
            payload.release()  # not consumed: others may read it, too
        store.set(f"{ticket.name} {store.add(ticket.name, 1)}", "")
        return _placed(state, self._state_dict() if self._state_dict else None, "state")

    def shutdown(self, wait: bool = True) -> None:
        """Free everything; what is offered goes with it. Idempotent."""
        self._sent.close()


def _plain(value: Any) -> Any:
    """Return dicts, lists, tuples and tensors in host memory as they are sent; another class's value stays as it is."""
    if isinstance(value, DTensor):
        return {_LOCAL: _plain(value._local_tensor)}
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if type(value) in (dict, OrderedDict):  # as a module's state is
        return {key: _plain(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return value


def _placed(value: Any, own: Any, path: str) -> Any:
    """Return what was sent, with its DTensors placed as in this replica's own state."""
    if type(value) is dict and value.keys() == {_LOCAL}:
        if not isinstance(own, DTensor):
            raise UsageError(f"{path}: a DTensor was received: give PayloadTransport(…, state_dict=…), with its like")
        # as torchft makes them: from_local would give an empty one outside of the mesh
        return DTensor(value[_LOCAL].to(own.device), own._spec, requires_grad=False)
    if type(value) is dict:
        inside = own if isinstance(own, Mapping) else {}
        return {key: _placed(each, inside.get(key), f"{path}.{key}") for key, each in value.items()}
    if type(value) in (list, tuple):
        others = own if isinstance(own, list | tuple) and len(own) == len(value) else [None] * len(value)
        return type(value)(_placed(each, its, path) for each, its in zip(value, others, strict=True))
    return value
