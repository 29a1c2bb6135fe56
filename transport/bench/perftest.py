"""ucx_perftest of the libucx wheel, with error handling and our settings: what UCX itself does on this machine.

One in flight is tag_lat: a message one way, without a request. More are tag_bw with as many sends outstanding. It does
not look at what it received.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from transport.bench.machine import settings_of
from transport.bench.processes import run_group
from transport.bench.result import Case, Sample
from transport.errors import LinkError, MissingDependencyError
from transport.runtime.installing import install

_TIMEOUT_S = 60.0
_LISTENING = "0A"
_FIRST_LOOK = 16  # messages that tell how many fill the seconds
_FEWEST = 20
_MOST = 1_000_000
_PORTS_TRIED = 3  # a free port is found before the server takes it, and another program may be faster


def measure(case: Case, seconds: float) -> Sample:
    """One repetition.

    Raises:
        MissingDependencyError: the wheel is not installed, or has no such program.
        LinkError: the program failed.
    """
    program = _program()
    first = _run(program, case, _FIRST_LOOK, 50)
    messages = int(max(_FEWEST, min(_MOST, seconds / 2 / (first["average_us"] * 1e-6))))
    half = _run(program, case, messages, 50)
    most = _run(program, case, messages, 99)
    alone = case.concurrency == 1
    return Sample(
        gb_per_s=case.size_bytes / half["average_us"] / 1e3,
        # Completions of a window come in bursts, and most of them tell no more than that.
        us_p50=half["percentile_us"] if alone else half["average_us"],
        us_p99=most["percentile_us"],
        reads=2 * messages,
        verified=False,
        note="one way, no request" if alone else "µs p50: mean time per message",
    )


class _NotListening(LinkError):
    """The server did not take its port."""


def _program() -> Path:
    found = importlib.util.find_spec("libucx")
    for home in (found.submodule_search_locations or []) if found else []:
        program = Path(home) / "bin" / "ucx_perftest"
        if program.exists():
            return program
    raise MissingDependencyError(f"the libucx wheel with ucx_perftest is not installed: {install('perftest')}")


def _run(program: Path, case: Case, messages: int, percentile: int) -> dict[str, float]:
    for _ in range(_PORTS_TRIED - 1):
        with contextlib.suppress(_NotListening):
            return _once(program, case, messages, percentile)
    return _once(program, case, messages, percentile)


def _once(program: Path, case: Case, messages: int, percentile: int) -> dict[str, float]:
    port = _free_port()
    environment = {f"UCX_{name}": value for name, value in settings_of(case.wire).items()}
    environment["UCX_WARN_UNUSED_ENV_VARS"] = "n"
    environment["LD_LIBRARY_PATH"] = str(program.parent.parent / "lib")
    common = [str(program), "-e", "-p", str(port)]
    test = ["-t", "tag_lat"] if case.concurrency == 1 else ["-t", "tag_bw", "-O", str(case.concurrency)]
    amount = ["-s", str(case.size_bytes), "-n", str(messages), "-w", str(min(messages, 100))]
    with _server(common, environment, port):
        command = [*common, "127.0.0.1", *test, *amount, "-f", "-v", "-R", str(percentile)]
        output = run_group(command, environment, _TIMEOUT_S)
    names, values = (line.split(",") for line in output.decode().strip().splitlines()[-2:])
    found = dict(zip(names, map(float, values), strict=True))
    return {
        "percentile_us": next(value for name, value in found.items() if "percentile" in name),
        "average_us": next(value for name, value in found.items() if name.startswith(("overall_lat", "overall_over"))),
    }


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


@contextlib.contextmanager
def _server(command: list[str], environment: dict[str, str], port: int) -> Iterator[None]:
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, **environment}
    )
    try:
        _until_listening(process, port)
        yield
    finally:
        process.kill()
        process.wait()


def _until_listening(process: subprocess.Popen[bytes], port: int) -> None:
    """By the kernel's table: connecting to find out would be taken for the measurement."""
    wanted = f":{port:04X}"
    give_up = time.monotonic() + 10
    while time.monotonic() < give_up and process.poll() is None:
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[1].endswith(wanted) and fields[3] == _LISTENING:
                    return
        time.sleep(0.01)
    raise _NotListening("the server of ucx_perftest does not listen")
