"""Pictures for the documentation, each of a real run: docs/top.svg and docs/doctor.svg.

    python benchmarks/pictures.py            (in `make pictures`)

`transport top` is of a run of the demo over TCP, `transport doctor` of this host. `top` shows every ring of the host,
so let nothing else run here, or take them in a /dev/shm and a network of their own (`unshare -m -n`).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

from transport.cli import top
from transport.observe import overview

DEMO = ("demo", "--rollouts", "3", "--readers", "2", "--wire", "tcp", "--episodes", "600", "--target", "0")
TRANSPORT = (sys.executable, "-P", "-m", "transport")
_COLUMNS = 100  # of the terminal that shows `top`


def run_of_the_demo() -> Console:
    """A console that has the look at the demo with the most reads a second."""
    most, best = -1.0, Console(record=True, width=_COLUMNS, file=sys.stderr)
    with subprocess.Popen([*TRANSPORT, *DEMO], stdout=subprocess.DEVNULL) as demo:
        before = overview.look()
        while demo.poll() is None:
            time.sleep(1.0)  # the time over which rates are counted
            now = overview.look()
            rates = overview.rates(before, now)
            reads = sum(rate.reads for rate in rates.values()) if now.clients else 0.0
            if reads > most:
                most, best = reads, Console(record=True, width=_COLUMNS, file=sys.stderr)
                best.print(Text("$ transport top --once"))
                best.print(top._picture(now, rates, _COLUMNS))
            before = now
    if demo.returncode:
        raise SystemExit(f"the demo ended with {demo.returncode}")
    return best


def doctor() -> Console:
    """What `transport doctor` says here, in its words; the colours are those of its first column."""
    said = subprocess.run([*TRANSPORT, "doctor"], capture_output=True, text=True, check=False).stdout
    console = Console(record=True, width=132, file=sys.stderr)
    console.print(Text("$ transport doctor"))
    for line in said.splitlines():
        text = Text(line)
        for mark, style in (("ok", "green"), ("WARN", "yellow"), ("FAIL", "red")):
            if line.startswith(f"{mark} "):
                text.stylize(style, 0, len(mark))
        console.print(text)
    return console


def main() -> None:
    """Write both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("docs"))
    folder = parser.parse_args().folder
    run_of_the_demo().save_svg(str(folder / "top.svg"), title="transport top")
    doctor().save_svg(str(folder / "doctor.svg"), title="transport doctor")


if __name__ == "__main__":
    main()
