"""Prometheus metrics of rings, clients, packers and queues: names ``transport_…`` with their units.

    with Exporter(9400) as exporter:
        exporter.add_ring(ring)
        exporter.add_client("trainer 0", client.statistics)

Nothing is counted for it: a scrape looks at the statistics that rings, clients and queues keep anyway. What cannot be
looked at (closed meanwhile, or its server does not answer) is left out of that scrape.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Self

from transport.claims.deliveries import QueueDepth
from transport.claims.rings import FoundRings
from transport.client.payload import ClientStatistics
from transport.config import Configuration
from transport.errors import BusyPortError, MissingDependencyError
from transport.observe.statistics import PackerStatistics, TrainerStatistics
from transport.ring.buffer import SharedRingBuffer
from transport.runtime.error_text import encodable, error_text
from transport.runtime.installing import install
from transport.wire.addresses import host_port

if TYPE_CHECKING:
    from prometheus_client.core import Metric

log = logging.getLogger(__name__)

# With these a launcher numbers the processes of a host (torchrun, Slurm, Open MPI).
_NUMBERS: Final = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")

_LOOK_S: Final = 1.0  # for what a queue's server has to say; scrapes have 10 s by default

Kind = Literal["counter", "gauge"]


class Family(NamedTuple):
    """One metric: its kind, labels and meaning."""

    kind: Kind
    labels: tuple[str, ...]
    says: str


_OF_RING = ("ring", "segment")
_OF_CLIENT = ("client",)
_OF_QUEUE = ("queue",)

FAMILIES: Final[dict[str, Family]] = {
    "transport_ring_slots": Family("gauge", (*_OF_RING, "state"), "slots by state"),
    "transport_ring_slot_capacity_bytes": Family("gauge", _OF_RING, "payload bytes that a slot holds"),
    "transport_ring_published_total": Family("counter", _OF_RING, "payloads published"),
    "transport_ring_published_bytes_total": Family("counter", _OF_RING, "bytes of the payloads published"),
    "transport_ring_reads_total": Family("counter", _OF_RING, "reads begun, by listeners and on this host"),
    "transport_ring_read_bytes_total": Family("counter", (*_OF_RING, "wire"), "bytes read, by what carried them"),
    "transport_ring_consumed_total": Family("counter", _OF_RING, "payloads consumed, once for each rank"),
    "transport_ring_stale_reads_total": Family("counter", _OF_RING, "reads refused because the payload was gone"),
    "transport_ring_late_acknowledgements_total": Family("counter", _OF_RING, "acknowledgements that came second"),
    "transport_ring_overwritten_total": Family("counter", _OF_RING, "unread payloads lost to overwriting"),
    "transport_ring_discarded_total": Family("counter", _OF_RING, "payloads given up"),
    "transport_ring_aborted_total": Family("counter", _OF_RING, "writes that were rolled back"),
    "transport_ring_full_waits_total": Family(
        "counter", _OF_RING, "waits of writes for a slot, a long one every 0.5 s"
    ),
    "transport_ring_reclaimed_slots_total": Family(
        "counter", (*_OF_RING, "was"), "slots taken back from dead processes, by what they were doing"
    ),
    "transport_ring_listeners": Family("gauge", _OF_RING, "living listener processes"),
    "transport_listener_heartbeat_age_seconds": Family("gauge", (*_OF_RING, "port"), "since a listener's last sweep"),
    "transport_client_reads_total": Family("counter", _OF_CLIENT, "payloads read"),
    "transport_client_read_bytes_total": Family("counter", (*_OF_CLIENT, "wire"), "bytes read, by what carried them"),
    "transport_client_retries_total": Family("counter", _OF_CLIENT, "attempts beyond the first of a read"),
    "transport_client_stale_total": Family("counter", _OF_CLIENT, "reads refused because the payload was gone"),
    "transport_client_failed_reads_total": Family("counter", _OF_CLIENT, "reads that failed for another reason"),
    "transport_client_checksum_failures_total": Family("counter", _OF_CLIENT, "payloads that arrived changed"),
    "transport_client_links_opened_total": Family("counter", _OF_CLIENT, "connections made"),
    "transport_client_warm_up_failures_total": Family(
        "counter", _OF_CLIENT, "connections that could not be made before the first read"
    ),
    "transport_client_links": Family("gauge", (*_OF_CLIENT, "state"), "connections, idle or in use"),
    "transport_client_acknowledgements": Family(
        "gauge", (*_OF_CLIENT, "state"), "acknowledgements that are waiting to go, or for their confirmation"
    ),
    "transport_client_acknowledgements_dropped_total": Family(
        "counter", _OF_CLIENT, "acknowledgements given up, as too many waited for rings out of reach"
    ),
    "transport_client_quarantined_ports": Family("gauge", _OF_CLIENT, "ports that are avoided after a failure"),
    "transport_packer_batches_total": Family("counter", _OF_CLIENT, "batches collected"),
    "transport_packer_payloads_total": Family("counter", (*_OF_CLIENT, "outcome"), "payloads by what became of them"),
    "transport_trainer_wait_seconds_total": Family(
        "counter", _OF_CLIENT, "time for which a trainer's loop has waited for batches and steps"
    ),
    "transport_trainer_steps_total": Family(
        "counter",
        (*_OF_CLIENT, "outcome"),
        "steps: given to the loop, or void, so that their groups came again",
    ),
    "transport_trainer_policy_lag": Family(
        "gauge", _OF_CLIENT, "versions by which the samples of the last step were older than the trainer's, on average"
    ),
    "transport_trainer_groups_total": Family(
        "counter", (*_OF_CLIENT, "outcome"), "groups that were planned, and those that no step got, by reason"
    ),
    "transport_trainer_open_groups": Family("gauge", _OF_CLIENT, "groups that wait for samples"),
    "transport_trainer_surplus_samples_total": Family(
        "counter", _OF_CLIENT, "samples that were left out, since their groups were complete"
    ),
    "transport_queue_deliveries": Family("gauge", (*_OF_QUEUE, "state"), "deliveries under way, by state"),
    "transport_queue_finished_total": Family("counter", (*_OF_QUEUE, "outcome"), "deliveries that ended, by how"),
    "transport_queue_retried_total": Family("counter", _OF_QUEUE, "claims given back"),
    "transport_queue_expired_total": Family("counter", _OF_QUEUE, "leases that ended before their claim did"),
    "transport_queue_nothing_total": Family(
        "counter", (*_OF_QUEUE, "reason"), "looks, every 5 s without a payload, that found why none comes"
    ),
}
"""All metrics; tests compare docs/grafana.json with this list."""

Sample = tuple[str, tuple[str, ...], float]
"""Name of a family, its labels' values, and the number."""


