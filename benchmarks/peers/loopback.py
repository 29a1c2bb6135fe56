"""Reads of the peers, for `transport bench loopback --peers`: each in the environment that it needs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from benchmarks.peers import floor
from benchmarks.peers.registry import FLOOR, PEERS, SCRIPTS, Peer, interpreter, library_path
from transport.bench.processes import run_group
from transport.bench.reads.loopback import slots_for
from transport.bench.result import Case, Timing
from transport.decoders import json_decoder
from transport.errors import LinkError

_PEER_TIMEOUT_S = 90.0


def cases(
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
            payloads=slots_for(size),
        )
        for peer in peers
        for checksum in (checksums if peer.name == FLOOR else (False,))
        for wire in ([peer.wire] if peer.wire else [wire for wire in wires if wire != "mapped"])
        for size in sizes
        for concurrency in concurrencies
    ]


def measure(case: Case, seconds: float) -> Timing:
    """Run one repetition of a peer's case, in fresh processes."""
    return floor.measure(case, seconds) if case.peer == FLOOR else _measured(PEERS[case.peer], case, seconds)


def _measured(peer: Peer, case: Case, seconds: float) -> Timing:
    numbers = (case.size_bytes, case.concurrency, seconds, case.payloads)
    command = [interpreter(peer), str(SCRIPTS / "harness.py"), str(SCRIPTS / peer.script), *map(str, numbers)]
    environment = dict(peer.variables)
    if libraries := library_path(peer):
        environment["LD_LIBRARY_PATH"] = ":".join(filter(None, (libraries, os.environ.get("LD_LIBRARY_PATH"))))
    output = run_group(command, environment, _PEER_TIMEOUT_S + 2 * seconds)
    # A peer's library may print, too, before and after.
    lines = [line for line in output.splitlines() if line.startswith(b"{")]
    if not lines:
        raise LinkError("the process printed no results")
    return json_decoder(Timing)(lines[-1])
