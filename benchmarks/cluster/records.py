"""What a run is told, what it keeps of a process, and what it says of a fault."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple

from hosts import Host
from journal import Reader
from parts import Finding, Part

PAYLOADS_PER_S = 300.0  # of all rollouts together


class Options(NamedTuple):
    """Of the command line."""

    hosts: int
    minutes: float
    faults: list[str]
    seed: int
    finding: Finding
    folder: Path
    per_s: float = PAYLOADS_PER_S


class Episode(NamedTuple):
    """One fault. Times in seconds; None: not within the bound."""

    number: int
    name: str
    hosts: list[str]
    lasted_s: float
    pause_s: float  # longest time without any delivery to anybody, from its beginning until all got on
    others_s: float  # longest time that a trainer which the fault does not concern was without a delivery
    back_s: float | None  # from its end until all concerned hosts had written and had consumed again
    settled_s: float | None  # from its end until all that was published before had come to its end


class Process(NamedTuple):
    """A rollout or trainer that the run has started."""

    host: Host
    part: Part
    process: subprocess.Popen[bytes]
    reader: Reader
    log: Path
