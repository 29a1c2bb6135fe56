"""Every field of every option struct does something: two values of it, and what is seen with each.

Where a test elsewhere shows the effect it is named. A field without either fails a test; so does a struct of options
that is in no table.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import pkgutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from helpers import PATIENCE_S
from memory_store import MemoryStore
from packers import Packer
from simulated_run import SimulatedRun
from weights_engines import engine

import transport
from transport import BlockingClient, ClientOptions, RingOptions, Schema, ServerOptions, UCXXRolloutMixin
from transport.client.trace import Trace
from transport.errors import TransportError
from transport.rendezvous import Closing, ExitCodes, Reason, Rules
from transport.rendezvous.decisions import Snapshot, decide
from transport.rendezvous.member_states import State
from transport.rendezvous.records import Peer, Phase, Round, Seat, Status
from transport.server.lifetime import Lifetime
from transport.store.directory import Directory
from transport.weights.engine import RingEngine
from transport.weights.options import EngineOptions
from transport.weights.plan.steps import Limits, Step

SCHEMA = Schema.of(step=("int64",))
ROOT = Path(__file__).resolve().parent
STORE = MemoryStore()


class Worker(UCXXRolloutMixin): ...


# --- rollout and trainer --------------------------------------------------------------------------------
@contextlib.contextmanager
def working(**options: Any) -> Iterator[Worker]:
    worker = Worker()
    try:
        worker.setup_ucxx(SCHEMA, slots=2, mode="thread", **options)
        yield worker
    finally:
        worker.cleanup_ucxx()


def of_a_worker(what: str, look: Callable[[Worker], Any]) -> Callable[[Any], Any]:
    def seen(options: Any) -> Any:
        with working(**{what: options}) as worker:
            return look(worker)

    return seen


def overflow(worker: Worker) -> str:
    for step in range(2):
        worker.write_to_buffer({"step": step})
    try:
        worker.write_to_buffer({"step": 2}, timeout_s=0.0)
    except TransportError as error:
        return type(error).__name__
    return "written"


def wire_of_a_read(worker: Worker, **client: Any) -> str:
    ticket = worker.write_to_buffer({"step": 1})
    try:
        with BlockingClient(schemas=[SCHEMA], wire={"shm", "tcp"}, **client) as reader:
            return reader.read(ticket, timeout=5.0).wire
    except TransportError as error:
        return type(error).__name__


def phase_after_100_s(worker: Worker) -> str:
    assert worker._ucxx_server is not None
    lifetime = Lifetime(worker._ucxx_server._config.settings.linger_s)
    lifetime.tick(0.0, writer_alive=False, unread=1, sequence=1)
    return lifetime.tick(100.0, writer_alive=False, unread=1, sequence=1).name


def read_by_a_packer(options: ClientOptions, server: ServerOptions) -> str:
    packer = Packer()
    try:
        with working(server=server) as worker:
            packer.setup_ucxx_packer(schemas=[SCHEMA], wire={"tcp"}, client=options)
            packer.start_prefetch([worker.write_to_buffer({"step": 1})])
            batch = packer.collect_prefetch(PATIENCE_S)
            assert batch is not None
            return "read" if batch.payloads else "not read"
    except TransportError as error:
        return type(error).__name__
    finally:
        packer.cleanup_ucxx_packer()


def client_of(options: ClientOptions) -> Any:
    packer = Packer()
    packer.setup_ucxx_packer(schemas=[SCHEMA], client=options)
    try:
        return packer._packer.client
    finally:
        packer.cleanup_ucxx_packer()


def spans(traced: bool) -> bool:
    """Whether a read is recorded."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Trace(Path(folder) / "trace", "test")
        try:
            read_by_a_packer(ClientOptions(trace=trace if traced else None), ServerOptions(addresses=("127.0.0.1",)))
        finally:
            trace.close()
        return b'"read' in (Path(folder) / "trace").read_bytes()


# --- members of a run -----------------------------------------------------------------------------------
BASE = Rules(least=1, most=3, last_call_s=20.0, join_timeout_s=60.0)


def round_of(phase: Phase, number: int = 2) -> Round:
    return Round(incarnation="x", number=number, phase=phase, term=1, host="a", least=1, most=3)


