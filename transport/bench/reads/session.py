"""Reads of ours and of the peers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import msgspec

from transport.bench import session
from transport.bench.processes import run_group
from transport.bench.reads import floor, harness, loopback
from transport.bench.registry import FLOOR, PEERS, SCRIPTS, Peer, interpreter, library_path
from transport.bench.result import OURS, Case, Row, Sample
from transport.bench.session import Outcome
from transport.errors import LinkError
from transport.runtime.progress import Progress

_PEER_TIMEOUT_S = 90.0


def peer_cases(
    peers: Iterable[Peer],
    sizes: Sequence[int],
    concurrencies: Sequence[int],
    wires: Sequence[str],
    checksums: Sequence[bool] = (False,),
) -> list[Case]:
    """What is measured of the peers: a read into the consumer's own buffer, at each size and concurrency.

    Only the floor hashes what it receives, as our own reads do where ``checksums`` has True.
    """
    return [
        Case(
            case="ask" if peer.name == FLOOR else "copy" if peer.floor else "read",
            peer=peer.name,
            wire=wire,
            size_bytes=size,
            concurrency=concurrency,
            checksum=checksum,
            payloads=loopback.slots_for(size),
        )
        for peer in peers
        for checksum in (checksums if peer.name == FLOOR else (False,))
        for wire in ([peer.wire] if peer.wire else [wire for wire in wires if wire != "mapped"])
        for size in sizes
        for concurrency in concurrencies
    ]


def run(cases: Sequence[Case], seconds: float, repetitions: int, progress: Progress) -> Outcome:
    """Measure all cases; ``seconds``: of reading for each, all repetitions together."""
    return session.run(cases, repetitions, progress, lambda case: measure(case, seconds / repetitions), Row.of)


def measure(case: Case, seconds: float) -> Sample:
    """One repetition of any case, in fresh processes."""
    if case.peer == OURS:
        return loopback.measure(case, seconds)
    if case.peer == FLOOR:
        return floor.measure(case, seconds)
    return _measure_peer(PEERS[case.peer], case, seconds)


def _measure_peer(peer: Peer, case: Case, seconds: float) -> Sample:
    numbers = (case.size_bytes, case.concurrency, seconds, case.payloads)
    command = [interpreter(peer), harness.__file__, str(SCRIPTS / peer.script), *map(str, numbers)]
    environment = dict(peer.variables)
    if libraries := library_path(peer):
        environment["LD_LIBRARY_PATH"] = ":".join(filter(None, (libraries, os.environ.get("LD_LIBRARY_PATH"))))
    output = run_group(command, environment, _PEER_TIMEOUT_S + 2 * seconds)
    # A peer's library may print, too, before and after.
    lines = [line for line in output.splitlines() if line.startswith(b"{")]
    if not lines:
        raise LinkError("the process printed no results")
    return msgspec.json.decode(lines[-1], type=Sample)
