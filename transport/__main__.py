"""The command ``transport``, also as ``python -m transport``.

The time limit for interrupts begins before anything large is imported: a library may swallow the KeyboardInterrupt that
reaches it while it is imported, or raise another error for it.
"""

from __future__ import annotations

import sys

from transport.runtime import interruption


def main() -> None:
    """Run the command of the command line, and exit with its status."""
    with interruption.bounded() as watch:
        try:
            from transport.cli import run

            status = run(sys.argv[1:])
        except (KeyboardInterrupt, Exception):  # before `run` could catch it
            if not watch.begun:
                raise
            status = interruption.STATUS
    # What fails after an interrupt fails because of it. Above 128 a command names the signal itself.
    if watch.begun:
        watch.exit(interruption.STATUS if 0 < status <= 128 else status)
    sys.exit(status)


if __name__ == "__main__":
    main()
