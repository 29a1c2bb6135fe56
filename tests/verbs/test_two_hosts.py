"""`Rollout` on one host and `Trainer` on the other, over RDMA: every payload once, whatever fails on the way."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import told
from delivery_accounts import SHORT_LEASE, Place, Told, compare
from helpers import Elsewhere, eventually
from second_guest import HERE, THERE, SecondGuest, after_packets, link_down, packets
from two_hosts import second_interface

pytestmark = [pytest.mark.verbs, pytest.mark.ucx, pytest.mark.slow]

COUNT, SLOTS = 24, 32
_PACKET = 4096
PLACE = Place("tcp", "verbs-")


class Sides(NamedTuple):
    """Where the rollout and the trainer are; None: in this guest."""

    rollout: Elsewhere | None
    trainer: Elsewhere | None


@pytest.fixture(params=["from there", "from here"])
def sides(request: pytest.FixtureRequest, there: SecondGuest) -> Sides:
    return Sides(there, None) if request.param == "from there" else Sides(None, there)


def kill(host: Elsewhere | None, *pids: int) -> None:
    """SIGKILL to processes of a host."""
    words = ["kill", "-KILL", *map(str, pids)]
    subprocess.run(words if host is None else host.command(*words), check=True)


def environment(wires: str) -> dict[str, str]:
    """Of a process that may use these wires; "": whatever is best."""
    return PLACE.environment(**SHORT_LEASE) | {"TRANSPORT_WIRES": wires}


class Job:
    """A rollout on one host, and the place where trainers on the other find it."""

    def __init__(self, stack: contextlib.ExitStack, sides: Sides, wires: str) -> None:
        self._stack, self._sides, self._wires = stack, sides, wires
        address = HERE if sides.rollout is None else THERE
        self.rollout = stack.enter_context(
            Told("writer", PLACE, environment(""), host=sides.rollout, slots=SLOTS, address=address)
        )
        [port] = self.rollout.ask("ports")
        self._url = f"rings://{address}:{port}"
        self.published = 0
        self.publish()

    def publish(self) -> None:
        """Write as many payloads as a trainer takes at once."""
        self.rollout.ask("write", self.published, COUNT)
        self.published += COUNT

    def trainer(self) -> Told:
        """Another one."""
        made = Told("trainer", PLACE, environment(self._wires), host=self._sides.trainer, url=self._url)
        return self._stack.enter_context(made)

    def account(self, accepted: list[int]) -> dict[str, int]:
        """Everything was accepted once, and no slot is held; the bytes that were sent, by wire."""
        compare(range(self.published), accepted)
        eventually(lambda: self.rollout.ask("ring")["free"] == SLOTS, "no slot is held")
        ring: dict[str, int] = self.rollout.ask("ring")
        self.rollout.end()
        return ring


@contextlib.contextmanager
def job(sides: Sides, wires: str = "rdma") -> Iterator[Job]:
    with contextlib.ExitStack() as stack:
        yield Job(stack, sides, wires)


@pytest.mark.parametrize("wires", ["rdma", pytest.param("", id="auto"), "rdma,tcp", "tcp"])
def test_payloads_cross_over_the_best_wire(sides: Sides, wires: str) -> None:
    with job(sides, wires) as run:
        trainer, begun = run.trainer(), packets()
        accepted = trainer.ask("train", COUNT)
        wire = "tcp" if wires == "tcp" else "rdma"
        assert (packets() - begun >= COUNT * told.SIZE / _PACKET) == (wire == "rdma")
        trainer.end()
        sent = run.account(accepted)
        assert sent["bytes_rdma" if wire == "rdma" else "bytes_tcp"] >= COUNT * told.SIZE
        assert "bytes_tcp" not in sent or wire == "tcp"


def test_an_address_that_both_hosts_have_is_no_way_between_them(sides: Sides, there: SecondGuest) -> None:
    """A trainer without RDMA, and a rollout whose host has it."""
    with (
        second_interface("10.9.2.15/24", lambda *words: ["ip", *words]),
        second_interface("10.9.2.15/24", lambda *words: there.command("ip", *words)),
        job(sides, "tcp") as run,
    ):
        trainer = run.trainer()
        accepted = trainer.ask("train", COUNT)
        trainer.end()
        assert run.account(accepted)["bytes_tcp"] >= COUNT * told.SIZE


def test_what_a_trainer_was_reading_when_it_was_killed_is_read_by_another_one(sides: Sides) -> None:
    with job(sides) as run:
        victim = run.trainer()
        victim.begin("take", COUNT)
        after_packets(100)
        kill(sides.trainer, victim.pid)
        other = run.trainer()
        accepted = other.ask("train", COUNT)
        other.end()
        run.account(accepted)


def test_what_a_killed_listener_was_sending_is_read_from_its_successor(sides: Sides) -> None:
    with job(sides) as run:
        trainer = run.trainer()
        trainer.begin("take", COUNT)
        after_packets(100)
        kill(sides.rollout, *run.rollout.ask("listeners"))
        trainer.answer()
        accepted = trainer.ask("consume")
        accepted += trainer.ask("train", COUNT - len(accepted))
        trainer.end()
        run.account(accepted)


@pytest.mark.parametrize("seconds", [2, 30])
def test_a_link_that_is_away_for_a_while_loses_nothing(sides: Sides, seconds: float) -> None:
    with job(sides) as run:
        trainer = run.trainer()
        trainer.begin("train", COUNT)
        after_packets(100)
        with link_down():
            threading.Event().wait(seconds)  # the fault, not a wait for something
        accepted = trainer.answer()
        trainer.end()
        run.account(accepted)


def test_a_link_that_flaps_loses_nothing(sides: Sides) -> None:
    """For VERBS_CHAOS_S, in which the link is away for up to 6 s and there for up to 30 s."""
    ends_at, chance = time.monotonic() + float(os.environ.get("VERBS_CHAOS_S", "60")), random.Random(1)
    over, flaps = threading.Event(), 0

    def flap() -> None:
        nonlocal flaps
        while not over.wait(chance.uniform(1, 30)):  # a connection takes seconds where the guest is emulated
            with link_down():
                over.wait(chance.uniform(0.1, 6))
            flaps += 1

    with job(sides) as run:
        trainer, accepted = run.trainer(), []
        flapping = threading.Thread(target=flap)
        flapping.start()
        try:
            while True:
                accepted += trainer.ask("train", COUNT)
                if time.monotonic() > ends_at:
                    break
                run.publish()
        finally:
            over.set()
            flapping.join()
        trainer.end()
        run.account(accepted)
    print(f"{len(accepted)} payloads, {flaps} times without a link")
