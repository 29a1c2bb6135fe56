"""Reads and releases of slots by their places: mapped ones in the calling thread, those of other hosts by a client."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from transport.adapters.transferqueue.packing import ValuePlace
from transport.adapters.transferqueue.rings import StorageOptions
from transport.client.blocking import BlockingClient
from transport.config import configuration
from transport.errors import PayloadLostError, TransportError
from transport.ring.attached import AttachedRings, through
from transport.ring.buffer import SharedRingBuffer
from transport.wires import Wire

_REMOTE: frozenset[Wire] = frozenset({"shm", "tcp", "rdma", "cuda"})


class ValueReader:
    """Reader of one manager's values. Any thread may call."""

    def __init__(self, options: StorageOptions, secret: bytes | None) -> None:
        self._options = options
        self._secret = secret
        self._attached = AttachedRings()
        self._client: BlockingClient | None = None
        self._lock = threading.Lock()

    def read(self, places: Iterable[ValuePlace], use: Callable[[ValuePlace, Any], None]) -> None:
        """Call ``use`` with each place and its slot's bytes, which are there during the call only.

        Raises `UnreadValue`, whose cause is what a client's read raises.
        """
        elsewhere: dict[int, dict[Any, ValuePlace]] = defaultdict(dict)
        for place in places:
            ticket = place.ticket()
            pin = partial(SharedRingBuffer.read_raw, ticket=ticket, rank=place.row)
            try:
                lease = through(self._attached.find, ticket, pin)
            except TransportError as error:
                raise UnreadValue(place, error) from error
            if lease is None:
                elsewhere[place.row][place.identity] = place
                continue
            with lease:
                use(place, lease.view)
        for rank, some in elsewhere.items():
            self._read_elsewhere(rank, some, use)

    def _read_elsewhere(self, rank: int, places: dict[Any, ValuePlace], use: Callable[[ValuePlace, Any], None]) -> None:
        for place in places.values():
            if not place.address:
                raise UnreadValue(place, PayloadLostError("its ring is not on this host, and is not served to others"))
        tickets = [place.ticket() for place in places.values()]
        for outcome in self._remote().read_many(tickets, rank=rank, timeout=self._options.timeout_s):
            ticket = outcome.ticket
            place = places[bytes.fromhex(ticket.ring), ticket.slot, ticket.generation]
            if outcome.payload is None:
                assert outcome.error is not None
                raise UnreadValue(place, outcome.error) from outcome.error
            try:
                use(place, outcome.payload.data)
            finally:
                outcome.payload.release()

    def free(self, place: ValuePlace) -> None:
        """Say that this sample of the slot is cleared. A ring that is gone needs no such word."""
        ticket = place.ticket()
        freed = through(self._attached.find, ticket, lambda ring: ring.acknowledge(ticket, place.row))
        if freed is None and place.address:
            self._remote().ack(ticket, place.row)

    def _remote(self) -> BlockingClient:
        with self._lock:
            if self._client is None:
                self._client = BlockingClient(
                    ack="manual", secret=self._secret, settings=configuration().settings, wire=_REMOTE
                )
            return self._client

    def close(self) -> None:
        """Detach and disconnect."""
        client, self._client = self._client, None
        self._attached.close(but_lent=True)
        if client is not None:
            client.close()


class UnreadValue(Exception):
    """Error that tells a manager which place could not be read; users see the error that it makes of it."""

    def __init__(self, place: ValuePlace, error: TransportError) -> None:
        super().__init__(str(error))
        self.place = place
        self.error = error
