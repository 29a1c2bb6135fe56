"""cosmos-rl's transport "ucxx" is this one: `replace_ucxx`, from `transport.adapters.cosmos_rl`.

cosmos-rl's functions that choose by the name "ucxx" do not ask its registry: `PayloadContext.create` makes a
`UCXXPayloadProducer`, `make_transport_strategy` and `compose_ucxx_transport` make a `UCXXTransportStrategy`. They look
up these classes when they are called, so that `replace_ucxx` puts its own in their place.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final

import msgspec
from cosmos_rl.utils.payload_transport.registry import PayloadTransportRegistry
from cosmos_rl.utils.payload_transport.ucxx import UCXXBufferConfig
from cosmos_rl.utils.payload_transport.ucxx import producer as upstream_producer
from cosmos_rl.utils.payload_transport.ucxx import strategy as upstream_strategy
from cosmos_rl.utils.payload_transport.ucxx.transport import UCXXPayloadTransport
from cosmos_rl.utils.trajectory import build_trajectory_schema

from transport.adapters.cosmos_rl.controller import Discarding
from transport.adapters.cosmos_rl.policy import PREFIX, TicketStrategy
from transport.adapters.cosmos_rl.rollout import TicketProducer, end_publishing, ring_schema
from transport.config import configuration
from transport.errors import ConfigurationError, RingFullError, SchemaError, StopRequestedError, UsageError
from transport.packer.options import ClientOptions, RingOptions, ServerOptions
from transport.ring.overflow import Overflow
from transport.runtime.arguments import seconds
from transport.schema import Schema
from transport.ticket import Ticket

NAME: Final = "ucxx"

# Of a schema within each ticket, which has room for 1968 bytes. cosmos-rl's trajectories take about 200.
_MOST_SCHEMA_BYTES: Final = 1200
_SLOTS: Final = 1000  # what cosmos-rl takes where a job gives no UCXXBufferConfig


class Choices(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of `replace_ucxx`, for the objects that cosmos-rl makes itself."""

    schemas: tuple[Schema, ...] = ()
    overflow: Overflow = "block"
    timeout_s: float | None = 300.0
    rollout: Mapping[str, Any] = {}
    policy: Mapping[str, Any] = {}


def replace(choices: Choices) -> UCXXReplacement:
    """Put the classes below in the place of cosmos-rl's. A second call replaces the choices of the first."""
    UCXXProducer.choices = UCXXStrategy.choices = choices
    upstream_producer.UCXXPayloadProducer = UCXXProducer
    upstream_strategy.UCXXTransportStrategy = UCXXStrategy
    transport = UCXXReplacement(choices)
    PayloadTransportRegistry.register(transport)
    return transport


class UCXXProducer(TicketProducer):
    """Producer in the place of cosmos-rl's `UCXXPayloadProducer`: made without arguments, then set up by its own.

    Its references look like cosmos-rl's, and its tickets bring the schema, since the job gives the policy none.
    """

    choices: ClassVar[Choices] = Choices()

    def __init__(self) -> None:
        """Do nothing: the ring is made by `setup`."""

    def setup(
        self,
        replica_id: str,
        max_steps: int,
        obs_dim: int,
        action_dim: int,
        port: int = 0,
        config: Any = None,
        schema: Sequence[Any] | None = None,
    ) -> None:
        """Create the ring and serve it.

        Args:
            replica_id: for cosmos-rl's logs; the ring has a name of its own.
            max_steps, obs_dim, action_dim: of the schema, if none is given.
            port: of the first listener, the others follow it; 0 is any free one for each.
            config: a UCXXBufferConfig, of which ``max_entries`` and ``n_server_threads`` are used: the listener's
                threads there are as many listeners here.
            schema: cosmos-rl's TensorSpecs.

        Raises:
            UsageError: it was set up before and not closed.
            SchemaError: the schema is too large for the tickets, and `replace_ucxx` was not given it.
        """
        if self._ucxx_ring is not None:
            raise UsageError(f"replica {replica_id}: this producer is set up already; close it first")
        if schema is None:
            schema = build_trajectory_schema({"max_steps": max_steps, "obs_dim": obs_dim, "action_dim": action_dim})
        choices = self.choices
        of_ring = ring_schema(schema)
        known = of_ring.fingerprint in (each.fingerprint for each in choices.schemas)
        if not known and len(of_ring.encode()) > _MOST_SCHEMA_BYTES:
            raise SchemaError(
                f"the schema of {len(schema)} tensors does not fit into tickets "
                f"({len(of_ring.encode())} bytes, at most {_MOST_SCHEMA_BYTES}): give it to replace_ucxx(schema)"
            )
        self._inline = None if known else of_ring
        config = config or UCXXBufferConfig(max_entries=_SLOTS)
        listeners = range(max(1, config.n_server_threads))
        options: dict[str, Any] = {
            "slots": config.max_entries,
            "ring": RingOptions(overflow=choices.overflow),
            "server": ServerOptions(ports=tuple(port and port + each for each in listeners)),
            **choices.rollout,
        }
        super().__init__(schema, choices.timeout_s, options)

    def publish(
        self, trajectory: Mapping[str, Any], *, layout: Any = None, copy_policy: str = "batched"
    ) -> dict[str, Any]:
        """Write one trajectory. Unlike cosmos-rl's, it raises what went wrong, and never returns None."""
        with self._with_remedies():
            return super().publish(trajectory, layout=layout, copy_policy=copy_policy)

    def acquire(self, *, layout: Any = None) -> Any:
        """Return the slot's own memory, as `TicketProducer.acquire`."""
        with self._with_remedies():
            return super().acquire(layout=layout)

    @contextlib.contextmanager
    def _with_remedies(self) -> Iterator[None]:
        ring = self.ring  # UsageError before `setup`, and after `close`
        try:
            yield
        except StopRequestedError:
            raise
        except RingFullError as error:
            waited = "" if self._timeout_s is None else f" for {self._timeout_s:g} s"
            raise RingFullError(
                f"all {ring.slot_count} slots of the ring have been full{waited}: raise max_entries, or, to lose "
                'unread payloads as cosmos-rl\'s own transport does, call replace_ucxx(overflow="overwrite")'
            ) from error

    def _reference(self, ticket: Ticket, rewards: Any, length: int) -> dict[str, Any]:
        if self._inline is not None:
            ticket = msgspec.structs.replace(ticket, schema=self._inline)
        return {"_ucxx": True, "_ucxx_enabled": True, **super()._reference(ticket, rewards, length)}


