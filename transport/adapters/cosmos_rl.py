"""A payload transport for cosmos-rl's registry: the controller carries tickets, the packers read by them.

    register(schema)                                # in the script that every process runs, before its workers begin
    [custom]
    payload_transfer = "payload_transport"

    context = payload_context(schema, slots=64)     # the rollout engine: a PayloadContext over a ring of its own
    rollout.payload_context = context
    completion = context.publish_tensors(trajectory).to_dict()

The policy's packer is any `PrefetchDataPackerMixin`; the worker attaches the `TicketStrategy` to it.
A payload is consumed when its batch is released after final use (`release_prefetch`, `finish_payload_batch`), so
a policy worker that is killed before has lost none. Payloads that the controller discards as outdated are freed.

Written for cosmos-rl 0.4.7: `PayloadTransport`, `PayloadTransportStrategy` and the producer of `PayloadContext`.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from transport.adapters.tensors import tensors
from transport.adapters.versions import require_fitting
from transport.client.blocking import BlockingClient
from transport.client.payload import ReceivedPayload
from transport.client.retry import Deadline
from transport.config import configuration
from transport.errors import ClosedError, MissingDependencyError, TicketError, TransportError, UsageError
from transport.packer.mixin import UCXXDataPackerMixin
from transport.packer.options import ClientOptions
from transport.packer.prefetch import FetchedBatch
from transport.packer.rollout import UCXXRolloutMixin, ticket_id
from transport.runtime.installing import install
from transport.runtime.loop_thread import Job
from transport.schema import Schema, TensorSpec
from transport.ticket import Ticket

require_fitting("cosmos-rl")
try:
    import torch
    from cosmos_rl.utils.payload_transport import (
        PayloadContext,
        PayloadTransport,
        PayloadTransportRegistry,
        TensorLayout,
        WritablePayload,
    )
    from cosmos_rl.utils.payload_transport.pack import normalize_trajectory
    from cosmos_rl.utils.payload_transport.receive_memory import ReceivedBatch, storage_bytes
    from cosmos_rl.utils.payload_transport.strategy import PayloadTransportStrategy
    from cosmos_rl.utils.trajectory import (
        EPISODE_LENGTH,
        REWARDS,
        VARLEN_FIELDS,
        episode_length,
        truncate_trajectory,
    )
    from cosmos_rl.utils.trajectory import TensorSpec as CosmosSpec
except ImportError as error:
    raise MissingDependencyError(f"this adapter needs cosmos-rl 0.4.7 ({error}): {install('cosmos-rl')}") from error

log = logging.getLogger(__name__)

NAME: Final = "payload_transport"
PREFIX: Final = "payload_transport:"

_DISCARD_S: Final = 2.0  # of the controller's time, for all payloads of one discard together


def register(
    *schemas: Sequence[Any], name: str = NAME, rank: Callable[[], int] | None = None, **options: Any
) -> TicketTransport:
    """Register this transport with cosmos-rl as ``name``. A second call replaces the first.

    Args:
        schemas: of every `payload_context` of the run, as cosmos-rl's TensorSpecs.
        name: for ``[custom] payload_transfer``. "ucxx" replaces cosmos-rl's own, and brings the prefetch that cosmos-rl
            keeps for its own names (``train.prefetch_payloads``), but also its refusal of model-parallel policies.
        rank: returns a policy worker's rank in its model-parallel group; required with such groups. The rollouts'
            `payload_context` then needs ``readers`` of the group's size.
        options: of `UCXXDataPackerMixin.setup_ucxx_packer`.
    """
    if name == "ucxx":
        importlib.import_module("cosmos_rl.utils.payload_transport.ucxx")  # registers itself, the first time
    transport = TicketTransport(name, rank, {"schemas": [ring_schema(each) for each in schemas], **options})
    PayloadTransportRegistry.register(transport)
    return transport


class TicketTransport(PayloadTransport):  # type: ignore[misc]  # cosmos-rl is not there when types are checked
    """The transport that cosmos-rl's workers and its controller call. Made by `register`."""

    completion_prefix = PREFIX

    def __init__(self, name: str, rank: Callable[[], int] | None, options: Mapping[str, Any]) -> None:
        self.name = name
        self._rank = rank
        self._options = dict(options)

    def attach_data_packer(self, packer: Any, *, config: Any, device: Any = None, redis_endpoint: Any = None) -> None:
        """Give a packer its strategy and start its prefetch. A packer without transport strategies is not changed.

        ``[custom] payload_transport_prefetch_timeout`` (seconds, default 300) ends a worker whose batch takes longer.

        Raises:
            UsageError: the policy is model-parallel, and `register` was given no ``rank``.
            ConfigurationError, MissingDependencyError: as `setup_ucxx_packer`.
        """
        if not callable(getattr(packer, "set_transport_strategy", None)):
            return
        if self._rank is None and _readers(config) > 1:
            raise UsageError(
                f"{_readers(config)} ranks of a model-parallel group read each payload: "
                "give this one's rank with register(rank=...), and write with payload_context(readers=...)"
            )
        custom = getattr(config, "custom", None) or {}
        strategy = TicketStrategy()
        packer.set_transport_strategy(strategy)
        try:
            strategy.setup(device=device, rank=0 if self._rank is None else self._rank(), **self._options)
            packer._setup_prefetch(
                prefetch_timeout=float(custom.get("payload_transport_prefetch_timeout", 300.0)),
                thread_name="transport prefetch",
            )
        except BaseException:
            packer.close_transport()
            raise

    def close_producer(self, producer: Any, *, timeout: float = 5.0) -> None:
        """Close the context that a rollout engine keeps as ``payload_context``."""
        context = getattr(producer, "payload_context", None) or getattr(producer, "_payload_context", None)
        if context is not None:
            context.close(timeout=timeout)

    def publish_cleanup_for_discarded(self, *, transfer_ids: list[str], config: Any, redis_client: Any) -> int:
        """Free the payloads of rollouts that the controller drops; returns how many were still there.

        Payloads of listeners that do not answer within 2 s remain until their writer needs the slot or ends.
        """
        freed = 0
        give_up = time.monotonic() + _DISCARD_S
        operator = configuration()
        client_options = self._options.get("client") or ClientOptions()
        secret = client_options.secret or operator.secret()
        with BlockingClient(secret=secret, settings=self._options.get("settings") or operator.settings) as client:
            for text in transfer_ids:
                left = give_up - time.monotonic()
                if left <= 0:
                    log.warning(
                        "payloads of discarded rollouts remain in their rings: timeout after %.0f s", _DISCARD_S
                    )
                    break
                try:
                    freed += client.discard(Ticket.parse(text), left)
                except TransportError as error:
                    log.warning("a discarded rollout's payload remains in its ring: %s", str(error))
        return freed


