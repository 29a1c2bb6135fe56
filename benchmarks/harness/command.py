"""What the programs that account for every payload share: their options and their report."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import isolation


def parser(about: str | None, folder: str) -> argparse.ArgumentParser:
    """With the options of all of them; ``folder`` is where journals and logs go by default."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--folder", type=Path, default=Path(folder), help="journals and logs; made anew")
    made.add_argument("--json", type=Path, help="where the report goes besides the table")
    return made


def new_folder(path: Path) -> Path:
    """The folder, empty."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path.resolve()


def isolated() -> bool:
    """Go on in namespaces of this run's own, where they are allowed; whether they are."""
    try:
        isolation.enter()
    except isolation.Refused:
        return False
    return True


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