def decided(open_s: float, seats: int) -> Callable[[Rules], str]:
    def seen(rules: Rules) -> str:
        members = [Seat(round=2, slot=at, member=f"m{at}") for at in range(seats)]
        return type(decide(Snapshot(round_of(Phase.OPEN), members, open_s=open_s), rules)).__name__

    return seen


def with_a_newcomer(rules: Rules) -> str:
    snapshot = Snapshot(
        round_of(Phase.RUNNING, 4), [Seat(round=4, slot=0, member="a")], (Peer("a", 0, ""),), waiting=frozenset({"new"})
    )
    return type(decide(snapshot, rules)).__name__


def of_a_run(look: Callable[[SimulatedRun], Any]) -> Callable[[Rules], Any]:
    def seen(rules: Rules) -> Any:
        with tempfile.TemporaryDirectory() as folder, SimulatedRun(Path(folder), rules) as run:
            return look(run)

    return seen


def states_of_three(run: SimulatedRun) -> list[State]:
    members = run.joined(3)
    run.run(4)
    return [each.state for each in members]


def round_12_s_after_a_death(run: SimulatedRun) -> int:
    members = run.joined(3)
    run.run(4)
    members[2].alive = False
    run.run(12)
    return run.round().number


def after_12_s_without_a_store(run: SimulatedRun) -> State:
    (member,) = run.joined(1)
    run.run(4)
    member.line.down = True
    run.run(12)
    return member.state


def one_is_done_and_gone(run: SimulatedRun) -> str:
    members = run.joined(2)
    run.run(25)
    members[1].do(lambda: members[1].session.say(Status.DONE))
    run.run(1)
    members[1].alive = False
    run.run(15)
    return run.round().phase.name


def longest_wait(run: SimulatedRun) -> float:
    members = run.joined(2)
    run.run(25)
    return max(each.session.wait_s() for each in members if not each.session.is_host)


def exit_code(reason: Reason) -> Callable[[ExitCodes], int]:
    return lambda codes: codes.of(Closing(run="run", reason=reason, round=1, incarnation="i", by="x"))


# --- weights --------------------------------------------------------------------------------------------
def limits_of(step: Step) -> Callable[[Limits], float]:
    return lambda limits: limits.of(step)


def described(options: EngineOptions) -> dict[str, Any]:
    """What a member says of itself to the others."""

    async def prepare() -> dict[str, Any]:
        made = RingEngine("x", address="127.0.0.1", options=options)
        try:
            return dict(await made.prepare())
        finally:
            await made.close()

    return asyncio.run(prepare())


def parents(options: EngineOptions) -> list[Any]:
    """From whom each of four replicas pulls."""

    async def build() -> list[Any]:
        members = [RingEngine("trainer", address="127.0.0.1", options=options)]
        members += [engine(f"r{at}", host=f"h{at}") for at in range(4)]
        try:
            metadata = [await each.prepare() for each in members]
            rows = RingEngine.build_topology(1, 4, metadata)[1]
            return [str(value) for value in rows.values()]
        finally:
            for each in members:
                await each.close()

    return asyncio.run(build())


Seen = Callable[[Any], Any]
Shown = tuple[Seen, dict[Any, Any]] | str
"""What is looked at, and what is seen with two values; or a test that shows it, as ``file::name``."""