def ring_samples(ring: SharedRingBuffer, now_ns: int) -> Iterator[Sample]:
    """Yield the samples of a ring. Raises ClosedError."""
    labels = (ring.ring_id[:8], ring.name)
    seen = ring.statistics()
    for state in ("free", "writing", "ready", "reading"):
        yield "transport_ring_slots", (*labels, state), getattr(seen, state)
    yield "transport_ring_slot_capacity_bytes", labels, seen.slot_capacity_bytes
    counters = {
        "published": seen.publishes,
        "published_bytes": seen.bytes_published,
        "reads": seen.pins,
        "consumed": seen.consumes,
        "stale_reads": seen.stale_pins,
        "late_acknowledgements": seen.late_finalises,
        "overwritten": seen.overwrites,
        "discarded": seen.discards,
        "aborted": seen.aborts,
        "full_waits": seen.full_waits,
    }
    for name, value in counters.items():
        yield f"transport_ring_{name}_total", labels, value
    for wire, size in seen.bytes_by_wire.items():
        yield "transport_ring_read_bytes_total", (*labels, wire), size
    yield "transport_ring_reclaimed_slots_total", (*labels, "writing"), seen.reclaimed_writing
    yield "transport_ring_reclaimed_slots_total", (*labels, "reading"), seen.reclaimed_reading
    listeners = [owner for owner in ring.native.owners() if owner.alive and owner.port]
    yield "transport_ring_listeners", labels, len(listeners)
    for owner in listeners:
        age_s = max(0.0, (now_ns - owner.heartbeat_ns) / 1e9)
        yield "transport_listener_heartbeat_age_seconds", (*labels, str(owner.port)), age_s


def client_samples(name: str, seen: ClientStatistics) -> Iterator[Sample]:
    """Yield the samples of a client."""
    labels = (name,)
    for wire, size in seen.bytes_by_wire.items():
        yield "transport_client_read_bytes_total", (name, wire), size
    counters = {
        "reads": seen.reads,
        "retries": seen.retries,
        "stale": seen.stale,
        "failed_reads": seen.failed_reads,
        "checksum_failures": seen.checksum_failures,
        "links_opened": seen.links_opened,
        "warm_up_failures": seen.warm_up_failures,
        "acknowledgements_dropped": seen.acks_dropped,
    }
    for counter, value in counters.items():
        yield f"transport_client_{counter}_total", labels, value
    yield "transport_client_links", (name, "idle"), seen.links_idle
    yield "transport_client_links", (name, "in_use"), seen.links_in_use
    yield "transport_client_acknowledgements", (name, "pending"), seen.acks_pending
    yield "transport_client_acknowledgements", (name, "unconfirmed"), seen.acks_unconfirmed
    yield "transport_client_quarantined_ports", labels, len(seen.quarantined_ports)


