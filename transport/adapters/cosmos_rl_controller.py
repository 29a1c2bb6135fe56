"""The controller's side of the adapter for cosmos-rl: the transport in its registry. Use `cosmos_rl`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from cosmos_rl.utils.payload_transport import PayloadTransport

from transport.adapters.cosmos_rl_policy import PREFIX, TicketStrategy
from transport.client.blocking import BlockingClient
from transport.config import configuration
from transport.errors import TransportError, UsageError
from transport.packer.options import ClientOptions
from transport.ticket import Ticket

log = logging.getLogger(__name__)

_DISCARD_S: Final = 2.0  # of the controller's time, for all payloads of one discard together


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

        See `free_discarded`.
        """
        return free_discarded(transfer_ids, self._options)


def _readers(config: Any) -> int:
    """How many ranks of the policy read the same rollout."""
    parallelism = getattr(getattr(config, "policy", None), "parallelism", None)
    sizes = (int(getattr(parallelism, f"{each}_size", 1) or 1) for each in ("tp", "cp", "pp"))
    return int(np.prod(list(sizes)))


def free_discarded(tickets: Sequence[str], options: Mapping[str, Any]) -> int:
    """Free these payloads, which nobody will read; returns how many were still there.

    Those of listeners that do not answer within 2 s remain until their writer needs the slot or ends.

    options: of `UCXXDataPackerMixin.setup_ucxx_packer`, of which secret and settings are used.
    """
    freed = 0
    give_up = time.monotonic() + _DISCARD_S
    operator = configuration()
    client_options = options.get("client") or ClientOptions()
    secret = client_options.secret or operator.secret()
    with BlockingClient(secret=secret, settings=options.get("settings") or operator.settings) as client:
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