def ring_schema(specs: Sequence[Any]) -> Schema:
    """cosmos-rl's TensorSpecs as the schema of a ring: its sequence fields (`VARLEN_FIELDS`) are ragged."""
    return Schema(
        tuple(
            TensorSpec(each.name, np.dtype(each.dtype).name, tuple(map(int, each.shape)), each.name in VARLEN_FIELDS)
            for each in specs
        )
    )


def _readers(config: Any) -> int:
    """How many ranks of the policy read the same rollout."""
    parallelism = getattr(getattr(config, "policy", None), "parallelism", None)
    sizes = (int(getattr(parallelism, f"{each}_size", 1) or 1) for each in ("tp", "cp", "pp"))
    return int(np.prod(list(sizes)))


# --- the policy's side ------------------------------------------------------------------------------------
class TicketStrategy(UCXXDataPackerMixin, PayloadTransportStrategy):  # type: ignore[misc]  # as above
    """Fetches payloads by ticket for one packer, with the three layers of retry.

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
        """Whether this is a reference of this transport: its completion is `PREFIX` and a ticket."""
        return _text_of(rollout_output) is not None

    def cache_key(self, rollout_output: Any) -> str:
        """Ring, slot and generation. TicketError for any other reference."""
        return ticket_id(_ticket_of(rollout_output))

    def fetch_batch(self, tasks: list[Any]) -> Any:
        """The payloads of ``(index, reference)`` pairs by key, as a lease whose release consumes them.

        Payloads that can never be read are in its ``rejected_keys``. Raises the errors of `collect_prefetch`, and
        ClosedError if the packer is closed during the fetch.
        """
        batch = self._fetch([_ticket_of(reference) for _, reference in tasks])
        try:
            return _Lease(batch, self._released)
        except BaseException:
            self._released(batch, used=False)
            raise

    def _released(self, batch: FetchedBatch, used: bool) -> None:
        with self._lock:
            if used and self._ucxx is not None:
                self.consume(batch)
            elif self._ucxx is not None:  # fetched for a trainer that does not come
                self.abandon(batch)
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
        except BaseException as error:
            if fetch.cancelled():
                raise ClosedError("the packer was closed while a batch was fetched") from error
            raise
        finally:
            with self._lock:
                self._fetches.discard(fetch)
        packer.batches += 1
        return batch


class _Lease(ReceivedBatch):  # type: ignore[misc]  # as above
    """A batch by cache key, until its last reader has released it."""

    def __init__(self, batch: FetchedBatch, released: Callable[[FetchedBatch, bool], None]) -> None:
        values = {ticket_id(payload.ticket): _trajectory(payload) for payload in batch.payloads}
        super().__init__(
            values,
            nbytes=storage_bytes(values.values()),
            rejected_keys=[ticket_id(item.ticket) for item in batch.failures if item.error and item.error.unreadable],
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


def _trajectory(payload: ReceivedPayload) -> dict[str, Any]:
    found = tensors(payload)
    truncate_trajectory(found)  # what was written through `acquire` has its full length
    return found


# --- the rollout's side -----------------------------------------------------------------------------------
def payload_context(schema: Sequence[Any], *, timeout_s: float | None = None, **options: Any) -> Any:
    """A cosmos-rl PayloadContext over a new ring of this process. Close it at the end.

    Args:
        schema: cosmos-rl's TensorSpecs; its sequence fields (`VARLEN_FIELDS`) go with their used rows only.
        timeout_s: how long `publish_tensors` waits while the ring is full; None: until there is room.
        options: of `UCXXRolloutMixin.setup_ucxx`: slots, readers, server and so on.
    """
    producer = TicketProducer(schema, timeout_s, options)
    return PayloadContext(NAME, producer, producer.default_layout)


class TicketProducer(UCXXRolloutMixin):
    """The producer of a PayloadContext: writes trajectories to the ring and returns references with their tickets."""

    def __init__(self, schema: Sequence[Any], timeout_s: float | None, options: Mapping[str, Any]) -> None:
        self._specs = list(schema)
        self._timeout_s = timeout_s
        self.default_layout = TensorLayout.compile(self._specs)
        self._published = 0
        self.setup_ucxx(ring_schema(self._specs), **options)

    def register_layout(self, layout: Any) -> None:
        """ValueError for another layout: the ring has one schema."""
        if layout != self.default_layout:
            raise ValueError(
                "layout mismatch: this producer's ring has another layout; make a payload_context for this one"
            )

    def publish(
        self, trajectory: Mapping[str, Any], *, layout: Any = None, copy_policy: str = "batched"
    ) -> dict[str, Any]:
        """Write one trajectory: normalised as cosmos-rl does it, its sequences without padding.

        copy_policy: ignored; a payload is one copy.
        Raises ValueError if the trajectory does not fit the schema, and the errors of `write_to_buffer`, such as
        RingFullError.
        """
        length = episode_length(trajectory, self._specs)
        used = [
            CosmosSpec((length, *each.shape[1:]), each.dtype, each.name) if each.name in VARLEN_FIELDS else each
            for each in self._specs
        ]
        given = {
            name: value[:length] if name in VARLEN_FIELDS and value is not None else value
            for name, value in trajectory.items()
        }
        ticket = self.write_to_buffer(normalize_trajectory(given, used, length), timeout_s=self._timeout_s)
        return self._reference(ticket, given.get(REWARDS), length)

    def acquire(self, *, layout: Any = None) -> Any:
        """The slot's own memory as tensors to fill, each of its full length. Raises what `reserve` raises."""
        full = {each.name: each.shape[0] for each in self._specs if each.name in VARLEN_FIELDS}
        lease = self.ring.reserve(full, readers=self._ucxx_readers, timeout_s=self._timeout_s)
        try:
            storage = torch.from_numpy(np.asarray(lease.memory))
            views = {name: torch.from_numpy(array) for name, array in lease.arrays.items()}
            return WritablePayload(
                owner=self,
                layout=self.default_layout,
                storage=storage,
                tensors=views,
                opaque=lease,
                on_abandon=lease.abort,
            )
        except BaseException:
            lease.abort()
            raise

    def publish_storage(self, payload: Any, *, ready_event: Any = None) -> dict[str, Any]:
        """Publish a payload from `acquire`, after ``ready_event``."""
        with payload._submit(self) as lease:
            if ready_event is not None:
                ready_event.synchronize()
            length = episode_length(payload.tensors, self._specs)
            rewards = payload.tensors.get(REWARDS)
            rewards = None if rewards is None else rewards[:length].clone()
        return self._reference(lease.ticket, rewards, length)

    def _reference(self, ticket: Ticket, rewards: Any, length: int) -> dict[str, Any]:
        self._published += 1
        rewards = [] if rewards is None else rewards
        return {
            "completion": PREFIX + ticket.to_text(),
            REWARDS: rewards.tolist() if hasattr(rewards, "tolist") else list(rewards),
            EPISODE_LENGTH: length,
        }

    def metrics(self) -> dict[str, int]:
        """Counters of the ring, by the names that cosmos-rl logs."""
        look = self.ring_statistics()
        return {
            "writes_total": self._published,
            "reads_total": look.consumes,
            "drops_total": look.overwrites,
            "ready_slots": look.ready,
            "max_slots": self.ring.slot_count,
        }

    def close(self, timeout: float = 5.0) -> None:
        """Stop serving, after waiting at most ``timeout`` seconds for unread payloads. Idempotent."""
        self.cleanup_ucxx(drain_s=timeout)