def packer_samples(name: str, seen: PackerStatistics) -> Iterator[Sample]:
    """Yield the samples of a data packer, its client included."""
    yield "transport_packer_batches_total", (name,), seen.batches
    outcomes = {
        "consumed": seen.consumed,
        "duplicate": seen.duplicates,
        "failed": seen.failed,
        "returned": seen.returned,
        "claim_lost": seen.lost_claims,
    }
    for outcome, value in outcomes.items():
        yield "transport_packer_payloads_total", (name, outcome), value
    yield from client_samples(name, seen.client)


def trainer_samples(name: str, seen: TrainerStatistics) -> Iterator[Sample]:
    """Yield the samples of a trainer, its client included."""
    yield "transport_trainer_wait_seconds_total", (name,), seen.waited_s
    yield "transport_trainer_steps_total", (name, "given"), seen.steps
    yield "transport_trainer_steps_total", (name, "void"), seen.void_steps
    yield "transport_trainer_policy_lag", (name,), seen.lag
    for outcome, value in seen.groups.items():
        yield "transport_trainer_groups_total", (name, outcome), value
    yield "transport_trainer_open_groups", (name,), seen.open_groups
    yield "transport_trainer_surplus_samples_total", (name,), seen.surplus
    yield from packer_samples(name, seen)


def queue_samples(name: str, depth: QueueDepth, reasons: Mapping[str, int]) -> Iterator[Sample]:
    """Yield the samples of a queue."""
    for state in ("ready", "claimed"):
        yield "transport_queue_deliveries", (name, state), getattr(depth, state)
    for outcome in ("done", "discarded", "dead"):
        yield "transport_queue_finished_total", (name, outcome), getattr(depth, outcome)
    yield "transport_queue_retried_total", (name,), depth.retried
    yield "transport_queue_expired_total", (name,), depth.expired
    for reason, value in reasons.items():
        yield "transport_queue_nothing_total", (name, reason), value


class _Look:
    """Look at a queue in a thread of its own: one whose server hangs is left out of a scrape, and delays it little."""

    def __init__(self, queue: FoundRings) -> None:
        self._queue = queue
        self._lock = threading.Lock()
        self._asked: Future[tuple[QueueDepth, Mapping[str, int]]] | None = None  # that of scrapes at the same time

    def __call__(self, name: str) -> Iterator[Sample]:
        with self._lock:
            asked = self._asked
            if asked is None or asked.done():
                asked = Future()
                threading.Thread(
                    target=self._ask, args=(asked,), name="transport metrics of a queue", daemon=True
                ).start()
                self._asked = asked
        try:
            return queue_samples(name, *asked.result(_LOOK_S))
        except TimeoutError:
            return iter(())

    def _ask(self, asked: Future[tuple[QueueDepth, Mapping[str, int]]]) -> None:
        try:
            asked.set_result((self._queue.depth(), self._queue.reasons()))
        except Exception as error:  # of whatever class: the scrape waits for this future
            asked.set_exception(error)


@dataclass
class _SampleSource:
    """A source of samples, under a name that no other source has, and how many exporters it was added to."""

    name: str
    samples: Callable[[str], Iterator[Sample]]
    users: int = 1


class _Port:
    """An HTTP port of this process, and the sources that its exporters have added. Any thread."""

    def __init__(self, port: int, bind: str) -> None:
        prometheus, _ = _prometheus()
        self._sources: dict[object, _SampleSource] = {}
        self._lock = threading.Lock()
        registry = prometheus.CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = prometheus.start_http_server(port, bind, registry)
        except (OSError, OverflowError) as error:
            raise BusyPortError(
                f"metrics on {host_port(bind, port)}: {error}; give each process a metrics_port of its own (0: any "
                "free one), and a metrics_bind of this host"
            ) from error
        self.process = os.getpid()
        self.users: set[Exporter] = set()
        self.number: int = self._server.server_port
        log.info("metrics on http://%s/metrics", host_port(bind, self.number))

    def add(self, of: object, name: str, samples: Callable[[str], Iterator[Sample]]) -> None:
        """Collect from it at each scrape, until it is removed as often as it was added."""
        name = encodable(name)  # a response has no halves of surrogate pairs
        with self._lock:
            if of in self._sources:
                self._sources[of].users += 1
                return
            taken = {source.name for source in self._sources.values()}
            names = (name if number == 1 else f"{name} ({number})" for number in itertools.count(1))
            self._sources[of] = _SampleSource(next(each for each in names if each not in taken), samples)

    def remove(self, of: object) -> None:
        """Collect from it no more, unless it was added again."""
        with self._lock:
            source = self._sources[of]
            source.users -= 1
            if not source.users:
                del self._sources[of]

    def collect(self) -> Iterator[Metric]:
        """All samples now: the interface of prometheus_client."""
        with self._lock:
            sources = list(self._sources.values())
        samples: list[Sample] = []
        for source in sources:
            try:
                samples += source.samples(source.name)
            except Exception as error:  # closed between two scrapes, or failing in whatever way: the others are shown
                log.debug("collecting one source of metrics failed: %s", error_text(error))
        core = _prometheus()[1]
        families: dict[str, Any] = {}
        for name, labels, value in samples:
            family = FAMILIES[name]
            if name not in families:
                make = core.CounterMetricFamily if family.kind == "counter" else core.GaugeMetricFamily
                families[name] = make(name.removesuffix("_total"), family.says, labels=family.labels)
            families[name].add_metric(labels, value)
        yield from families.values()

    def close(self) -> None:
        """Close the port; in a forked child, which has no thread that serves, the descriptor alone."""
        if self.process == os.getpid():
            self._server.shutdown()
        self._server.server_close()
        if self.process == os.getpid():
            self._thread.join()


