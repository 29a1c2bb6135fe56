"""Rollout: a worker gets a ring, its server, and tickets for its payloads. UCXXRolloutMixin is the same to be mixed in.

with Rollout(schema) as rollout:
    ticket = rollout.write_to_buffer(trajectory, metadata={"reward": 1.0})    # trainers claim it from the ring

A request to stop (hurry.py) ends the wait for room in the ring.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import index
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from transport.claims.lead import Lead
from transport.claims.open import open_rings
from transport.claims.places import OnThisHost
from transport.claims.rings import FoundRings
from transport.config import configuration
from transport.errors import (
    ClosedError,
    RingFullError,
    StopRequestedError,
    UsageError,
)
from transport.group import end_of, in_group, returned_group
from transport.observe.metrics import Exporter, configured_exporter
from transport.packer.options import RingOptions, ServerOptions
from transport.packer.with_block import WithBlock, ends_normally
from transport.ring.buffer import SharedRingBuffer
from transport.ring.states import RingStatistics
from transport.ring.writes import PlannedWrite, Tickets, metadata_of
from transport.runtime import arguments, hurry, spans
from transport.runtime.amounts import count
from transport.runtime.arguments import at_least, seconds
from transport.schema import Schema
from transport.server.server import UCXXServer
from transport.store.directory import Announcement
from transport.ticket import Ticket

if TYPE_CHECKING:
    from opentelemetry.trace import Span

log = logging.getLogger(__name__)

T = TypeVar("T")

_RING, _SERVER = RingOptions(), ServerOptions()  # what setup_ucxx() takes where nothing is said
_LOOK_S = 0.5  # for a request to stop, while a write waits
_GROUPS = 4096
_DRAIN_S, _DRAIN_TOLD_S = 30.0, 2.0
_Ending = tuple[SharedRingBuffer | None, UCXXServer | None, Announcement | None, Exporter | None, FoundRings | None]


class UCXXRolloutMixin(WithBlock):
    """Mixin for a rollout worker. Belongs to the worker's thread.

    `Rollout` is one by itself. A ``with`` cleans up at its end.
    """

    _ucxx_ring: SharedRingBuffer | None = None
    _ucxx_opened: FoundRings | None = None  # by text
    _ucxx_lead: Lead | None = None
    _ucxx_server: UCXXServer | None = None
    _ucxx_announcement: Announcement | None = None
    _ucxx_exporter: Exporter | None = None
    _ucxx_ending: _Ending | None = None  # what a cleanup has begun to end, until all of it has
    _ucxx_groups: dict[str, int]  # samples that were written of groups that are not complete by them
    _ucxx_seen: set[tuple[int, int]]  # readers and publications of samples whose ends `returned` has seen
    _ucxx_named: set[str]  # groups that `returned` has named, and that were not written again since
    _ucxx_ends = True  # whether the end of the ring is that of its data, or an exception's
    _ucxx_told_s: float | None = None  # how long a drain goes on once a signal ends the program; None: all of it

    def setup_ucxx(
        self,
        schema: Schema | None = None,
        rings: str | FoundRings | None = None,
        *,
        slots: int = 64,
        name: str | None = None,
        readers: int = 1,
        ahead: int | None = None,
        mode: Literal["process", "thread"] = "process",
        ring: RingOptions = _RING,
        server: ServerOptions = _SERVER,
    ) -> SharedRingBuffer:
        """Create the ring and serve it. Called again, it cleans up first.

        Args:
            schema, slots, name: of the ring, see `SharedRingBuffer.create`. With a ``name``, a restarted worker takes
                over its old ring with what is unread in it. A name that does not begin as trainers look for it
                (``rings:NAME``; without ``rings`` as ``rings:`` does) gets this beginning, and with a directory that of
                its run: a ring that another run has left is not taken over.
            rings: of the run that this ring belongs to, as text (``"rings:NAME"``, ``"rings+redis://…"``) or as
                `open_rings` gave them; None: those of this host whose trainers were given none either.
            readers: how many ranks read each payload; with ``RingOptions(consumers=…)`` all of theirs.
            ahead: how many training steps may wait in the rings when this rollout begins a group: behind the last
                sample of one, `write` waits until there are no more, so that what is sampled next is trained on before
                it is too old. While no trainer plans steps it waits with its own share of these steps, and a minute
                for each group more. Of a run with a directory, or of this host; None: no limit.
            mode: of the server, see `UCXXServer`; "thread" is for tests.
            ring, server: further choices, for example ``server=ServerOptions(ports=(7001, 7002))``.
                What these leave out of settings, addresses, wires and secret is the operator's configuration
                (config.py), which may also turn on metrics.

        Raises:
            ConfigurationError: the operator's configuration is wrong.

        Where it raises, nothing is set up, and a ring that it had taken over keeps its unread payloads: call it again.
        """
        readers = index(readers)
        ahead = None if ahead is None else at_least(0, ahead, "ahead")
        self._ucxx_ends = False  # another ring follows
        self.cleanup_ucxx()
        self._ucxx_ends = True
        operator = configuration()
        settings = operator.settings if server.settings is None else server.settings
        if server.linger_s is not None:
            settings = msgspec.structs.replace(settings, linger_s=server.linger_s)
        if rings is None and ahead is not None:
            rings = "rings:"
        made: SharedRingBuffer | None = None
        try:
            run = self._ucxx_opened = open_rings(rings) if isinstance(rings, str) else None
            if not isinstance(rings, str):
                run = rings
            places = OnThisHost() if run is None else run.places
            directory = server.directory or places.directory
            name = None if name is None else places.named(name)
            made = SharedRingBuffer.create(
                schema,
                slots=slots,
                slot_bytes=ring.slot_bytes,
                name=name,
                prefix=places.prefix,
                overflow=ring.overflow,
                consumers=readers if ring.consumers is None else ring.consumers,
                file=ring.file,
                sync=ring.sync,
                begins=False,
            )
            made.readers_of(None if readers == 1 else readers)
            self._ucxx_server = UCXXServer(
                made,
                server.ports,
                addresses=server.addresses or operator.addresses or None,
                bind=operator.bind,
                settings=settings,
                secret=operator.secret() if server.secret is None else server.secret,
                wires=operator.server_wires if server.wires is None else server.wires,
                mode=mode,
                log_level=operator.log_level,
                log_format=operator.log_format,
            )
            self._ucxx_server.start()
            if directory is not None:
                self._ucxx_announcement = Announcement(directory, made, self._ucxx_server)
                self._ucxx_announcement.start()
            self._ucxx_exporter = configured_exporter(operator)
            if self._ucxx_exporter is not None:
                self._ucxx_exporter.add_ring(made)
            if run is not None and ahead is not None:
                self._ucxx_lead = Lead(run, made, ahead, readers)
            self._ucxx_groups = {}
            self._ucxx_seen = set()
            self._ucxx_named = set()
            if run is not None:
                run.hand_out(made)
            # From here on it is a rollout, whose end trainers wait for. Assignments, and the last ones: Python handles
            # a signal behind calls, so that none comes between these, or before the return.
            self._ucxx_ring, made.native.begun = made, True
        except BaseException:
            try:
                self.cleanup_ucxx()
            finally:
                if made is not None:
                    made.close(keep_unread=made.native.taken_over)
            raise
        return made

    def cleanup_ucxx(self, drain_s: float = 0.0, *, ends: bool = True) -> None:
        """Stop serving, and close the ring. Any state; idempotent; after an interrupt the next call goes on.

        Trainers learn that this rollout writes nothing more (`FoundRings.finished`), unless an exception ends its
        ``with``.

        Args:
            drain_s: wait this long for unread payloads to be consumed first, and for the trainers that have asked to
                hear the end; for that at most 5 s more.
            ends: False: another process continues in its place, so that this is no end of data.
        """
        if self._ucxx_ending is None:
            self._ucxx_ending = (
                self._ucxx_ring,
                self._ucxx_server,
                self._ucxx_announcement,
                self._ucxx_exporter,
                self._ucxx_opened,
            )
        self._ucxx_ring = self._ucxx_lead = self._ucxx_opened = None  # from here on nothing is written
        self._ucxx_server = self._ucxx_announcement = self._ucxx_exporter = None
        ring, server, announcement, exporter, opened = self._ucxx_ending
        begun = time.monotonic()
        give_up_at = begun + drain_s
        failed: Exception | None = None
        try:
            if ring is not None and ends and self._ucxx_ends:
                try:
                    ring.end_data()  # first: what an interrupt leaves of the rest may be the ring without its close
                except ClosedError:
                    pass
                except Exception as error:
                    failed = error
            try:
                if server is not None:
                    server.close(max(0.0, give_up_at - time.monotonic()), told_s=self._ucxx_told_s)
            finally:  # the ring is closed even if its end cannot be said, or the server fails to stop
                with hurry.while_ending(), contextlib.ExitStack() as stack:  # from here on, however long it drained
                    if opened is not None:
                        stack.callback(opened.close)
                    if ring is not None:
                        stack.callback(lambda: _close(ring, server, time.monotonic() - begun if drain_s > 0 else 0.0))
                    if announcement is not None:
                        stack.callback(announcement.close)  # readers look it up until the last payload is read
                    if exporter is not None:  # what waits for its trainers can be looked at
                        stack.callback(exporter.close)
        except Exception:  # a second try would fail as well
            self._ucxx_ending = None
            raise
        self._ucxx_ending = None
        if failed is not None:
            raise failed

    # --- looking ------------------------------------------------------------------------------------
    @property
    def ring(self) -> SharedRingBuffer:
        """The worker's ring. Raises ClosedError before setup and after cleanup."""
        if self._ucxx_ring is None:
            raise ClosedError("this rollout is closed, or not set up: make a new Rollout, or call setup_ucxx()")
        return self._ucxx_ring

    def ring_statistics(self) -> RingStatistics:
        """States and counters of the ring."""
        return self.ring.statistics()

    @property
    def ports(self) -> tuple[int, ...]:
        """The ports that this worker's listeners have, those chosen for a 0, too. Empty before setup, after cleanup."""
        return () if self._ucxx_server is None else tuple(self._ucxx_server.ports)

    @property
    def metrics_port(self) -> int | None:
        """Port of this worker's metrics; None: ``metrics_port`` is not configured."""
        return None if self._ucxx_exporter is None else self._ucxx_exporter.port

    # --- writing ------------------------------------------------------------------------------------
    def write_to_buffer(
        self,
        trajectory: Mapping[str, Any],
        *,
        metadata: Mapping[str, Any] | None = None,
        policy_version: int | None = None,
        group: str | None = None,
        of: int | None = None,
        tokens: int | None = None,
        deadline_s: float | None = None,
        timeout_s: float | None = None,
    ) -> Ticket:
        """Write one trajectory, a sample of a ``group`` if one is named (`Rollout.write`); its ticket.

        Raises what `SharedRingBuffer.write` raises, and StopRequestedError, if the ring is full and a signal has asked
        the program to stop (`until_stopped`).
        """
        version = arguments.number_or_none(policy_version, "policy_version of write_to_buffer()")
        metadata = in_group(metadata, group, of, tokens)
        ring = self.ring

        def write(metadata: Mapping[str, Any] | None) -> Ticket:
            return self._written(
                lambda timeout_s: ring.write(
                    trajectory,
                    metadata=metadata,
                    policy_version=version,
                    deadline_s=deadline_s,
                    timeout_s=timeout_s,
                ),
                timeout_s,
            )

        give_up = None if timeout_s is None else time.monotonic() + timeout_s
        if spans.tracer() is None:
            ticket = write(metadata)
        else:
            with spans.span("transport.write", "PRODUCER", payloads=1) as of_write:
                ticket = _carrying(of_write, [metadata], lambda each: write(*each))
        self._count_group(group, of, 1)
        self._wait_behind(group, [ticket], give_up)
        return ticket

    def write_many_to_buffer(
        self,
        trajectories: Iterable[Mapping[str, Any]],
        *,
        metadata: Mapping[str, Any] | Iterable[Mapping[str, Any] | None] | None = None,
        policy_version: int | None = None,
        group: str | None = None,
        of: int | None = None,
        tokens: Sequence[int] | None = None,
        deadline_s: float | None = None,
        timeout_s: float | None = None,
    ) -> Tickets:
        """Write many trajectories in one call, which costs a fraction of as many `write_to_buffer`; their tickets.

        A ``group`` is that of all; ``tokens`` has a number for each.

        Raises what `SharedRingBuffer.write_many` raises: with RingFullError, ``written`` has the tickets of those
        payloads that were written. StopRequestedError (see `write_to_buffer`) has them, too, and so has whatever else
        ends the call midway.
        """
        version = arguments.number_or_none(policy_version, "policy_version of write_many_to_buffer()")
        give_up = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        trajectories = list(trajectories)
        each_has: Sequence[Mapping[str, Any] | None] = metadata_of(metadata, len(trajectories))
        if group is not None or of is not None or tokens is not None:
            each_has = _in_group(each_has, group, of, tokens)

        def plan(metadata: Sequence[Mapping[str, Any] | None]) -> PlannedWrite:
            return self.ring.plan_many(trajectories, metadata=metadata, policy_version=version, deadline_s=deadline_s)

        with spans.span("transport.write", "PRODUCER", payloads=len(trajectories)) as of_write:
            batch = _carrying(of_write, each_has, plan)

            def write_some() -> None:
                self._written(batch.write, None if timeout_s is None else max(give_up - time.monotonic(), 0.0))

            try:
                tickets = batch.write_all(write_some)
            finally:
                self._count_group(group, of, len(batch.published))
        self._wait_behind(group, tickets if group is None else tickets[-1:], give_up)
        return tickets

    def _count_group(self, group: str | None, of: int | None, count: int) -> None:
        """Count samples of a group, until it has them all; of those that others complete the last ones are kept."""
        if group is None:
            return
        self._ucxx_named.discard(group)
        count += self._ucxx_groups.pop(group, 0)
        if of is None or count < of:
            self._ucxx_groups[group] = count
            if len(self._ucxx_groups) > _GROUPS:
                del self._ucxx_groups[next(iter(self._ucxx_groups))]

    def end_group(self, group: str, *, of: int | None = None, timeout_s: float | None = None) -> Ticket:
        """Say that no more samples of this group come: for a group that was written without ``of``, or stays short.

        It takes a slot, and waits for one as a write does. Trainers that take batches never see it.

        Args:
            of: how many samples the group has, where several rollouts have written some; None: a trainer waits for
                those of this rollout, and a second for others.
        """
        give_up = None if timeout_s is None else time.monotonic() + timeout_s
        ring, says = self.ring, end_of(group, of, self._ucxx_groups.get(group))
        ticket = self._written(lambda timeout_s: ring.mark(says, timeout_s=timeout_s), timeout_s)
        self._ucxx_groups.pop(group, None)
        self._wait_behind(group, [ticket], give_up)
        return ticket

    def wait_turn(self, timeout_s: float | None = None) -> bool:
        """Wait until at most ``ahead`` training steps wait in the rings: what is sampled now is trained on in time.

        `write` does so behind the last sample of each group. Call it before sampling where several samples are made at
        a time, or where several rollouts write a group.

        Returns:
            False: the time is over, or a signal has asked the program to stop.
        """
        seconds(timeout_s, "timeout_s of wait_turn()")
        return self._ucxx_lead is None or self._ucxx_lead.wait(timeout_s)

    def _wait_behind(self, group: str | None, last: Sequence[Ticket], give_up: float | None) -> None:
        """Wait for the next turn, unless more samples of this group come. Without a group each payload is one."""
        if self._ucxx_lead is not None and (group is None or group not in self._ucxx_groups):
            self._ucxx_lead.completed(last)
            self.wait_turn(None if give_up is None else max(0.0, give_up - time.monotonic()))

    def returned(self) -> list[str]:
        """Return the groups that a trainer has returned since the last call: too old, to be made again.

        With ``Trainer.steps(stale="return")``. Every rollout with samples of such a group gets its name. Ask once for
        each group that is written: a ring remembers as many samples that were not trained on as it has slots, twice
        (256 to 8192). After a take-over of the ring the names come anew, also those of groups that were made again
        before.
        """
        ends = sorted(self.ring.native.failures(), key=lambda end: end[-1])
        found = {(rank, sequence): returned_group(reason) for _, _, rank, *_, reason, _, sequence in ends}
        new = {name: None for end, name in found.items() if name and end not in self._ucxx_seen}
        names, seen = [name for name in new if name not in self._ucxx_named], set(found)
        named = {name for name in found.values() if name in self._ucxx_named or name in new}
        # Last, and without a call between them and the return: an interrupt leaves the names for the next call.
        self._ucxx_seen, self._ucxx_named = seen, named
        return names

    def _written(self, write: Callable[[float], T], timeout_s: float | None) -> T:
        """Return what ``write`` gives, which is called again while the ring is full, and until the time is over."""
        now = time.monotonic()
        overflow = self.ring.overflow
        give_up = now if overflow == "error" else float("inf") if timeout_s is None else now + timeout_s
        while True:
            try:
                return write(_wait_s(give_up))
            except RingFullError as full:
                _check_wait(full, give_up)