OPTIONS: dict[type, dict[str, Shown]] = {
    RingOptions: {
        "slot_bytes": (
            of_a_worker("ring", lambda worker: worker.ring.statistics().slot_capacity_bytes >= 1 << 16),
            {None: False, 1 << 16: True},
        ),
        "overflow": (of_a_worker("ring", overflow), {"error": "RingFullError", "overwrite": "written"}),
        "consumers": (
            of_a_worker("ring", lambda worker: worker.write_to_buffer({"step": 1}).readers),
            {("train",): 1, ("train", "reference"): 2},
        ),
        "sync": "guarantees/test_files.py::test_a_job_whose_rings_lie_in_files_goes_on_where_it_was_killed",
    },
    ServerOptions: {
        "ports": (of_a_worker("server", lambda worker: len(worker._ucxx_server.ports)), {(0,): 1, (0, 0): 2}),
        "addresses": (
            of_a_worker("server", lambda worker: worker.write_to_buffer({"step": 1}).addresses),
            {("10.0.0.7",): ("10.0.0.7",), ("10.0.0.7", "10.0.0.8"): ("10.0.0.7", "10.0.0.8")},
        ),
        "wires": (
            lambda options: of_a_worker("server", wire_of_a_read)(
                msgspec.structs.replace(options, addresses=("127.0.0.1",))
            ),
            {frozenset({"tcp"}): "tcp", frozenset({"shm"}): "shm"},
        ),
        "secret": (
            lambda options: of_a_worker("server", lambda worker: wire_of_a_read(worker, secret=b"between us"))(
                msgspec.structs.replace(options, addresses=("127.0.0.1",))
            ),
            {b"between us": "shm", b"another one": "AuthenticationError"},
        ),
        "linger_s": (of_a_worker("server", phase_after_100_s), {90.0: "STOP", 110.0: "LINGERING"}),
        "directory": (
            of_a_worker("server", lambda worker: Directory(STORE).find(worker.ring.ring_id) is not None),
            {None: False, Directory(STORE): True},
        ),
    },
    ClientOptions: {
        "secret": (
            lambda options: read_by_a_packer(options, ServerOptions(addresses=("127.0.0.1",), secret=b"between us")),
            {b"between us": "read", b"another one": "AuthenticationError"},
        ),
        "device": "packer/test_mixin_device.py::test_a_device_that_cannot_be_used_is_named_at_set_up",
        "device_receive": (
            lambda options: client_of(options)._links._for_device_memory, {"staged": False, "direct": True}
        ),
        "directory": "packer/test_warming.py::test_the_first_batch_finds_its_connections",
        "trace": (lambda options: spans(options.trace is not None), {None: False, "a trace": True}),
    },
    Rules: {
        "least": (of_a_run(lambda run: [each.state for each in _joined(run, 1)]),
                  {1: [State.ACTIVE], 2: [State.SEATED]}),
        "most": (
            of_a_run(states_of_three),
            {2: [State.ACTIVE] * 2 + [State.STANDBY], 3: [State.ACTIVE] * 3},
        ),
        "lease_s": (of_a_run(round_12_s_after_a_death), {6.0: 2, 30.0: 1}),
        "poll_s": (of_a_run(longest_wait), {0.5: 0.5, 1.5: 1.5}),
        "join_timeout_s": (decided(50.0, 0), {40.0: "Close", 60.0: "NoneType"}),
        "last_call_s": (decided(15.0, 1), {10.0: "Complete", 20.0: "NoneType"}),
        "store_patience_s": (of_a_run(after_12_s_without_a_store), {8.0: State.ENDED, 60.0: None}),
        "most_rounds": (
            lambda rules: with_a_newcomer(msgspec.structs.replace(rules, grow=True)),
            {4: "NoneType", None: "OpenNext"},
        ),
        "grow": (with_a_newcomer, {True: "OpenNext", False: "NoneType"}),
        "settle_s": (decided(5.0, 1), {1.0: "Complete", None: "NoneType"}),
        "done_stays": (of_a_run(one_is_done_and_gone), {True: "RUNNING", False: "OPEN"}),
        "host_poll_least_s": (lambda rules: rules.host_poll_s(10), {0.5: 0.5, 2.0: 2.0}),
        "host_poll_most_s": (lambda rules: rules.host_poll_s(100_000), {4.0: 4.0, 7.0: 7.0}),
        "exit_codes": "rendezvous/test_decisions.py::"
        "test_exit_codes_are_those_of_the_reason_and_never_success_by_default",
    },
    ExitCodes: {
        "success": (exit_code(Reason.SUCCESS), {0: 0, 7: 7}),
        "failure": (exit_code(Reason.FAILURE), {1: 1, 8: 8}),
        "no_restart": (exit_code(Reason.NO_RESTART), {93: 93, 9: 9}),
    },
    Limits: {
        "pause": (limits_of(Step.PAUSE), {1.0: 1.0, 2.0: 2.0}),
        "prepare": (limits_of(Step.PREPARE), {1.0: 1.0, 2.0: 2.0}),
        "connect": "weights/test_manager.py::test_a_group_build_that_hangs_ends_at_its_limit",
        "load": (limits_of(Step.LOAD), {1.0: 1.0, 2.0: 2.0}),
        "transfer": (limits_of(Step.TRANSFER), {1.0: 1.0, 2.0: 2.0}),
        "finalize": (limits_of(Step.FINALIZE_REPLICAS), {1.0: 1.0, 2.0: 2.0}),
        "prove": (limits_of(Step.PROVE), {1.0: 1.0, 2.0: 2.0}),
        "resume": (limits_of(Step.RESUME), {1.0: 1.0, 2.0: 2.0}),
        "total": "weights/test_manager.py::test_an_update_that_has_no_time_left_pauses_nobody",
    },
    EngineOptions: {
        "shape": (lambda options: len(set(parents(options)[0].split("'parent'"))) and parents(options),
                  {"star": None, "chain": None}),
        "fanout": (parents, {1: None, 4: None}),
        "host": (lambda options: described(options)["ranks"][0]["host"], {"a": "a", "b": "b"}),
        "wires": "weights/test_manager_deaths.py::test_a_corrupted_bucket_is_never_loaded",
        "secret": "weights/test_engine.py::test_members_with_another_secret_get_nothing",
        "rate": "weights/test_messages.py::test_a_pace_keeps_the_rate_and_saves_nothing_up",
        "stall_s": "weights/test_engine.py::"
        "test_a_child_that_holds_a_bucket_too_long_is_dropped_and_the_others_go_on",
        "join_s": "weights/test_joining.py::test_a_group_that_does_not_come_together_names_who_is_missing",
        "prefix": "weights/test_sharded.py::"
        "test_a_sender_has_room_for_the_buckets_that_are_sent_and_for_no_larger_ones",
    },
}  # fmt: skip
ELSEWHERE = {
    "transport.settings.Settings": "test_setting_effects.py",
    "transport.config.Configuration": "test_setting_effects.py",
    "transport.adapters.transferqueue.rings.Options": "of an adapter: tests/adapters/transferqueue",
}
BASES: dict[type, Any] = {Rules: BASE, EngineOptions: EngineOptions(shape="tree")}


