"""Traces the phases of reads for chrome://tracing and Perfetto: one span per phase, in the Chrome trace format.

    with Trace(path, "trainer 0") as trace:
        client = UCXXClient(trace=trace)

Spans of one read share an id, so that simultaneous reads are shown below each other. Times are the kernel's monotonic
clock in microseconds, the same for every process of a host: `merge` combines the files of several processes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self, TextIO

import msgspec

from transport.errors import UsageError
from transport.ticket import Ticket

log = logging.getLogger(__name__)


def key_of(ticket: Ticket) -> str:
    """Identifies the read in traces and log lines: ring/slot/generation."""
    return "/".join(map(str, ticket.identity))


class Trace:
    """Writes spans to a file as they end. Any thread may call it. What a killed process had written remains readable.

    A file that cannot be written any more, as on a full disk, ends the trace with one line in the log only.
    Making one raises OSError.
    """

    def __init__(self, path: Path | str, process_name: str) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._file: TextIO | None = Path(path).open("w", encoding="utf-8")  # noqa: SIM115  # closed by close()
        self._file.write("[\n")
        self._put({"ph": "M", "name": "process_name", "args": {"name": process_name}})

    def span(self, name: str, key: str, begun: float, **about: Any) -> None:
        """A phase of the read ``key`` that ends now.

        Args:
            begun: reading of ``time.monotonic()``.
            about: shown beside it, such as port, attempt, bytes or wire.
        """
        ended = time.monotonic()
        common = {"cat": "transport", "name": name, "id": key}
        self._put({**common, "ph": "b", "ts": round(begun * 1e6, 1), "args": about})
        self._put({**common, "ph": "e", "ts": round(ended * 1e6, 1)})

    def instant(self, name: str, key: str, **about: Any) -> None:
        """Something of the read ``key`` that takes no time."""
        now = round(time.monotonic() * 1e6, 1)
        self._put({"cat": "transport", "name": name, "id": key, "ph": "n", "ts": now, "args": about})

    def _put(self, event: dict[str, Any]) -> None:
        try:
            line = msgspec.json.encode({**event, "pid": self._pid, "tid": self._pid}, enc_hook=str).decode()
        except UnicodeEncodeError as error:
            raise UsageError(f"a trace got {error.object!a:.80}: give text that UTF-8 can hold") from error
        with self._lock:
            if self._file is not None:
                try:
                    self._file.write(f"{line},\n")
                except OSError as error:
                    self._give_up(self._file, error)

    def _give_up(self, file: TextIO, error: OSError) -> None:
        self._file = None
        with contextlib.suppress(OSError):  # closing tries to write what is buffered
            file.close()
        log.error("the trace %s ends here: %s", file.name, error.strerror or error)

    def close(self) -> None:
        """Write what is buffered. Idempotent; spans that end later are dropped."""
        with self._lock:
            file, self._file = self._file, None
            if file is not None:
                try:
                    file.close()
                except OSError as error:
                    self._give_up(file, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def events(path: Path) -> list[dict[str, Any]]:
    """The events of a file of `Trace`; a last line that a killed process had not finished is left out."""
    found = []
    for line in path.read_bytes().splitlines():
        try:
            event = msgspec.json.decode(line.rstrip(b","))
        except msgspec.DecodeError:
            continue
        if isinstance(event, dict):
            found.append(event)
    return found


def merge(paths: Iterable[Path], target: Path) -> int:
    """One complete JSON document from the files of several processes, in the order of time; how many events."""
    merged = [event for path in paths for event in events(path)]
    merged.sort(key=lambda event: event.get("ts", 0.0))
    target.write_bytes(msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": merged}))
    return len(merged)