def _carrying(
    of_write: Span | None,
    metadata: Sequence[Mapping[str, Any] | None],
    write: Callable[[Sequence[Mapping[str, Any] | None]], T],
) -> T:
    """Write tickets that carry the context of a span, or, where they have no room for it, without."""
    if of_write is not None:
        with contextlib.suppress(UsageError):
            return write([spans.with_context(each, of_write) for each in metadata])
    return write(metadata)


def _in_group(
    metadata: Sequence[Mapping[str, Any] | None], group: str | None, of: int | None, tokens: Sequence[int] | None
) -> list[Mapping[str, Any] | None]:
    """Return the metadata of each of the samples of a group."""
    weights: Sequence[int | None] = [None] * len(metadata) if tokens is None else tokens
    if len(weights) != len(metadata):
        raise UsageError(f"{len(weights)} numbers of tokens for {len(metadata)} payloads")
    return [in_group(each, group, of, weight) for each, weight in zip(metadata, weights, strict=True)]


def _close(ring: SharedRingBuffer, server: UCXXServer | None, waited_s: float) -> None:
    native = ring.native
    if not native.closed and not native.file and ring.overflow != "overwrite":  # there payloads may go unread
        given_up = native.unread + (0 if server is None else server.given_up)
        if given_up:
            log.warning(
                "ring %s is closed, and gives up %s that no trainer has consumed; %s",
                ring.ring_id[:8],
                count(given_up, "payload"),
                f"it waited {waited_s:.1f} s for the trainers, and a greater drain_s= waits longer"
                if waited_s
                else "stop inside until_stopped(), and close with drain_s, to wait for the trainers",
            )
    ring.close()