_ports: dict[tuple[str, int], _Port] = {}
_using = threading.RLock()  # guards `_ports` and their users


class Exporter:
    """An HTTP port that serves the metrics of the sources added to it. Exporters of one process share a port.

    Args:
        port: 0: assigned by the system, and not shared.
        bind: local address.

    Raises:
        MissingDependencyError: prometheus-client is not installed.
        BusyPortError: another process has the port, or the address is none of this host.
    """

    def __init__(self, port: int, bind: str = "127.0.0.1") -> None:
        with _using:
            shared = _ports.get((bind, port))
            if shared is None or shared.process != os.getpid():
                shared = _Port(port, bind)
                _ports[bind, shared.number] = shared
            shared.users.add(self)
        self._shared: _Port | None = shared
        self._key = bind, shared.number
        self._sources: list[object] = []
        self.port: int = shared.number

    def add(self, of: object, name: str, samples: Callable[[str], Iterator[Sample]]) -> None:
        """Collect the samples of an object at each scrape, until `remove` or `close`; not at all after `close`.

        ``samples`` is given the name: numbered, where another object of the process has it.
        """
        if self._shared is not None:
            self._sources.append(of)
            self._shared.add(of, name, samples)

    def remove(self, of: object) -> None:
        """Stop collecting from it, unless another exporter shows it. Idempotent."""
        if self._shared is not None and of in self._sources:
            self._sources.remove(of)
            self._shared.remove(of)

    def add_ring(self, ring: SharedRingBuffer) -> None:
        """Add the states and counters of a ring."""
        self.add(ring, ring.name, lambda _: ring_samples(ring, time.monotonic_ns()))

    def add_client(self, name: str, statistics: Callable[[], ClientStatistics]) -> None:
        """``statistics`` is called from the exporter's thread: `BlockingClient.statistics` may be."""
        self.add(statistics, name, lambda name: client_samples(name, statistics()))

    def add_packer(self, name: str, statistics: Callable[[], PackerStatistics]) -> None:
        """Add a data packer and its client."""
        self.add(statistics, name, lambda name: packer_samples(name, statistics()))

    def add_trainer(self, name: str, statistics: Callable[[], TrainerStatistics]) -> None:
        """Add a trainer and its client."""
        self.add(statistics, name, lambda name: trainer_samples(name, statistics()))

    def add_queue(self, name: str, queue: FoundRings) -> None:
        """Add the rings of a run, which are asked from a thread of their own."""
        self.add(queue, name, _Look(queue))

    def close(self) -> None:
        """Show its sources no more; the last one of a port closes it. Idempotent."""
        shared = self._shared
        if shared is None:
            return
        while self._sources:
            shared.remove(self._sources.pop())
        with _using:
            shared.users.discard(self)
            last = not shared.users
            if last and _ports.get(self._key) is shared:
                del _ports[self._key]
        if last:
            shared.close()
        self._shared = None  # last, so that after an interrupt the next call finishes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def configured_exporter(configuration: Configuration) -> Exporter | None:
    """Return an exporter where ``metrics_port`` is set. None, with a warning, where there can be none.

    Processes that a launcher numbers on their host (``LOCAL_RANK`` …) have the port behind it that their number says.
    """
    port = configuration.metrics_port
    if port is None:
        return None
    numbers = (os.environ.get(name, "") for name in _NUMBERS)
    if port:
        port += next((int(number) for number in numbers if number.isdecimal()), 0)
    try:
        return Exporter(port, configuration.metrics_bind)
    except (MissingDependencyError, BusyPortError) as error:  # the run is worth more than its metrics
        log.warning("no metrics on port %d: %s", port, error)
        return None


def _prometheus() -> tuple[Any, Any]:
    try:
        import prometheus_client
        import prometheus_client.core
    except ImportError as error:
        raise MissingDependencyError(f"metrics need prometheus-client: {install('metrics')}") from error
    return prometheus_client, prometheus_client.core
