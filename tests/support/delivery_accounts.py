"""What the tests of the guarantees share: where a run's queue is, its processes, and the account of its payloads."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from detour import Detour
from helpers import NETWORK, Child, Elsewhere, eventually, parent_of, stop
from patience import PATIENCE
from told import MARKED, PROGRAM, SETTINGS

from transport import FoundRings, open_rings
from transport.claims.deliveries import QueueDepth
from transport.errors import RingNotFoundError
from transport.ring.buffer import SharedRingBuffer
from transport.settings import OperatorSettings, Settings

QUICK = {
    "watchdog_s": 1.5 * PATIENCE, "heartbeat_s": 0.3, "read_timeout_s": 1.0 * PATIENCE, "attempts_per_read": 10,
    "port_quarantine_s": 0.2, "port_quarantine_most_s": 0.4, "linger_s": 60.0, "backoff_most_s": 0.5,
    "connect_timeout_s": 5.0 * PATIENCE, "handshake_timeout_s": 5.0 * PATIENCE,
}  # fmt: skip
OPERATORS = set(OperatorSettings.__struct_fields__)
SHORT_LEASE = {"claim_lease_s": 1.5 * PATIENCE}  # of a trainer that is to fail


class Place:
    """How a run's payloads come: "mapped" or "tcp" (NETWORK) with the claims, or by "tickets" over NETWORK."""

    def __init__(self, kind: str, prefix: str) -> None:
        self.kind = kind
        self.url = f"{'tickets' if kind == 'tickets' else 'rings'}:{prefix}"
        self.prefix = prefix

    def environment(self, **settings: float) -> dict[str, str]:
        """Of the run's processes."""
        wires = {"TRANSPORT_WIRES": "mapped" if self.kind == "mapped" else ",".join(NETWORK)}
        chosen = {**QUICK, **settings}
        operators = {f"TRANSPORT_{name.upper()}": str(chosen.pop(name)) for name in OPERATORS & chosen.keys()}
        return wires | operators | {SETTINGS: json.dumps(chosen)}

    def open(self) -> FoundRings:
        """The queue, for looking and for claims of the test's own."""
        return open_rings(f"rings:{self.prefix}")


def place_of(kind: str) -> Place:
    """A place of this kind, with nothing in it."""
    return Place(kind, f"guarantees-{secrets.token_hex(4)}-")


class Told(Child):
    """A trainer or a writer of told.py."""

    def __init__(
        self,
        kind: str,
        place: Place,
        environment: Mapping[str, str] | None = None,
        /,
        host: Elsewhere | None = None,
        **arguments: object,
    ) -> None:
        self._kind = kind
        environment = dict(environment or place.environment())
        super().__init__(PROGRAM, kind, json.dumps({"url": place.url} | arguments), env=environment, host=host)
        try:
            self.pid, self.wire_version = self.answer()
        except BaseException:
            self.__exit__()
            raise

    def ask(self, step: str, *given: object) -> Any:
        """Do one step; its answer."""
        self.begin(step, *given)
        return self.answer()

    def begin(self, step: str, *given: object) -> None:
        """Do one step, whose `answer` is read later."""
        self.tell(json.dumps([step, *given]))

    def answer(self) -> Any:
        """Of the step that was begun."""
        while not (line := self.line()).startswith(MARKED):
            pass
        return json.loads(line.removeprefix(MARKED))

    def end(self) -> None:
        """Clean up and exit. No payload had other metadata than was written, unless the test has asked about it."""
        if self._kind == "trainer":
            assert self.ask("changed_tickets") == 0
        self.ask("end")
        assert self.wait() == 0

    def stop(self) -> None:
        """SIGSTOP, and wait until it does not run."""
        stop(self.pid)

    def resume(self) -> None:
        """It runs again."""
        os.kill(self.pid, signal.SIGCONT)


