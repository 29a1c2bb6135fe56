"""The command ``transport``. One file per command; heavy imports stand inside the commands, so that help is quick.

Exit status: 0 success, 1 failed, 2 wrong usage. An error is one line on standard error, without a traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Annotated, cast

import typer

from transport.cli import bench, cooldown, demo, doctor, queue, read, reclaim, restore, serve, size, snapshot, top
from transport.config import configuration
from transport.errors import TransportError, UsageError

__all__ = ["main", "run", "run_program"]

# The base of every complaint about arguments. Named through its subclass, because it is click's, and typer has come
# with a copy of click since 0.2x.
_ArgumentError = cast(type[typer.BadParameter], typer.BadParameter.__bases__[0])

_INTERRUPTED = 130

app = typer.Typer(
    name="transport",
    help="Moves reinforcement-learning payloads from rollout memory to trainer memory over UCX.",
    epilog="Example: transport demo --rollouts 4",
    pretty_exceptions_enable=False,
)
app.add_typer(bench.app, name="bench")
app.add_typer(cooldown.app, name="cooldown")
app.command("demo", epilog=demo.EXAMPLE)(demo.demo)
app.command("doctor", epilog=doctor.EXAMPLE)(doctor.doctor)
app.command("queue", epilog=queue.EXAMPLE)(queue.queue)
app.command("read", epilog=read.EXAMPLE)(read.read)
app.command("reclaim", epilog=reclaim.EXAMPLE)(reclaim.reclaim)
app.command("restore", epilog=restore.EXAMPLE)(restore.restore)
app.command("serve", epilog=serve.EXAMPLE)(serve.serve)
app.command("size", epilog=size.EXAMPLE)(size.size)
app.command("snapshot", epilog=snapshot.EXAMPLE)(snapshot.snapshot)
app.command("top", epilog=top.EXAMPLE)(top.top)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"transport {version('payload-transport')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """Declare the options that come before the command; `app` has the help text."""


def run(arguments: Sequence[str]) -> int:
    """Run one command; returns its exit status. No command, or a group's name alone, is a request for its help."""
    if _is_group(arguments):
        arguments = [*arguments, "--help"]
    return _run(app, "transport", " ".join(["transport", *_named(arguments)]), arguments)


def run_program(name: str, command: Callable[..., int | None], arguments: Sequence[str] | None = None) -> int:
    """Run a benchmark that is a program of its own as `run` runs a command. Default: this process's arguments."""
    program = typer.Typer(pretty_exceptions_enable=False)
    program.command()(command)
    return _run(program, name, name, sys.argv[1:] if arguments is None else arguments)


def _run(program: typer.Typer, name: str, command: str, arguments: Sequence[str]) -> int:
    try:
        if not {"--help", "--version"} & set(arguments):
            configuration()  # also for a command that needs none of it: a misspelt setting is no default unnoticed
        status = program(list(arguments), prog_name=name, standalone_mode=False)
    except _ArgumentError as error:
        return _failed(2, command, f"{error.format_message().rstrip('.')}; see `{command} --help`")
    except UsageError as error:
        return _failed(2, command, str(error))
    except TransportError as error:
        return _failed(1, command, str(error))
    except OSError as error:
        return _failed(1, command, f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except (KeyboardInterrupt, typer.Abort):
        return _failed(_INTERRUPTED, command, "interrupted")
    if type(status) is int and status == _INTERRUPTED:  # typer makes this of a KeyboardInterrupt, without a word
        return _failed(_INTERRUPTED, command, "interrupted")
    return int(status) if isinstance(status, int) else 0


def _is_group(arguments: Sequence[str]) -> bool:
    return not arguments or list(arguments) in [[group.name] for group in app.registered_groups]


def _named(arguments: Sequence[str]) -> list[str]:
    """Return the leading arguments that name the command, or a group and its command."""
    groups = {group.name: group.typer_instance for group in app.registered_groups}
    level: typer.Typer | None = app
    found: list[str] = []
    for name in arguments:
        if level is None or name not in {*(each.name for each in level.registered_commands), *groups}:
            break
        found.append(name)
        level = groups.get(name)
    return found


def _failed(status: int, command: str, what: str) -> int:
    print(f"{command}: {' '.join(what.split())}", file=sys.stderr)
    return status