def _wait_s(give_up: float) -> float:
    """Return the time to wait for room before the next look at whether the wait is over."""
    return 0.0 if hurry.stop_requested() else min(max(give_up - time.monotonic(), 0.0), _LOOK_S)


def _check_wait(full: RingFullError, give_up: float) -> None:
    """Raise ``full`` where the time is over, StopRequestedError where a stop was requested."""
    if hurry.stop_requested():
        raise StopRequestedError(f"{full}. The program was asked to stop: write no more, and close") from None
    if time.monotonic() >= give_up:
        raise full


class Rollout(UCXXRolloutMixin):
    """A rollout worker that is set up as it is made; `UCXXRolloutMixin` has its methods.

    Args:
        drain_s: at the end of its ``with``, wait this long for payloads that are not consumed yet: they are lost
            with the ring, unless that lies in a file. Not where an exception other than StopRequestedError ends it.
            `close` waits for its own ``drain_s``. Default: 30 s, but until 2 s after the signal where one ends the
            program, also during this wait: the trainers may be ending, too. That is for a ``with`` inside
            `until_stopped`, whose end forgets the signal.

    The other arguments, and the errors, are those of `UCXXRolloutMixin.setup_ucxx`.
    """

    def __init__(
        self,
        schema: Schema | None = None,
        rings: str | FoundRings | None = None,
        *,
        slots: int = 64,
        name: str | None = None,
        readers: int = 1,
        ahead: int | None = None,
        mode: Literal["process", "thread"] = "process",
        ring: RingOptions = _RING,
        server: ServerOptions = _SERVER,
        drain_s: float | None = None,
    ) -> None:
        seconds(drain_s, "drain_s")
        if drain_s is not None and drain_s < 0:
            raise UsageError(f"drain_s={drain_s}; give the seconds that its end waits for the trainers")
        self._drain_s = drain_s
        self.setup_ucxx(
            schema,
            slots=slots,
            name=name,
            rings=rings,
            readers=readers,
            ahead=ahead,
            mode=mode,
            ring=ring,
            server=server,
        )

    def write(
        self,
        fields: Mapping[str, Any],
        *,
        version: int | None = None,
        group: str | None = None,
        of: int | None = None,
        tokens: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        deadline_s: float | None = None,
        timeout_s: float | None = None,
    ) -> Ticket:
        """Write one payload; waits while the ring is full. Returns its ticket, which no trainer of the rings needs.

        Args:
            fields: of the schema, by name; without a schema any, described by the ticket.
            version: of the policy that made the payload; trainers discard what is older than their ``max_age``.
            group: which the payload is a sample of, such as its prompt: a name of at most 128 bytes, that no other
                group has. Its samples may lie in several rings.
            of: how many samples the group has; None: `end_group` says when there are no more.
            tokens: the sample's weight when micro-batches are balanced; None: its bytes.
            metadata: small values that travel with the ticket.
            deadline_s: seconds after which the payload is not handed out any more.
            timeout_s: longest wait for a free slot; None: no limit.

        Raises:
            RingFullError: no slot became free in time.
            StopRequestedError: the ring is full and a signal has asked the program to stop (`until_stopped`).
            UsageError: ``of`` or ``tokens`` without a group, or another argument makes no sense; nothing was written.
            SchemaError, PayloadTooLargeError and the like: nothing was written.
        """
        return self.write_to_buffer(
            fields,
            metadata=metadata,
            policy_version=version,
            group=group,
            of=of,
            tokens=tokens,
            deadline_s=deadline_s,
            timeout_s=timeout_s,
        )

    def __repr__(self) -> str:
        return "<Rollout closed>" if self._ucxx_ring is None else f"<Rollout {self._ucxx_ring!r}>"

    def close(self, drain_s: float = 0.0, *, ends: bool = True) -> None:
        """Do the same as `cleanup_ucxx`."""
        if ends:
            self.cleanup_ucxx(drain_s)
        else:
            self.cleanup_ucxx(drain_s, ends=False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if ends_normally(kind) and self._drain_s is not None:
                self.close(self._drain_s)
            elif ends_normally(kind):
                self._ucxx_told_s = _DRAIN_TOLD_S  # the signal may also come during the drain
                self.close(_drain_s())
        finally:
            self._ucxx_told_s = None
            super().__exit__(kind, error, trace)


def _drain_s() -> float:
    return min(_DRAIN_S, max(0.0, hurry.signalled_at() + _DRAIN_TOLD_S - time.monotonic()))
