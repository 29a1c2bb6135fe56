"""The controller's side of the adapter for cosmos-rl: the transport in its registry. Use `cosmos_rl`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from cosmos_rl.utils.payload_transport import PayloadTransport

from transport.adapters.cosmos_rl.policy import NAME, PREFIX, TicketStrategy
from transport.adapters.cosmos_rl.rollout import context_of, end_publishing
from transport.client.blocking import BlockingClient
from transport.config import configuration
from transport.errors import TransportError, UsageError
from transport.packer.options import ClientOptions
from transport.ticket import Ticket

log = logging.getLogger(__name__)

_DISCARD_S: Final = 2.0  # of the controller's time, for all payloads of one discard together


class TicketTransport(PayloadTransport):  # type: ignore[misc]  # cosmos-rl is not there when types are checked
    """The transport that cosmos-rl's workers and its controller call. Made by `register`."""

    name = NAME
    completion_prefix = PREFIX

    def __init__(self, rank: Callable[[], int] | None, options: Mapping[str, Any]) -> None:
        self._rank = rank
        self._options = dict(options)
        self.discarding = Discarding(self._options)

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
        except BaseException:  # an interrupt, too: half a set-up has threads and connections
            packer.close_transport()
            raise

    def close_producer(self, producer: Any, *, timeout: float = 5.0) -> None:
        """Close the context that a rollout engine keeps as ``payload_context``, also while it publishes."""
        end_publishing(producer, timeout)
        context = context_of(producer)
        if context is not None:
            context.close(timeout=timeout)

    def publish_cleanup_for_discarded(self, *, transfer_ids: list[str], config: Any, redis_client: Any) -> int:
        """Free the payloads of rollouts that the controller drops; returns how many were still there.

        See `Discarding.free`.
        """
        return self.discarding.free(transfer_ids)


def _readers(config: Any) -> int:
    """Return how many ranks of the policy read the same rollout."""
    parallelism = getattr(getattr(config, "policy", None), "parallelism", None)
    sizes = (int(getattr(parallelism, f"{each}_size", 1) or 1) for each in ("tp", "cp", "pp"))
    return int(np.prod(list(sizes)))


class Discarding:
    """Release of dropped rollouts' payloads. The client is kept: a connection costs more than what it is used for."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._lock = threading.Lock()  # guards the client, which several threads of the controller may ask for at once
        self._client: BlockingClient | None = None

    def free(self, tickets: Sequence[str]) -> int:
        """Free these payloads, which no trainer will read; returns how many were still there.

        Those of listeners that do not answer within 2 s remain until their writer needs the slot or ends.
        """
        freed = 0
        give_up = time.monotonic() + _DISCARD_S
        try:
            client = self._connected()
        except TransportError as error:  # cosmos-rl would hide it
            log.warning("payloads of discarded rollouts remain in their rings: %s", str(error))
            return 0
        for text in tickets:
            left = give_up - time.monotonic()
            if left <= 0:
                log.warning("payloads of discarded rollouts remain in their rings: timeout after %.0f s", _DISCARD_S)
                break
            try:
                freed += client.discard(Ticket.parse(text), left)
            except TransportError as error:
                log.warning("a discarded rollout's payload remains in its ring: %s", str(error))
        return freed

    def _connected(self) -> BlockingClient:
        with self._lock:
            if self._client is None:
                operator = configuration()
                client_options = self._options.get("client") or ClientOptions()
                self._client = BlockingClient(
                    secret=client_options.secret or operator.secret(),
                    settings=client_options.settings or operator.settings,
                )
            return self._client

    def close(self) -> None:
        """Close the client; the process's end does it, too. Idempotent: the next `free` makes another one."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()
