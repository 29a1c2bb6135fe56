"""Every public call with every argument replaced by each of many wrong ones: an error that names it, or an answer.

After each scene the payload that was written before it is there once, and `leak_check` finds nothing left behind.
"""

from __future__ import annotations

import inspect
import logging
from pathlib import Path

import api_page
import pytest
from misuse import WRONG, call, each_wrong, quiet, verdict
from misuse_records import ENDS, SCENES

# (scene, call, argument, value): it waits as long as it is told to, for payloads of rings elsewhere or still to come
WAITS = {
    (f"transport.queue.{title}", name, "timeout_s", value)
    for title, name in (("FoundRings", "take"), ("RingQueue", "claim_or_wake"))
    for value in ("2**80", "inf")
}
# what takes a whole job to be valid, or ends the scene; by the reason
NOT_VALID_ALONE = {
    "restore": "NoCheckpointError", "start": "UsageError", "register": "MissingDependencyError",
    "load": "ProtocolError",
}  # fmt: skip

ELSEWHERE = {
    "transport.queue.RedisQueue": "needs a server; its arguments are checked as those of SQLiteQueue",
    "transport.store.RedisStore": "needs a server; its arguments are checked as those of SQLiteStore",
    "transport.queue.TicketQueue": "the contract; each queue has a scene",
    "transport.store.Store": "the contract; each store has a scene",
    "transport.cooldown.CooldownClient": "its calls run an epoch: tests/cooldown/test_cancelled.py, test_client.py",
    "transport.cooldown.ShardedClient": "its calls run an epoch: tests/cooldown",
    "transport.cooldown.CooldownHost": "its calls run an epoch: tests/cooldown/test_coordination.py",
    "UCXXRolloutMixin": "Rollout is it with a constructor, and has a scene",
    "UCXXDataPackerMixin": "Trainer is it with a constructor, and has a scene",
    "ReceivedPayload": "made by reads: tests/client/test_payload.py",
    "transport.packer.prefetch.FetchedBatch": "made by a packer",
    "transport.packer.prefetch.FetchedItem": "made by a packer",
    "transport.testing.ResourceSnapshot": "looks at the process, and has no arguments but a time",
    "transport.testing.mark_descendants": "has no arguments",
    "transport.joined.JoinedPayload": "made by read_joined(), whose scene releases them: tests/joined",
    "transport.joined.join": "read_joined() with await: cancelled in test_misuse_cancelled.py",
    "transport.ring.batch.Batch": "made by claim_batch() and take_batch(): tests/ring/test_batch.py",
    "transport.ring.reading.RingReading": "SharedRingBuffer is it, and has a scene",
    "transport.claims.in_place.TakenPayloads": "made by take_batch(): tests/taking, and cancelled there",
    "transport.runtime.progress.bar": "a `with` that draws: tests/runtime/test_progress.py",
    "transport.runtime.signals.until_stopped": "takes the process's signals: tests/runtime/test_signals.py",
    "transport.weights.RolloutWorker": "the contract; ReferenceWorker has a scene",
    "transport.weights.Source": "the contract",
    "transport.weights.Trainer": "driven by WeightUpdate, which has a scene",
    "transport.weights.Replica": "driven by WeightUpdate, which has a scene",
    "transport.weights.RingEngine": "driven by WeightUpdate, which has a scene; tests/weights/test_engine.py",
    "transport.weights.sharded.engine.ShardEngine": "driven by WeightUpdate, sharded, which has a scene",
    "transport.weights.sharded.replica.ShardRank": "driven by WeightUpdate, sharded, which has a scene",
    "transport.weights.sharded.replica.ShardedReplica": "driven by WeightUpdate, sharded, which has a scene",
    "transport.weights.sharded.meeting.Meeting": "its calls wait for other ranks: tests/weights",
    "transport.adapters.verl.engine_class": "makes a class of verl's: tests/adapters/verl",
    "transport.adapters.verl.register": "registers with verl: tests/adapters/verl",
    "transport.adapters.sglang.load": "gets SGLang's model: tests/weights/test_inference_engines.py",
    "transport.weights.sharded.meeting.of_dtensors": "takes torch's tensors: tests/adapters",
}
NEEDS_A_FRAMEWORK = "transport.adapters."  # and is tested by `make adapters`, where it cannot be imported without
# classes that others hand out; nobody makes them
HANDED_OUT = {"ReadLease", "WriteLease", "ClaimedPayload", "PayloadBatch"}
# arguments that are given by their names in its place
FURTHER = {"take_batch": {"shape"}}
LEFT_OUT = {
    ("UCXXClient", "taking"), ("SharedRingBuffer", "write_raw"), ("SharedRingBuffer", "register"),
    ("transport.queue.FoundRings", "connect"), ("transport.queue.FoundRings", "disconnect"),
    ("transport.queue.FoundRings", "consume"), ("transport.queue.FoundRings", "consume_soon"),
    ("UCXXClient", "hand_in"), ("transport.rendezvous.Rendezvous", "over"), ("UCXXClient", "UCXXClient"),
    ("transport.rendezvous.Rendezvous", "finish"), ("transport.rendezvous.Rendezvous", "restart"),
    ("transport.rendezvous.Rendezvous", "wait_closed"), ("transport.cooldown.Ledger", "newest_checkpoint"),
    ("transport.queue.RingQueue", "check_name"), ("transport.queue.RingQueue", "announce"),
    ("transport.queue.RingQueue", "latest"), ("transport.ring.leases.ReadLease", "register"),
    ("transport.ring.leases.WriteLease", "register"), ("transport.queue.group.GroupQueue", "connect"),
    ("transport.queue.group.GroupQueue", "disconnect"),
}  # fmt: skip


