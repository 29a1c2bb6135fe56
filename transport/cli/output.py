"""What all commands print alike: JSON where it is asked for, text otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

JsonTarget = Annotated[
    str | None,
    typer.Option("--json", metavar="PATH|-", help="Write the result as JSON; - is standard output, and only that."),
]


def emit(result: Any, text: str, json_target: str | None) -> None:
    """Print ``text``, and write ``result`` where --json says; with ``-`` the JSON takes the place of the text."""
    if json_target is not None:
        import msgspec

        document = msgspec.json.format(msgspec.json.encode(result), indent=2).decode()
        if json_target == "-":
            typer.echo(document)
            return
        Path(json_target).write_text(f"{document}\n", encoding="utf-8")
    typer.echo(text)
