"""Processes that measure: one JSON line in, one out, and nothing of them is left when the block ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from transport.decoders import json_decoder
from transport.errors import LinkError

END_S = 20.0  # a writer stops its listeners in order, which takes moments
_LINGER_S = 5.0  # a killed writer's listeners may serve on, and keep its standard error open
_ANSWER_S = 120.0  # beyond it something hangs


class BenchProcess:
    """A process that answers lines, by default one of this package. Use in a ``with``.

    Args:
        configuration: its first line; None: the caller tells it one later.
        command: another program, which ``module`` then only names.
    """

    def __init__(self, module: str, configuration: object, command: Sequence[str] = ()) -> None:
        self._what = module.rpartition(".")[2]
        self._process = subprocess.Popen(
            command or [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for this process, which ends the others in order
        )
        self._errors = b""
        self._reading = threading.Thread(target=self._read_errors, daemon=True)
        self._reading.start()
        if configuration is not None:
            self.tell(configuration)

    @property
    def pid(self) -> int:
        """Process id of the process itself."""
        return self._process.pid

    def ended(self, within_s: float = 0.0) -> bool:
        """Return whether it ends within that time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(within_s)
        return self._process.returncode is not None

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        self._errors = self._process.stderr.read()

    def _drain(self) -> None:
        assert self._process.stdout is not None
        while os.read(self._process.stdout.fileno(), 1 << 16):
            pass

    def tell(self, message: object) -> None:
        """Send a line."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # what ended it is in its answer
            self._process.stdin.write(msgspec.json.encode(message) + b"\n")
            self._process.stdin.flush()

    def answer(self) -> Any:
        """Return the next line that it prints.

        Raises:
            LinkError: it ended, or does not answer; with the last line of what it said.
        """
        assert self._process.stdout is not None
        killer = threading.Timer(_ANSWER_S, self._process.kill)
        killer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            killer.cancel()
            killer.join()
        if not line:
            status = self._process.wait()
            self._reading.join(_LINGER_S)
            raise LinkError(f"the measuring {self._what} ended with status {status}: {last_line(self._errors)}")
        return json_decoder(object)(line)

    def ask(self, message: object) -> Any:
        """Send a line and wait for the answer."""
        self.tell(message)
        return self.answer()

    def __enter__(self) -> BenchProcess:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        # A caller that leaves early has not read the last answer: it may fill the pipe and block its writer.
        draining = threading.Thread(target=self._drain, daemon=True)
        draining.start()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        draining.join(_LINGER_S)
        if not draining.is_alive():
            self._process.stdout.close()
        self._reading.join(_LINGER_S)
        if self._process.stderr is not None and not self._reading.is_alive():
            self._process.stderr.close()


def last_line(output: bytes) -> str:
    """Return what a program said last, which mostly is why it ended."""
    lines = output.decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else "it said nothing"


def run_group(
    command: Sequence[str], environment: Mapping[str, str], timeout_s: float, *, tidy_s: float = 0.0
) -> bytes:
    """Return a program's standard output; it and all of its process group end with the call.

    tidy_s: that the group gets after SIGTERM, where it is ended. A compiler removes its unfinished output then.

    Raises:
        LinkError: it failed or took too long; with the last line of what it said.
    """
    with _grouped(command, environment, tidy_s) as process:
        try:
            output, errors = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise LinkError(f"timeout: not finished within {timeout_s:.0f} s") from None
    if process.returncode:
        raise LinkError(f"status {process.returncode}: {last_line(errors)}")
    return output


@contextlib.contextmanager
def _grouped(
    command: Sequence[str], environment: Mapping[str, str], tidy_s: float
) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **environment},
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if tidy_s and process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(tidy_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
