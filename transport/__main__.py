"""The command ``transport``, also as ``python -m transport``.

The time limit for interrupts begins before anything large is imported: a library may swallow the KeyboardInterrupt that
reaches it while it is imported, or raise another error for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn

from transport.runtime import interruption


def main() -> None:
    """Run the command of the command line, and exit with its status."""
    exit_with(_command)


def _command() -> int:
    from transport.cli import run

    return run(sys.argv[1:])


def exit_with(program: Callable[[], int]) -> NoReturn:
    """Run a program that Ctrl-C ends within a time limit, and exit with the status that it returns."""
    with interruption.bounded() as watch:
        try:
            status = program()
        except (KeyboardInterrupt, Exception):  # before the program could catch it
            if not watch.begun:
                raise
            status = interruption.STATUS
    # What fails after an interrupt fails because of it. Above 128 a command names the signal itself.
    if watch.begun:
        watch.exit(interruption.STATUS if 0 < status <= 128 else status)
    sys.exit(status)


if __name__ == "__main__":
    main()
