"""Writes constraints.txt: one version of every package that the Makefile's pip may install, with all that they need.

Run by `make constraints`. pip resolves each variant of the extras without installing anything, the one for CUDA 13
under what the one for CUDA 12 has chosen. They differ in CUDA's own bindings, whose version follows from that of ucxx:
those are not in the file. The oldest Python that pyproject.toml admits is first, the others under what that one has.
With the argument ``check``, of `make constraints-check`, it fails where the file does not hold for one of them.

With the argument ``adapters``, which `make adapters-constraints` gives, it writes constraints-adapters.txt for the
environment of `make adapters`. That is a file of its own, since the frameworks admit only older releases of some tools.
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
ADAPTERS_FILE = ROOT / "constraints-adapters.txt"
EXTRAS = ("redis", "metrics", "s3", "demo", "bench", "test", "lint", "site")
PYTHONS = ("3.11.0", "3.12.0", "3.13.0")
VARIANTS = (("cu12", "gpu"), ("cu13", "gpu13"))
ALONE = ("verbs", "verbs13")  # without what they require: their libraries alone are used, and they ask for torch
OF_THE_VARIANT = ("cuda-",)
NO_WHEELS = "antlr4-python3-runtime"  # of hydra-core; pure Python
HEAD = """\
# One version of everything that the Makefile installs. Written by `make constraints`, which is run on purpose: a new
# release of a tool changes nothing here until then.
"""
ADAPTERS_HEAD = """\
# One version of everything in the environment of `make adapters`. Written by `make adapters-constraints`, on purpose.
"""


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def wanted(extras: tuple[str, ...]) -> list[str]:
    """What pyproject.toml asks for: to build, to run, and for ``extras``."""
    found = [*project()["build-system"]["requires"], *to_run()]
    return found + of_extras(extras)


def to_run() -> list[str]:
    required: list[str] = project()["project"]["dependencies"]
    return required


def of_extras(extras: tuple[str, ...]) -> list[str]:
    optional = project()["project"]["optional-dependencies"]
    return [each for extra in extras for each in optional[extra]]


def of_group(name: str) -> list[str]:
    """A dependency group of pyproject.toml."""
    group: list[str] = project()["dependency-groups"][name]
    return group


def for_adapters(variant: tuple[str, ...]) -> list[str]:
    """What pip installs, with all that it needs, into the environment of `make adapters`."""
    return [*to_run(), *of_extras(variant), *of_group("adapters")]


def resolved(requirements: list[str], chosen: dict[str, str], *options: str) -> dict[str, str]:
    """Versions by normalized name, as pip would install them into an empty environment."""
    with tempfile.TemporaryDirectory() as folder:
        constraints, report = Path(folder, "constraints.txt"), Path(folder, "report.json")
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in chosen.items()), encoding="utf-8")
        wheels = ["--only-binary", ":all:", *(() if "--python-version" in options else ("--no-binary", NO_WHEELS))]
        pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet", "--dry-run", *wheels]
        pip += ["--use-feature", "fast-deps"]  # reads the metadata alone of wheels that are large
        pip += ["--ignore-installed", "--report", str(report), "--constraint", str(constraints), *options]
        subprocess.run([*pip, *requirements], check=True)
        packages = [each["metadata"] for each in json.loads(report.read_text(encoding="utf-8"))["install"]]
    # Without the label of a build: 2.13.0 stands for 2.13.0+cpu as well, which pip prefers where its index has it.
    found = {re.sub(r"[-_.]+", "-", each["name"]).lower(): each["version"].partition("+")[0] for each in packages}
    return {name: version for name, version in found.items() if not name.startswith(OF_THE_VARIANT)}


def for_every_python(chosen: dict[str, str]) -> dict[str, str]:
    """``chosen``, and what it lacks."""
    for python in PYTHONS:
        for variant in VARIANTS:
            options = (
                "--python-version",
                python,
                "--target",
                tempfile.gettempdir(),
            )  # pip wants a target, and leaves it
            chosen = chosen | resolved(wanted((*variant, *EXTRAS)), chosen, *options)
        chosen = chosen | resolved(of_extras(ALONE), chosen, "--no-deps", *options)
    return chosen


def write(file: Path, head: str, chosen: dict[str, str]) -> None:
    lines = "".join(f"{name}=={version}\n" for name, version in sorted(chosen.items()))
    file.write_text(head + lines, encoding="utf-8")
    print(f"{file.name}: {len(chosen)} packages")


def main() -> None:
    chosen: dict[str, str] = {}
    if sys.argv[1:] == ["adapters"]:
        for variant in VARIANTS:
            chosen |= resolved(for_adapters(variant), chosen)
        chosen |= resolved(of_group("adapters-alone"), chosen, "--no-deps")
        write(ADAPTERS_FILE, ADAPTERS_HEAD, chosen)
        return
    if sys.argv[1:] == ["check"]:
        lines = FILE.read_text(encoding="utf-8").splitlines()
        chosen = dict(line.split("==") for line in lines if not line.startswith("#"))
        if lacking := for_every_python(chosen).keys() - chosen:
            sys.exit(f"{FILE.name} lacks {', '.join(sorted(lacking))}: make constraints")
        print(f"{FILE.name} holds for Python {', '.join(PYTHONS)}")
        return
    write(FILE, HEAD, for_every_python(chosen))


if __name__ == "__main__":
    main()
