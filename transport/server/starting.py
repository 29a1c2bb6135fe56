"""Configuration that a listener or supervisor reads when it starts, and the report that it writes then.

Both go over pipes, as JSON: the configuration to standard input, because a command line must not contain the secret;
the report, a line, to standard output.
"""

from __future__ import annotations

import contextlib
import os

import msgspec

from transport.decoders import json_decoder
from transport.errors import TransportError, UsageError
from transport.runtime.error_text import reportable
from transport.runtime.hiding import hiding
from transport.settings import LogFormat, LogLevel, Settings
from transport.wires import Wire

_answers = 1  # descriptor


@hiding("secret")
class ListenerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Configuration of a listener process."""

    segment: str
    port: int
    settings: Settings
    secret: bytes | None = None
    wires: frozenset[Wire] | None = None
    bind: str = ""
    log_level: LogLevel = "WARNING"
    log_format: LogFormat = "text"

    def checked(self) -> ListenerConfig:
        """Return the configuration as a listener process reads it. UsageError: it would refuse a field."""
        try:
            return json_decoder(ListenerConfig)(msgspec.json.encode(self))
        except (TypeError, msgspec.ValidationError) as error:
            raise UsageError(f"a listener cannot be configured so: {error}") from None


class StartReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The one report of a process that was started, listener or supervisor: its ports, or the first error."""

    ports: tuple[int, ...] = ()
    error: str = ""
    message: str = ""

    @classmethod
    def of(cls, error: TransportError) -> StartReport:
        """Return the report of a start that failed."""
        return cls(error=type(error).__name__, message=reportable(str(error)))


def answer(report: StartReport) -> None:
    """Write one JSON line to the process that started this one. Only the first call writes."""
    global _answers
    descriptor, _answers = _answers, -1
    if descriptor < 0:
        return
    with contextlib.suppress(BrokenPipeError), os.fdopen(descriptor, "wb") as pipe:
        pipe.write(msgspec.json.encode(report) + b"\n")


def keep_stdout_for_the_answer() -> None:
    """Redirect standard output to standard error, because UCX logs to it; only `answer` writes to the original."""
    global _answers
    _answers = os.dup(1)
    os.dup2(2, 1)
