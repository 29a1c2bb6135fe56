"""Writes constraints.txt: one version of every package that the Makefile's pip may install, with all that they need.

Run by `make constraints`. pip resolves each variant of the extras without installing anything, the one for CUDA 13
under what the one for CUDA 12 has chosen. They differ in CUDA's own bindings, whose version follows from that of ucxx:
those are not in the file.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
FILE = ROOT / "constraints.txt"
EXTRAS = ("redis", "metrics", "s3", "demo", "bench", "test", "lint", "site")
VARIANTS = (("cu12", "gpu"), ("cu13", "gpu13"))
OF_THE_VARIANT = ("cuda-",)
HEAD = """\
# One version of everything that the Makefile installs. Written by `make constraints`, which is run on purpose: a new
# release of a tool changes nothing here until then.
"""


def wanted(project: dict[str, Any], extras: tuple[str, ...]) -> list[str]:
    """What pyproject.toml asks for: to build, to run, and for ``extras``."""
    optional = project["project"]["optional-dependencies"]
    found = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    return found + [each for extra in extras for each in optional[extra]]


def resolved(requirements: list[str], chosen: dict[str, str]) -> dict[str, str]:
    """Versions by normalized name, as pip would install them into an empty environment."""
    with tempfile.TemporaryDirectory() as folder:
        constraints, report = Path(folder, "constraints.txt"), Path(folder, "report.json")
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in chosen.items()), encoding="utf-8")
        options = ["--quiet", "--dry-run", "--ignore-installed", "--only-binary", ":all:"]
        pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", *options]
        subprocess.run([*pip, "--report", str(report), "--constraint", str(constraints), *requirements], check=True)
        packages = [each["metadata"] for each in json.loads(report.read_text(encoding="utf-8"))["install"]]
    found = {re.sub(r"[-_.]+", "-", each["name"]).lower(): each["version"] for each in packages}
    return {name: version for name, version in found.items() if not name.startswith(OF_THE_VARIANT)}


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    chosen: dict[str, str] = {}
    for variant in VARIANTS:
        chosen |= resolved(wanted(project, (*variant, *EXTRAS)), chosen)
    lines = "".join(f"{name}=={version}\n" for name, version in sorted(chosen.items()))
    FILE.write_text(HEAD + lines, encoding="utf-8")
    print(f"{FILE.name}: {len(chosen)} packages")


if __name__ == "__main__":
    main()
