"""Output that all commands share: JSON with --json, text otherwise."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from transport.errors import UsageError
from transport.runtime.amounts import count


def _writable(target: str | None) -> str | None:
    """Check the target before the work begins."""
    if target not in (None, "-") and not Path(target).parent.is_dir():
        raise UsageError(f"--json {target}: the folder does not exist; create it first")
    return target


JsonTarget = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="PATH|-",
        help="Write the result as JSON to this file; - writes it to standard output instead of the text.",
        callback=_writable,
    ),
]

_MOST_SHOWN = 8
_VARYING = re.compile(r"[0-9a-f]*[0-9][0-9a-f]*")  # numbers, and names of segments


def shown(size: int) -> str:
    """Bytes with a unit: "452 B", "16.4 kB", "8.4 MB"."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} B"


def few(names: Sequence[str], between: str = ", ") -> str:
    """Return the first of them, and how many more there are."""
    more = len(names) - _MOST_SHOWN
    return between.join(names[:_MOST_SHOWN]) + (f" and {more} more" if more > 0 else "")


class Said(int):
    """An exit status whose reason the command has printed itself."""


def emit(result: Any, text: str, json_target: str | None) -> None:
    """Print ``text``, and write ``result`` where --json says; with ``-`` the JSON takes the place of the text.

    The text comes first: a file that cannot be written does not take the result with it.
    """
    if json_target == "-":
        say(document(result))
        return
    say(text)
    if json_target is not None:
        with naming(json_target):
            Path(json_target).write_text(f"{document(result)}\n", encoding="utf-8")


def document(result: Any) -> str:
    """Return the result as JSON."""
    import msgspec

    return msgspec.json.format(msgspec.json.encode(result), indent=2).decode()


def say(text: str) -> None:
    """Print to standard output. An error of it, but that of a closed pipe, names it."""
    with naming("standard output"):
        typer.echo(text)
        sys.stdout.flush()


@contextlib.contextmanager
def naming(target: object) -> Iterator[None]:
    """Errors of writing that name no file name this one; a closed pipe stays one."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, os.strerror(error.errno), str(target)) from error
        raise


def status_of(command: str, failed: Sequence[str]) -> int:
    """Return the exit status of a command that has shown its result; what failed is said in one line."""
    if failed:
        print(f"{command}: {'; '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def causes(failed: Iterable[str]) -> list[str]:
    """ "CASE: reason" of each that failed, as one line for each reason. Names and numbers within it may differ."""
    groups: dict[str, list[str]] = {}
    for each in failed:
        reason = _VARYING.sub("#", each.partition(": ")[2])
        groups.setdefault(reason, []).append(each)
    return [
        lines[0] + (f" (and {count(len(lines) - 1, 'more case')})" if len(lines) > 1 else "")
        for lines in groups.values()
    ]


def about(report: Any) -> str:
    """Return the first lines of a measurement: machine, versions and UCX settings."""
    machine = report.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}, Python {machine['python']}, load "
        f"{machine['load']}; {versions}"
    ]
    for wire, settings in report.settings.items():
        if settings:
            lines.append(f"UCX for {wire}: {' '.join(f'{name}={value}' for name, value in sorted(settings.items()))}")
    return "\n".join(lines)