class UCXXStrategy(TicketStrategy):
    """Strategy in the place of cosmos-rl's `UCXXTransportStrategy`."""

    choices: ClassVar[Choices] = Choices()

    def __init__(self) -> None:
        super().__init__()
        self._read_timeout = 30.0

    @property
    def read_timeout(self) -> float:
        """Seconds for one attempt to read, beside what a large payload adds. cosmos-rl reads it when it closes."""
        return self._read_timeout

    @property
    def _client(self) -> Any:  # for cosmos-rl's `_ucxx_dp_client`
        return None if self._ucxx is None else self._ucxx.client

    def setup(self, *, device: Any = None, max_attempts: int = 2, read_timeout: float = 30.0, **options: Any) -> None:
        """Start the client.

        Args:
            device: a CUDA device has payloads put into its memory.
            max_attempts: fresh calls for each payload, [custom] ucxx_read_max_attempts.
            read_timeout: seconds for each attempt, [custom] ucxx_read_timeout.
            options: of `TicketStrategy.setup`.

        Raises:
            ConfigurationError: ``read_timeout`` is no positive number of seconds. And as `setup_ucxx_packer`.
        """
        if not (math.isfinite(read_timeout) and read_timeout > 0):
            raise ConfigurationError(f"[custom] ucxx_read_timeout = {read_timeout}: give a number of seconds above 0")
        given = {"schemas": self.choices.schemas, **self.choices.policy, **options}
        client = given.pop("client", None) or ClientOptions()
        settings = client.settings or configuration().settings
        self._read_timeout = float(read_timeout)
        settings = msgspec.structs.replace(
            settings,
            read_timeout_s=self._read_timeout,
            calls_per_ticket=max(1, int(max_attempts)),
            batch_deadline_s=max(settings.batch_deadline_s, 2 * self._read_timeout),
        ).validate()
        super().setup(device=device, client=msgspec.structs.replace(client, settings=settings), **given)


class UCXXReplacement(UCXXPayloadTransport):  # type: ignore[misc]  # cosmos-rl is not there when types are checked
    """cosmos-rl's "ucxx" with references that the controller recognises, so that discarded payloads are freed.

    It attaches packers as cosmos-rl does, with [custom] ucxx_prefetch_timeout, ucxx_read_max_attempts and
    ucxx_read_timeout, and by way of `compose_ucxx_transport` gives them a `UCXXStrategy`.
    """

    completion_prefix = PREFIX

    def __init__(self, choices: Choices) -> None:
        self.discarding = Discarding(choices.policy)

    def close_producer(self, producer: Any, *, timeout: float = 5.0) -> None:
        """Close the producer as cosmos-rl does, also while the rollout engine publishes."""
        end_publishing(producer, timeout)
        super().close_producer(producer, timeout=timeout)

    def publish_cleanup_for_discarded(self, *, transfer_ids: list[str], config: Any, redis_client: Any) -> int:
        """Free the payloads of rollouts that the controller drops; returns how many were still there."""
        return self.discarding.free(transfer_ids)


def checked(
    schemas: Sequence[Any],
    overflow: Overflow,
    timeout_s: float | None,
    rollout: Mapping[str, Any] | None,
    policy: Mapping[str, Any] | None,
) -> Choices:
    """Return the arguments of `replace_ucxx`. UsageError if one is wrong."""
    if overflow not in ("block", "error", "overwrite"):
        raise UsageError(f"overflow={overflow!r}: choose 'block', 'error' or 'overwrite'")
    seconds(timeout_s, "timeout_s")
    return Choices(
        schemas=tuple(ring_schema(each) for each in schemas),
        overflow=overflow,
        timeout_s=timeout_s,
        rollout=dict(rollout or {}),
        policy=dict(policy or {}),
    )
