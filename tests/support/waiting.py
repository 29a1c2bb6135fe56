"""Says that a step of a make target still runs: seconds that count on a terminal, elsewhere a line every 30 s.

    waiting.py WHAT USUAL_SECONDS COMMAND…      # its status is the command's
    with waiting("3.12: built", 400): …

For steps without cases that could be counted. It needs nothing that is installed.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

FIRST_S = 5.0
EVERY_S = 30.0


def about(seconds: float) -> str:
    """ "40 s", "3 min"."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


@contextlib.contextmanager
def waiting(what: str, usual_s: float, first_s: float = FIRST_S, every_s: float = EVERY_S) -> Iterator[None]:
    """While the block runs. ``usual_s``: how long it takes, as a rule."""
    terminal, ended, begun = sys.stderr.isatty(), threading.Event(), time.monotonic()

    def saying() -> None:
        pause = 1.0 if terminal else first_s
        while not ended.wait(pause):
            line = f"{what}: {time.monotonic() - begun:.0f} s, takes about {about(usual_s)}"
            print(f"\r\x1b[K{line}" if terminal else line, end="" if terminal else "\n", file=sys.stderr, flush=True)
            pause = 1.0 if terminal else every_s
        if terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    thread = threading.Thread(target=saying, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def main() -> int:
    """Run the command; its exit status, 130 after an interrupt."""
    what, usual_s, *command = sys.argv[1:]
    with waiting(what, float(usual_s)):
        try:
            return subprocess.run(command).returncode
        except KeyboardInterrupt:
            return 130


if __name__ == "__main__":
    sys.exit(main())