class Run:
    """A writer and a trainer of a place, both in processes, and what became of each payload since the last account."""

    def __init__(self, place: Place, *, slots: int = 32, detour: Detour | None = None, **settings: float) -> None:
        """``settings``: of the writer and its listeners, beside QUICK."""
        serving = place.environment(**settings) | (detour.listener if detour else {})
        self.place = place
        self.published: list[int] = []
        self._next = 0
        self._before = dict.fromkeys(states(QueueDepth()), 0)
        with contextlib.ExitStack() as stack:
            self.writer = stack.enter_context(Told("writer", place, serving, slots=slots))
            self.other = stack.enter_context(Told("trainer", place, place.environment(**SHORT_LEASE)))
            self._stack = stack.pop_all()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with self._stack:
            if kind is None and self.writer.process.poll() is None:
                self.writer.end()

    def next_numbers(self, count: int) -> list[int]:
        """Of the payloads that are published next."""
        return list(range(self._next, self._next + count))

    def publish(self, count: int) -> list[int]:
        """Have so many payloads written and published; their numbers."""
        numbers = self.next_numbers(count)
        self.writer.ask("write", self._next, count)
        self._next += count
        self.published += numbers
        return numbers

    def trainer(self, *, wires: str = "", detour: Detour | None = None, url: str = "", **arguments: Any) -> Told:
        """Another one, for a fault to happen to. ``arguments``: of ToldTrainer, and settings."""
        settings = {name: arguments.pop(name) for name in list(arguments) if name in Settings.__struct_fields__}
        environment = self.place.environment(**settings)
        if wires:
            environment["TRANSPORT_WIRES"] = wires
        if detour is not None:
            environment |= detour.trainer
        return Told("trainer", self.place, environment, url=url or self.place.url, **arguments)

    def wait_done(self, count: int) -> None:
        """Until the queue has accepted so many since the last account."""
        with self.place.open() as queue:
            eventually(lambda: queue.depth().done == self._before["done"] + count, f"{count} are done")

    def account(
        self,
        accepted: Iterable[int],
        *,
        lost: Iterable[int] = (),
        twice: Iterable[int] = (),
        reported: Mapping[str, int] | None = None,
    ) -> None:
        """What was published since the last account is what was accepted, and the queue says so.

        ``lost`` was not accepted, ``twice`` was more than once. ``reported``: how many deliveries the queue has ended
        otherwise.
        """
        compare(self.published, accepted, lost=lost, twice=twice)
        done = len(self.published) - len(set(lost))
        wanted = {"done": done, "unfinished": 0, "dead": 0, "discarded": 0, **(reported or {})}

        with self.place.open() as queue:
            wanted = {state: self._before[state] + number for state, number in wanted.items()}
            with contextlib.suppress(AssertionError):
                eventually(lambda: states(queue.depth()) == wanted)
            assert states(queue.depth()) == wanted
        self._before = wanted
        self.published = []


def compare(
    published: Iterable[int], accepted: Iterable[int], *, lost: Iterable[int] = (), twice: Iterable[int] = ()
) -> None:
    """Exactly ``lost`` of what was published was not accepted, and exactly ``twice`` more than once."""
    published, count = set(published), Counter(accepted)
    missing = {number for number in published if not count[number]}
    again = {number for number, times in count.items() if times > 1}
    assert (missing, again, set(count) - published) == (set(lost), set(twice), set())


def states(depth: QueueDepth) -> dict[str, int]:
    """How many deliveries are in which state."""
    names = "done", "unfinished", "dead", "discarded"
    return {name: getattr(depth, name) for name in names}


@contextlib.contextmanager
def looking(segment: str) -> Iterator[SharedRingBuffer]:
    """A ring as one who only looks has it."""
    with SharedRingBuffer.attach(segment, role="observer") as ring:
        yield ring


def gone(segment: str) -> bool:
    """Whether the ring's segment is no more."""
    try:
        SharedRingBuffer.attach(segment, role="observer").close()
    except RingNotFoundError:
        return True
    return False


def kill(*pids: int) -> None:
    """SIGKILL to all of them at once: none runs between the first and the last."""
    for signal_number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal_number)


def served_by(ring: SharedRingBuffer) -> Callable[[], list[int]]:
    """The processes of its listeners that live."""
    return lambda: [owner.pid for owner in ring.native.owners() if owner.alive and owner.port]


class Serving:
    """A writer's segment and the processes that serve it."""

    def __init__(self, writer: Told) -> None:
        self.writer = writer
        self.segment: str = writer.ask("segment")
        with looking(self.segment) as ring:
            self.listeners = served_by(ring)()
        self.supervisor = parent_of(self.listeners[0])

    def kill_all(self) -> None:
        """Writer, supervisor and listeners, at one moment."""
        kill(self.writer.pid, self.supervisor, *self.listeners)
        self.writer.wait()


def consumed(place: Place, count: int) -> list[int]:
    """What a trainer consumes: so many, and then there is nothing left."""
    with Told("trainer", place) as trainer:
        accepted: list[int] = trainer.ask("train", count)
        assert trainer.ask("take", 1, 0.0) == []
        trainer.end()
    return accepted
