"""Log lines as text, or as one JSON object per line with the `FIELDS` of its subject.

A call passes the fields with ``extra={"ticket": …, "port": …, "attempt": …}``; the message has them as well.
"""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec

from transport.errors import TransportError
from transport.runtime.error_text import encodable, error_text

if TYPE_CHECKING:
    from types import TracebackType

    from transport.settings import LogFormat, LogLevel

FIELDS: Final = ("ticket", "ring", "port", "attempt", "rank", "wire")
"""Fields of a line: ring/slot/generation, ring id, host:port, number of the attempt, reader rank, wire."""

LOOK_S: Final = 5.0  # of waiting in vain, before it is asked why; and between two looks
SAY_AGAIN_S: Final = 600.0  # the same reason


class JsonLines(logging.Formatter):
    """Formats time (seconds since the epoch), level, logger, process, message and the given `FIELDS`."""

    def __init__(self, who: str = "") -> None:
        super().__init__()
        self._who = who

    def format(self, record: logging.LogRecord) -> str:
        """One line; a traceback is one field of it."""
        line: dict[str, Any] = {
            "time": round(record.created, 6),
            "level": record.levelname,
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
        }
        if self._who:
            line["who"] = self._who
        line |= {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        numbers = int | float | None
        line = {name: each if isinstance(each, numbers) else encodable(str(each)) for name, each in line.items()}
        return msgspec.json.encode(line).decode()


def set_up_logging(level: LogLevel, form: LogFormat, who: str) -> None:
    """Log to standard error. ``who`` names the process in the lines."""
    to_stderr = logging.StreamHandler()
    text = logging.Formatter(f"%(asctime)s {who} %(process)d %(levelname)s %(message)s")
    to_stderr.setFormatter(JsonLines(who) if form == "json" else text)
    logging.basicConfig(level=level, handlers=[to_stderr])


class LogLimit:
    """Limits the rate of a repeated warning: the first is written, then one per interval. Any thread."""

    def __init__(self, every_s: float = 60.0) -> None:
        self._every_s = every_s
        self._next = -math.inf
        self._suppressed = 0

    def due(self) -> int | None:
        """Return the number of warnings suppressed since the last written one; None: suppress this one as well."""
        now = time.monotonic()
        if now < self._next:
            self._suppressed += 1
            return None
        self._next = now + self._every_s
        suppressed, self._suppressed = self._suppressed, 0
        return suppressed


class LoggedErrors:
    """Context of one turn of work that goes on and on: an error of a turn is logged, and ends no more than the turn.

    Args:
        work: that fails then, as the line names it.
    """

    def __init__(self, logger: logging.Logger, work: str) -> None:
        self._log = logger
        self._work = work
        self._limit = LogLimit()

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):  # none, or a cancellation
            return False
        if (before := self._limit.due()) is not None:
            expected = isinstance(error, TransportError | OSError)
            self._log.log(
                logging.WARNING if expected else logging.ERROR,
                "%s failed, and is tried again: %s (%d more)",
                self._work,
                error_text(error),
                before,
                exc_info=None if expected else error,
            )
        return True


class Overdue:
    """A watch on something that is waited for, and overdue where it is to be asked why: after `LOOK_S`, and so on."""

    def __init__(self) -> None:
        self._since = self._look_at = math.inf

    @property
    def looked(self) -> bool:
        """True if it is still waited for, and the last look is no older than the next one is away."""
        return time.monotonic() < self._look_at + LOOK_S < math.inf

    @property
    def waited_s(self) -> float:
        """Seconds since the first look; 0: it is not waited for."""
        return max(0.0, time.monotonic() - self._since)

    def came(self) -> None:
        """Note that it has come, and is waited for no more."""
        self._since = self._look_at = math.inf

    def due(self) -> bool:
        """Return whether to look for the reason now: it has not come."""
        now = time.monotonic()
        if self._since > now:
            self._since, self._look_at = now, now + LOOK_S
        if now < self._look_at:
            return False
        self._look_at = now + LOOK_S
        return True
