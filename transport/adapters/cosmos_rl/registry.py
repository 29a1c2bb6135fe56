"""A payload transport for cosmos-rl's registry: the controller carries tickets, the packers read by them.

    replace_ucxx()                                  # an unchanged job with cosmos-rl's own payload_transfer = "ucxx"

Or under a name of its own:

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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transport.adapters.torch.tensors import tensors  # noqa: F401  # first, since it says what to install without torch
from transport.errors import MissingDependencyError
from transport.ring.overflow import Overflow
from transport.runtime.installing import install
from transport.runtime.releases import require_fitting

require_fitting("cosmos-rl")
try:
    from cosmos_rl.utils.payload_transport import PayloadTransportRegistry

    from transport.adapters.cosmos_rl.controller import TicketTransport
    from transport.adapters.cosmos_rl.policy import NAME, PREFIX, TicketStrategy
    from transport.adapters.cosmos_rl.rollout import TicketProducer, payload_context, ring_schema
except ImportError as error:
    raise MissingDependencyError(f"this adapter needs cosmos-rl 0.4.7 ({error}): {install('cosmos-rl')}") from error

__all__ = [
    "NAME",
    "PREFIX",
    "TicketProducer",
    "TicketStrategy",
    "TicketTransport",
    "payload_context",
    "register",
    "replace_ucxx",
    "ring_schema",
]


def register(*schemas: Sequence[Any], rank: Callable[[], int] | None = None, **options: Any) -> TicketTransport:
    """Register this transport with cosmos-rl as "payload_transport". A second call replaces the first.

    Args:
        schemas: of every `payload_context` of the run, as cosmos-rl's TensorSpecs.
        rank: returns a policy worker's rank in its model-parallel group; required with such groups. The rollouts'
            `payload_context` then needs ``readers`` of the group's size.
        options: of `UCXXDataPackerMixin.setup_ucxx_packer`.
    """
    transport = TicketTransport(rank, {"schemas": [ring_schema(each) for each in schemas], **options})
    PayloadTransportRegistry.register(transport)
    return transport


def replace_ucxx(
    *schemas: Sequence[Any],
    overflow: Overflow = "block",
    timeout_s: float | None = 300.0,
    rollout: Mapping[str, Any] | None = None,
    policy: Mapping[str, Any] | None = None,
) -> Any:
    """Make cosmos-rl's transport "ucxx" this one. The only change to a job that has payload_transfer = "ucxx".

    Call it in the script that every process runs, before the launcher. A second call replaces the choices of the first.
    The names in [custom] remain: ucxx_prefetch_timeout, ucxx_read_max_attempts, ucxx_read_timeout.

    Args:
        schemas: only those too large for a ticket, of which the error says so.
        overflow: what a full ring does. "block" waits for a slot. cosmos-rl's own overwrites unread payloads, as
            "overwrite" does: needed by a job that publishes payloads which are never read nor discarded.
        timeout_s: how long "block" waits before publishing raises RingFullError; None: for ever.
        rollout: options of `UCXXRolloutMixin.setup_ucxx`, for example ``{"slots": 64}`` against a job's max_entries.
        policy: options of `UCXXDataPackerMixin.setup_ucxx_packer`.

    Raises:
        UsageError: one of the arguments is wrong.
    """
    ucxx = importlib.import_module("transport.adapters.cosmos_rl.ucxx")  # what it needs is only there with cosmos-rl
    return ucxx.replace(ucxx.checked(schemas, overflow, timeout_s, rollout, policy))
