"""Can the soak fail? Each planted fault (planted.py) in a short run of its own; the run must find it and say so.

    python benchmarks/soak/mutations.py [--only NAME,…] [--json PATH] [options of the soak]

The first run has nothing planted, and must pass. Exit status 0: it did, and every fault was found.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "harness"))

from command import write_json
from planted import PLANTS

HERE = Path(__file__).resolve().parent
SIZE = ["--payloads", "3000", "--kills", "12", "--lapses", "6", "--stuck-s", "30"]  # a batch may take 20 s
_NOTHING = ""


def run(plant: str, folder: Path, options: list[str]) -> dict[str, Any]:
    """The report of one short soak."""
    written = folder / "report.json"
    written.unlink(missing_ok=True)
    calm = ["--kills", "0", "--lapses", "0"] if plant and PLANTS[plant].calm else []
    command = [sys.executable, str(HERE), *SIZE, *options, *calm]
    command += ["--folder", str(folder / "run"), "--json", str(written)]
    done = subprocess.run([*command, "--plant", plant] if plant else command, capture_output=True, text=True)
    if not written.exists():
        raise SystemExit(f"the soak with {plant or 'nothing'} planted ended with {done.returncode}: {done.stderr}")
    report: dict[str, Any] = json.loads(written.read_text())
    return report


def amount(figure: Any) -> int:
    """Of a figure that is a number or a list of what was seen."""
    return figure if isinstance(figure, int) else len(figure)


def found(plant: str, report: dict[str, Any]) -> bool:
    """Whether the report says what it should."""
    if plant == _NOTHING:
        return bool(report["passed"])
    if report["lost"] >= report["deliveries"]:
        return False  # it never began: no evidence of anything
    expected = PLANTS[plant]
    hidden = not expected.hides or not amount(report[expected.hides])
    return not report["passed"] and amount(report[expected.shows]) > 0 and hidden


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of planted faults, by commas")
    parser.add_argument("--json", type=Path)
    chosen, options = parser.parse_known_args()
    names = (
        chosen.only.split(",") if chosen.only else [_NOTHING, *(name for name, plant in PLANTS.items() if plant.here)]
    )
    rows = []
    print(
        f"{'planted':<20}{'shows':<13}{'lost':>6}{'wrong':>6}{'twice':>6}{'kills':>6}{'seconds':>9}  result", flush=True
    )
    for name in names:
        with tempfile.TemporaryDirectory(prefix="soak-planted-") as folder:
            report = run(name, Path(folder), options)
        good = found(name, report)
        figures = {key: report[key] for key in ("lost", "wrong", "duplicated", "kills", "seconds")}
        others = {key: amount(report[key]) for key in ("crashes", "left_behind", "excused", "unfinished")}
        rows.append({"planted": name, "found": good, **figures, **others, "named": report["named"][:3]})
        numbers = "".join(f"{each:>6}" for each in list(figures.values())[:4])
        shows = PLANTS[name].shows if name else "nothing"
        print(
            f"{name or 'nothing':<20}{shows:<13}{numbers}{report['seconds']:>9}  {'ok' if good else 'NOT FOUND'}",
            flush=True,
        )
    write_json(rows, chosen.json)
    return 0 if all(row["found"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