def test_every_public_call_is_misused() -> None:
    made: dict[str, set[str]] = {}
    for title, make in SCENES.items():
        with quiet(), make() as scene:
            made[title.partition(",")[0]] = made.get(title.partition(",")[0], set()) | set(scene.calls)
    together = ("constructors", "functions", "transport.joined", "transport.weights", "transport.adapters")
    everywhere = set().union(*(made.pop(title) for title in (*together, "transport.weights.sharding.shards")))
    missing_frameworks = {
        title for title, thing in api_page.public() if thing is None and title.startswith(NEEDS_A_FRAMEWORK)
    }
    missing = [
        (title, name)
        for title, name in api_page.public_calls()
        if title not in ELSEWHERE
        and name not in HANDED_OUT
        and (title, name) not in LEFT_OUT
        and title not in missing_frameworks
        if name not in made.get(title, set()) and not (name == title.rpartition(".")[2] and name in everywhere)
    ]
    assert not missing, str(missing)


def test_what_has_no_scene_is_public() -> None:
    """A reason for a name that is gone is none."""
    titles = {title for title, _ in api_page.public()}
    assert set(ELSEWHERE) <= titles
    assert {title for title, _ in LEFT_OUT} <= titles


def test_every_argument_of_a_public_call_is_misused() -> None:
    missing = []
    for title, make in SCENES.items():
        with quiet(), make() as scene:
            for name in scene.calls:
                given = {parameter.lstrip("*") for parameter in scene.calls[name]()}
                of_call = inspect.signature(getattr(scene.thing, name)).parameters
                missing += [(title, name, each) for each in of_call if each not in given | FURTHER.get(name, set())]
    assert not missing, str(missing)


@pytest.mark.ucx
@pytest.mark.parametrize("title", SCENES)
def test_wrong_arguments_are_named(
    title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)  # files that are made by name are this test's
    caplog.set_level(logging.CRITICAL)
    faults, count = [], 0
    with quiet(), SCENES[title]() as scene:
        names = [name for name in scene.calls if name not in ENDS]
        for name in names:
            try:
                call(scene, name, scene.calls[name]())
            except Exception as error:
                assert NOT_VALID_ALONE.get(name) == type(error).__name__, f"{name} with valid arguments: {error!r}"
        for name in names:
            for parameter, value, misused in each_wrong(scene, name):
                if (title, name, parameter, value) in WAITS:
                    continue
                count += 1
                try:
                    misused()
                except Exception as error:
                    if fault := verdict(error):
                        faults.append(f"{name}({parameter}={value}): {fault}")
        scene.intact()
    assert faults == []
    assert count >= len(WRONG) or not any(scene.calls[name]() for name in names)
    print(f"{title}: {len(names)} calls, {count} wrong arguments")
