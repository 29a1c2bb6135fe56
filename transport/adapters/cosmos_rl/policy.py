"""The policy's side of the adapter for cosmos-rl: a packer's strategy that reads by ticket. Use `cosmos_rl`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from typing import Any, Final

import msgspec
import torch
from cosmos_rl.utils.payload_transport.receive_memory import ReceivedBatch, storage_bytes
from cosmos_rl.utils.payload_transport.strategy import PayloadTransportStrategy
from cosmos_rl.utils.trajectory import truncate_trajectory

from transport.adapters.torch.tensors import tensors
from transport.client.payload import Payload
from transport.client.retry import Deadline
from transport.errors import ClosedError, TicketError, TransportError
from transport.packer.mixin import UCXXDataPackerMixin
from transport.packer.options import ClientOptions
from transport.packer.prefetch import FetchedBatch
from transport.runtime.loop_thread import Job
from transport.ticket import Ticket

log = logging.getLogger(__name__)

NAME: Final = "payload_transport"
PREFIX: Final = "payload_transport:"


class TicketStrategy(UCXXDataPackerMixin, PayloadTransportStrategy):  # type: ignore[misc]  # as above
    """Strategy that fetches payloads by ticket for one packer, with the three layers of retry.

    `fetch_batch` runs on the packer's prefetch thread, the rest on the trainer's.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards what a batch in hand becomes, and the next
        self._fetches: set[Job[FetchedBatch]] = set()
        self._closing = False

    def setup(self, *, device: Any = None, rank: int = 0, **options: Any) -> None:
        """Start the client. A CUDA ``device`` has payloads put into its memory. Raises as `setup_ucxx_packer`."""
        device = None if device is None else torch.device(device)
        if device is not None and device.type == "cuda":
            client = options.get("client") or ClientOptions()
            if client.device is None:
                options["client"] = msgspec.structs.replace(client, device=f"torch:{device.index or 0}")
        self.setup_ucxx_packer(rank=rank, **options)

    def before_join(self) -> None:
        """Cancel running fetches; their payloads remain in their rings."""
        with self._lock:
            self._closing = True
            fetches = list(self._fetches)
        for fetch in fetches:
            fetch.end()

    def shutdown(self) -> None:
        """Close the client. Idempotent."""
        self.before_join()
        self.cleanup_ucxx_packer()

    def should_intercept(self, rollout_output: Any) -> bool:
        """Return whether this is a reference of this transport: its completion is `PREFIX` and a ticket."""
        return _text_of(rollout_output) is not None

    def cache_key(self, rollout_output: Any) -> str:
        """Ring, slot and generation. TicketError for any other reference."""
        return _ticket_of(rollout_output).id

    def fetch_batch(self, tasks: list[Any]) -> Any:
        """Return the payloads of ``(index, reference)`` pairs by key, as a lease whose release consumes them.

        Payloads that can never be read are in its ``rejected_keys``. Raises the errors of `collect_prefetch`, and
        ClosedError if the packer is closed during the fetch.
        """
        batch = self._fetch([_ticket_of(reference) for _, reference in tasks])
        try:
            return _LeasedBatch(batch, self._released)
        except BaseException:  # an interrupt, too: there is no lease that releases the batch
            self._released(batch, used=False)
            raise

    def _released(self, batch: FetchedBatch, used: bool) -> None:
        with self._lock:
            if used and self._ucxx is not None:
                self.consume(batch)
        batch.release()  # what has not been acknowledged can be read by another worker

    def sync_fetch(self, rollout_output: Any) -> dict[str, Any] | None:
        """One payload, copied and consumed; None if it cannot be read."""
        try:
            batch = self._fetch([_ticket_of(rollout_output)])
            copied = False
            try:
                found = [
                    {name: each.clone() for name, each in _trajectory(payload).items()} for payload in batch.payloads
                ]
                copied = True
            finally:
                self._released(batch, used=copied)
        except (TransportError, ValueError) as error:
            # As text: a record that a handler keeps would keep the error, its frames, and in them the payload.
            log.warning("payload was not fetched: %s: %s", type(error).__name__, str(error))
            return None
        return found[0] if found else None

    def on_resolve_failed(self, rollout_output: Any, cache_key: str) -> None:
        """Log which episode is skipped; the fetch has logged why."""
        log.warning("payload %s was not fetched; its episode is skipped", cache_key)

    def _fetch(self, tickets: Sequence[Ticket]) -> FetchedBatch:
        packer = self._packer
        deadline = Deadline.after(packer.settings.batch_deadline_s, time.monotonic())
        with self._lock:
            if self._closing:
                raise ClosedError("the packer is closing")
            fetch = packer.thread.submit(self._ucxx_dp_fetch_all(tickets, deadline))
            self._fetches.add(fetch)
        try:
            batch = fetch.result()
        except CancelledError as error:
            raise ClosedError("the packer was closed while a batch was fetched") from error
        finally:
            with self._lock:
                self._fetches.discard(fetch)
        packer.counts["batches"] += 1
        return batch


class _LeasedBatch(ReceivedBatch):  # type: ignore[misc]  # as above
    """A batch by cache key, until its last reader has released it."""

    def __init__(self, batch: FetchedBatch, released: Callable[[FetchedBatch, bool], None]) -> None:
        values = {payload.ticket.id: _trajectory(payload) for payload in batch.payloads}
        super().__init__(
            values,
            nbytes=storage_bytes(values.values()),
            rejected_keys=[item.ticket.id for item in batch.failures if item.error and item.error.unreadable],
            on_release=lambda: released(batch, self.consumer_owned),
        )


def _text_of(reference: Any) -> str | None:
    text = reference.get("completion") if isinstance(reference, Mapping) else reference
    return text.removeprefix(PREFIX) if isinstance(text, str) and text.startswith(PREFIX) else None


def _ticket_of(reference: Any) -> Ticket:
    text = _text_of(reference)
    if text is None:
        raise TicketError(f"this {type(reference).__name__} is not a payload reference of {NAME}")
    return Ticket.parse(text)


def _trajectory(payload: Payload) -> dict[str, Any]:
    found = tensors(payload)
    truncate_trajectory(found)  # what was written through `acquire` has its full length
    return found
