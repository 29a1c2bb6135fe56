"""A run: every case once in each repetition, so that what disturbs the machine meanwhile meets all alike."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from transport.bench import perftest
from transport.bench.processes import run_group
from transport.bench.reads import floor, harness, loopback
from transport.bench.registry import FLOOR, PEERS, PERFTEST, SCRIPTS, Peer, interpreter, library_path
from transport.bench.result import OURS, Case, Row, Sample
from transport.bench.units import show_size
from transport.errors import LinkError, TransportError
from transport.runtime.progress import Progress

_PEER_TIMEOUT_S = 90.0


class Outcome(NamedTuple):
    """Rows; our own cases that failed, and peers that have no rows, each with the reason."""

    rows: list[Row]
    failed: list[str]
    skipped: dict[str, str]


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
            case=_what(peer, concurrency),
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


def _what(peer: Peer, concurrency: int) -> str:
    if peer.name == PERFTEST:
        return "tag_lat" if concurrency == 1 else "tag_bw"
    if peer.name == FLOOR:
        return "ask"
    return "copy" if peer.floor else "read"


def run(cases: Sequence[Case], seconds: float, repetitions: int, progress: Progress) -> Outcome:
    """Measure all cases; one that fails is left out from then on, of a peer all of its cases.

    Args:
        seconds: of reading for each case, all repetitions together.
    """
    samples: dict[Case, list[Sample]] = {case: [] for case in cases}
    outcome = Outcome([], [], {})
    done = size = 0
    progress(0, repetitions * len(cases), 0)
    for _ in range(repetitions):
        for case in list(samples):
            if case.peer in outcome.skipped:
                continue
            try:
                sample = measure(case, seconds / repetitions)
            except TransportError as error:
                if case.peer == OURS:
                    outcome.failed.append(f"{_named(case)}: {error}")
                    del samples[case]
                else:
                    outcome.skipped[case.peer] = _why(case, error)
            else:
                samples[case].append(sample)
                size += sample.reads * case.size_bytes
            done += 1
            progress(done, repetitions * len(cases), size)
    outcome.rows.extend(Row.of(case, found) for case, found in samples.items() if case.peer not in outcome.skipped)
    return outcome


def _named(case: Case) -> str:
    return f"{case.case} over {case.wire}, {show_size(case.size_bytes)}, {case.concurrency} in flight"


def _why(case: Case, error: TransportError) -> str:
    return f"{_named(case)}: {error}" if isinstance(error, LinkError) else str(error)


def measure(case: Case, seconds: float) -> Sample:
    """One repetition of any case, in fresh processes."""
    if case.peer == OURS:
        return loopback.measure(case, seconds)
    if case.peer == PERFTEST:
        return perftest.measure(case, seconds)
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
