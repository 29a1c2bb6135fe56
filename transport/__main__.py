"""The command ``transport``, also as ``python -m transport``.

The time limit for interrupts begins before anything large is imported: a library may swallow the KeyboardInterrupt that
reaches it while it is imported.
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
        except KeyboardInterrupt:  # before `run` could catch it
            status = interruption.STATUS
    if watch.begun:
        watch.exit(status and interruption.STATUS)  # what failed since then has failed because of it
    sys.exit(status)


if __name__ == "__main__":
    main()
