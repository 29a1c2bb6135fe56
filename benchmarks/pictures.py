"""Pictures for the documentation, each of a real run: docs/top.svg, docs/doctor.svg and docs/trace.png.

    python benchmarks/pictures.py            (in `make pictures`)

`transport top` is of a run of the demo over TCP, the trace of reads of 16 MiB, `transport doctor` of this host. `top`
shows every ring of the host, so let nothing else run here, or take them in a /dev/shm and a network of their own
(`unshare -m -n`).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from transport import BlockingClient, SharedRingBuffer, UCXXServer
from transport.cli import top
from transport.client.trace import Trace, events
from transport.observe import overview

DEMO = ("demo", "--rollouts", "3", "--readers", "2", "--wire", "tcp", "--episodes", "600", "--target", "0")
TRANSPORT = (sys.executable, "-P", "-m", "transport")
COLOURS = {
    "read": "#c6dbef",
    "connect": "#d62728",
    "transfer": "#1f77b4",
    "verify": "#2ca02c",
    "acknowledge": "#9467bd",
    "back-off": "#8c564b",
}
SHOWN = 6  # reads of the trace
PAYLOAD_BYTES = 16 << 20
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


def read_with_trace(path: Path) -> None:
    """Read some payloads, one after the other, from a listener process of this host."""
    with (
        SharedRingBuffer.create(slots=SHOWN, slot_bytes=PAYLOAD_BYTES) as ring,
        UCXXServer(ring),
        Trace(path, "reader") as trace,
        BlockingClient(wire={"tcp"}, trace=trace) as client,
    ):
        for ticket in [ring.write_raw(bytes(PAYLOAD_BYTES)) for _ in range(SHOWN)]:
            client.read(ticket).release()


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


def spans(trace: Path) -> dict[str, list[tuple[str, float, float]]]:
    """(phase, begin, end) in microseconds of every read in the trace."""
    begun: dict[tuple[str, str], float] = {}
    found: dict[str, list[tuple[str, float, float]]] = defaultdict(list)
    for event in events(trace):
        key: Any = (event.get("id"), event["name"])
        if event["ph"] == "b":
            begun[key] = event["ts"]
        elif event["ph"] == "e" and key in begun:
            found[event["id"]].append((event["name"], begun.pop(key), event["ts"]))
    return found


def draw(trace: Path, target: Path) -> None:
    """The phases of each read, below each other."""
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    chosen = sorted(spans(trace).values(), key=lambda phases: min(begin for _, begin, _ in phases))
    zero = min(begin for phases in chosen for _, begin, _ in phases)
    figure, axes = plt.subplots(figsize=(10, 3))
    used = set()
    for row, phases in enumerate(chosen):
        for name, begin, end in sorted(phases, key=lambda phase: phase[1] - phase[2]):
            height = 0.9 if name == "read" else 0.55
            axes.barh(row, (end - begin) / 1e3, left=(begin - zero) / 1e3, height=height, color=COLOURS.get(name, "k"))
            used.add(name)
    axes.invert_yaxis()
    axes.set_yticks(range(len(chosen)), [f"read {row + 1}" for row in range(len(chosen))], fontsize=8)
    axes.set_xlabel("milliseconds")
    axes.set_title("Reads of 16 MiB over TCP, one after the other, by phase", fontsize=10)
    axes.legend(handles=[Patch(color=colour, label=name) for name, colour in COLOURS.items() if name in used])
    figure.tight_layout()
    figure.savefig(target, dpi=110)
    plt.close(figure)


def main() -> None:
    """Write all three."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("docs"))
    folder = parser.parse_args().folder
    with tempfile.TemporaryDirectory() as scratch:
        trace = Path(scratch) / "reads.json"
        read_with_trace(trace)
        draw(trace, folder / "trace.png")
    run_of_the_demo().save_svg(str(folder / "top.svg"), title="transport top")
    doctor().save_svg(str(folder / "doctor.svg"), title="transport doctor")


if __name__ == "__main__":
    main()