def _joined(run: SimulatedRun, count: int) -> Any:
    members = run.joined(count)
    run.run(25)
    return members


FIELDS = [(kind, field) for kind, fields in OPTIONS.items() for field in fields]


@pytest.mark.ucx
@pytest.mark.parametrize(("kind", "field"), FIELDS, ids=lambda each: getattr(each, "__name__", each))
def test_an_option_does_what_its_meaning_says(kind: type, field: str) -> None:
    shown = OPTIONS[kind][field]
    if isinstance(shown, str):
        file, _, name = shown.partition("::")
        text = (ROOT / file).read_text()
        assert f"def {name}(" in text
        assert field in text
        return
    look, cases = shown
    base = BASES.get(kind, kind())
    seen = [look(msgspec.structs.replace(base, **{field: value})) for value in cases]
    assert repr(seen[0]) != repr(seen[1]), "two values with one effect show nothing"
    assert all(expected in (None, found) for expected, found in zip(cases.values(), seen, strict=True)), seen


def test_every_field_of_every_option_struct_has_an_effect() -> None:
    for kind, fields in OPTIONS.items():
        assert set(fields) == set(kind.__struct_fields__), kind.__name__  # type: ignore[attr-defined]


def test_every_struct_of_options_is_in_the_table() -> None:
    """By its name, or since it checks itself."""
    found = set()
    for module in pkgutil.walk_packages(transport.__path__, "transport."):
        if ".adapters" in module.name or module.name.endswith("__main__"):
            continue
        try:
            names = vars(importlib.import_module(module.name))
        except (ImportError, TransportError):
            continue  # of an optional library
        for name, thing in names.items():
            if isinstance(thing, type) and issubclass(thing, msgspec.Struct) and thing.__module__ == module.name:
                named = name.endswith(("Options", "Rules", "Limits", "Settings", "Configuration", "Codes"))
                if named and not name.startswith("_"):
                    found.add(f"{module.name}.{name}")
    known = {f"{kind.__module__}.{kind.__name__}" for kind in OPTIONS}
    assert found - known - set(ELSEWHERE) == set()
