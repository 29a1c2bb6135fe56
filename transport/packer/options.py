"""Options that the two mixins pass on: of the ring, of its server and of the client, each as one struct."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import msgspec

from transport.client.device_reads import DeviceReceive
from transport.ring.buffer import Sync
from transport.ring.overflow import Overflow
from transport.runtime.hiding import hiding
from transport.settings import Settings
from transport.store.directory import Directory
from transport.wires import Wire


class RingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a rollout worker's ring; see `SharedRingBuffer.create`.

    Attributes:
        slot_bytes: of each slot; None: what the schema needs.
        overflow: what a full ring does.
        consumers: names of the stages that each see every payload once, or names with how many ranks each has; the
            worker's ``readers`` are these then.
        file: where the ring lies instead of /dev/shm. What is unread when the worker ends, in whatever way, waits there
            for the next one.
        sync: of a ring in a file; "publish": what is published outlives a loss of power.
    """

    slot_bytes: int | None = None
    overflow: Overflow = "block"
    consumers: Sequence[str] | Mapping[str, int] | None = None
    file: str | os.PathLike[str] | None = None
    sync: Sync = "never"


@hiding("secret")
class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a rollout worker's server; see `UCXXServer`.

    What is None of settings, addresses, wires and secret is what the operator configured.

    Attributes:
        ports: one listener each; 0 is any free port.
        addresses: where trainers reach this host.
        wires: what readers may use.
        secret: that a reader has to prove.
        settings: of the server, and of writes that wait.
        linger_s: how long listeners outlive a killed worker; None: as the settings say.
        directory: where the server is published for as long as the worker lives.
    """

    ports: Sequence[int] = (0,)
    addresses: Sequence[str] | None = None
    wires: frozenset[Wire] | None = None
    secret: bytes | None = None
    settings: Settings | None = None
    linger_s: float | None = None
    directory: Directory | None = None


@hiding("secret")
class ClientOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the client of a `Trainer` or a data packer; see `UCXXClient`.

    Attributes:
        name: of its trainer, in metrics and in the rings' reports; None: host and process id.
        settings: None: the operator's.
        secret: of the listeners; None: the operator's.
        device: "cupy" or "torch" (":1" for the second device): payloads are put into its memory while the trainer
            computes, and their arrays are that library's. What the trainer's stream does with an array that it looked
            up comes after its arrival.
        device_receive: how payloads over a wire get there; "direct" is for RDMA.
        directory: asked where a ring is served by now, when a ticket's own ports do not answer.
    """

    name: str | None = None
    settings: Settings | None = None
    secret: bytes | None = None
    device: str | None = None
    device_receive: DeviceReceive = "staged"
    directory: Directory | None = None
