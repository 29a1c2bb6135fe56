"""The floor of reads over a wire: native/tests/ucx_floor.cpp, a loop on the same UCX library that does the same work.

Unlike UCX's ucx_perftest it asks for each payload, and has a buffer of its own for each payload of a batch, on both
sides, so that the processor's cache holds none of them. It is built from the sources of this project.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import msgspec

from benchmarks.peers.programs import build
from transport.bench.machine import settings_of
from transport.bench.processes import run_group
from transport.bench.result import Case, Timing
from transport.decoders import json_decoder
from transport.errors import LinkError, MissingDependencyError
from transport.runtime.installing import install
from transport.wire import library as ucx
from transport.wires import settings_to_load

_NAME = "ucx_floor"
_TIMEOUT_S = 60.0
_CONNECTIONS = 8  # as many as a client has to one port by default


@cache
def program() -> Path:
    """The program, built where that is needed with the headers of the libucx wheel.

    Raises:
        MissingDependencyError: UCX's headers, the project's sources or cmake are not here.
    """
    wheel = find_spec("libucx")
    if wheel is None or wheel.origin is None:
        raise MissingDependencyError(f"the libucx wheel with UCX's headers is not installed: {install('libucx')}")
    folder = Path(wheel.origin).parent
    given = {"TRANSPORT_UCX_INCLUDE": folder / "include", "TRANSPORT_UCX_LIBRARIES": folder / "lib"}
    return build(_NAME, [f"-D{name}={path}" for name, path in given.items()])


def _library() -> Path:
    """The folder of the UCX that this process has loaded: the wheel's, or one with verbs."""
    path = ucx.library_path()
    if path is None:
        raise MissingDependencyError(f"the loaded libucp was not found: {install('libucx')}")
    return path.parent


def measure(case: Case, seconds: float, run: Callable[..., bytes] = run_group) -> Timing:
    """One repetition, in fresh processes.

    Raises:
        MissingDependencyError: it cannot be built here.
        LinkError: the program failed.
    """
    connections = min(case.concurrency, _CONNECTIONS)
    numbers = (case.size_bytes, case.concurrency, seconds, case.payloads, connections, int(case.checksum))
    settings = {**settings_to_load(), **settings_of(case.wire), "WARN_UNUSED_ENV_VARS": "n"}
    environment = {f"UCX_{name}": value for name, value in settings.items()}
    environment["LD_LIBRARY_PATH"] = str(_library())
    output = run([str(program()), *map(str, numbers)], environment, _TIMEOUT_S + 4 * seconds)
    try:
        return json_decoder(Timing)(output)
    except msgspec.MsgspecError as error:
        raise LinkError(f"{_NAME} printed no results: {error}") from error
