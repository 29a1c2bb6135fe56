"""What goes wrong: each fault begins, lasts for a time, and is mended; then the job has to get on."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from hosts import Host

if TYPE_CHECKING:
    from run import Run

LOSS, DELAY_S = 0.01, 0.2
_CLOCKS_APART_S = 600


class Fault(NamedTuple):
    """Of ``FAULTS``. ``begin`` returns the hosts that are concerned, ``mend`` is given them."""

    about: str
    hold_s: float
    begin: Callable[[Run], list[Host]]
    mend: Callable[[Run, list[Host]], None]
    needs_redis: bool = False


def _one_of_each(run: Run) -> list[Host]:
    rollout = run.choose.choice(run.rollout_hosts)
    return [rollout, run.choose.choice([host for host in run.trainer_hosts if host is not rollout])]


def _cut(run: Run) -> list[Host]:
    hosts = _one_of_each(run)
    hosts[0].pull_cable()
    hosts[1].swallow()
    return hosts


def _mend_cut(run: Run, hosts: list[Host]) -> None:
    hosts[0].plug_in()
    hosts[1].carry()


def _spoilt(loss: float, loss_back: float, delay_s: float) -> Callable[[Run], list[Host]]:
    def begin(run: Run) -> list[Host]:
        hosts = _one_of_each(run)
        for host in hosts:
            host.spoil(loss, loss_back, delay_s)
        return hosts

    return begin


_one_way = _spoilt(1.0, 0.0, 0.0)


def _carry(run: Run, hosts: list[Host]) -> None:
    for host in hosts:
        host.carry()


def _remove(run: Run) -> list[Host]:
    hosts = _one_of_each(run)
    for host in hosts:
        run.remove(host)
    return hosts


def _return(run: Run, hosts: list[Host]) -> None:
    for host in hosts:
        run.populate(host)


def _set_clocks(run: Run) -> list[Host]:
    for host in run.hosts:
        if run.redis is None or host is not run.redis.primary:  # a step of that one moves leases, as the pages say
            run.set_clock(host, run.choose.randint(-_CLOCKS_APART_S, _CLOCKS_APART_S))
    return run.hosts


def _nothing(run: Run, hosts: list[Host]) -> None:
    return


def _promote(run: Run) -> list[Host]:
    assert run.redis is not None
    run.redis.promote()
    return []


def _return_spare(run: Run, hosts: list[Host]) -> None:
    assert run.redis is not None
    run.redis.return_spare()


def _move(run: Run) -> list[Host]:
    assert run.redis is not None
    run.redis.move()
    return []


def _replicate(run: Run, hosts: list[Host]) -> None:
    assert run.redis is not None
    run.redis.replicate()


FAULTS = {
    "cut": Fault(
        "a rollout host's link is down, a trainer host's frames vanish, for longer than leases; then both are back",
        12.0,
        _cut,
        _mend_cut,
    ),
    "one-way": Fault("frames reach these two, and theirs reach no host", 5.0, _one_way, _carry),
    "answers-lost": Fault(
        "the same for 20 s: longer than a trainer waits for what it consumed", 20.0, _one_way, _carry
    ),
    "loss": Fault("a rollout host and a trainer host lose 1 % of all frames", 8.0, _spoilt(LOSS, LOSS, 0.0), _carry),
    "delay": Fault("what they send comes 200 ms late", 8.0, _spoilt(0.0, 0.0, DELAY_S), _carry),
    "half-open": Fault(
        "both are removed: no FIN, no reset, no answer; later there are new hosts with their addresses",
        12.0,
        _remove,
        _return,
    ),
    "returned": Fault(
        "the same, and the new hosts with their addresses and ports are there at once", 0.0, _remove, _return
    ),
    "clocks": Fault("the wall clocks of all hosts are set, each by up to 10 minutes", 4.0, _set_clocks, _nothing),
    "redis-promoted": Fault(
        "Redis is removed with its host, its replica is the primary at the same address",
        5.0,
        _promote,
        _return_spare,
        True,
    ),
    "redis-moved": Fault(
        "Redis is killed, and started from its files on another host, at the same address", 1.0, _move, _replicate, True
    ),
}


def order(seed: int, names: list[str]) -> list[str]:
    """Of one round."""
    return random.Random(seed).sample(names, len(names))
