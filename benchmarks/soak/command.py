"""What the programs that account for every payload share: options, namespaces of their own, and their report."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fault_injection import ISOLATED, isolated
from planted import PLANTS


def parser(about: str | None, folder: str) -> argparse.ArgumentParser:
    """With the options of every soak; ``folder`` is where its journals go by default."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--plant", choices=PLANTS, default="", help="a fault that this run must find (planted.py)")
    made.add_argument("--folder", type=Path, default=Path(folder), help="journals and logs; made anew")
    made.add_argument("--json", type=Path, default=None, help="where the report goes besides the table")
    made.add_argument("--stuck-s", type=float, default=90.0, help="without any payload for so long it has failed")
    return made


def status_of_isolated_run(program: str, environment: Mapping[str, str] | None = None) -> int | None:
    """Run this program again in namespaces of its own, where they are allowed; None: this process is that run."""
    if ISOLATED in os.environ:
        return None
    command = [sys.executable, program, *sys.argv[1:]]
    alone = isolated(command)
    inherited = {**os.environ, **(environment or {}), ISOLATED: "1" if alone != command else "0"}
    return subprocess.run(alone, env=inherited).returncode


def finish(report: Mapping[str, Any], target: Path | None) -> None:
    """Print the report, a line for each figure, and write it as JSON where there is a ``target``."""
    for name, value in report.items():
        print(f"{name:>25}  {json.dumps(value)}")
    write_json(report, target)


def write_json(found: Any, target: Path | None) -> None:
    """Write it, with its folder, where there is a ``target``."""
    if target is not None:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(found, indent=2) + "\n")
