"""Build wheel and sdist, install the wheel into an environment of its own where no compiler is found, and use it.

Run by `make wheel-test` with the environment that has the build's requirements: `check.py EXTRA`, the variant of ucxx.
Everything it makes stands in build/wheel; the environment is made anew each time, and removed when all went well.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.append(str(ROOT / "tests" / "support"))
from waiting import waiting  # noqa: E402  # a program of its own: pytest's path is not there

BUILD = ROOT / "build" / "wheel"
# For pip and the programs of the package; that there is no compiler among them is checked below.
PROGRAMS = ("sh", "uname", "env")
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "cmake", "ninja", "make")
LICENCES = {"LICENSE", "LICENSE.xxhash", "LICENSE.nanobind", "LICENSE.robin_map"}
IN_THE_SDIST = {
    "pyproject.toml",
    "README.md",
    "native/CMakeLists.txt",
    "native/vendor/xxhash.h",
    "native/vendor/README.md",
    "transport/py.typed",
    *("LICENSE" if each == "LICENSE" else f"native/vendor/{each}" for each in LICENCES),
}


def run(
    title: str,
    command: list[str],
    environment: Mapping[str, str] | None = None,
    folder: Path = ROOT,
    usual_s: float = 20.0,
) -> None:
    started = time.monotonic()
    with waiting(title, usual_s):
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=1200,
        )
    print(f"{'ok  ' if done.returncode == 0 else 'FAIL'} {title} ({time.monotonic() - started:.1f} s)", flush=True)
    if done.returncode != 0:
        sys.exit(done.stdout)


def check(title: str, fault: str, names: set[str]) -> None:
    print(f"{'FAIL' if names else 'ok  '} {title}", flush=True)
    if names:
        sys.exit(f"{fault}: {', '.join(sorted(names))}")


def built() -> tuple[Path, Path]:
    """Wheel and sdist of this checkout."""
    shutil.rmtree(BUILD, ignore_errors=True)
    BUILD.mkdir(parents=True)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"]
    run("wheel", [*pip, "--no-deps", "--no-build-isolation", "--wheel-dir", str(BUILD), "."])
    run("sdist", [sys.executable, "-c", f"import scikit_build_core.build as b; b.build_sdist({str(BUILD)!r})"])
    [wheel], [sdist] = BUILD.glob("*.whl"), BUILD.glob("*.tar.gz")
    return wheel, sdist


def without_a_compiler(home: Path) -> dict[str, str]:
    """Environment variables with which nothing can be compiled."""
    programs = BUILD / "programs"
    programs.mkdir(exist_ok=True)
    for name in PROGRAMS:
        if found := shutil.which(name):
            (programs / name).unlink(missing_ok=True)
            (programs / name).symlink_to(found)
    path = f"{home / 'bin'}:{programs}"
    check("no compiler in the environment", "found", {name for name in COMPILERS if shutil.which(name, path=path)})
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV", "LD_"))}
    return kept | {"PATH": path, "CC": "/bin/false", "CXX": "/bin/false"}


def used(wheel: Path, extra: str, python: str = sys.executable) -> None:
    """Install a wheel where there is no compiler, and use it there."""
    home = BUILD / "environment"
    run("an environment for it", [python, "-m", "venv", "--clear", str(home)])
    environment = without_a_compiler(home)
    python = str(home / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary", ":all:"]
    run("installed", [*pip, f"payload-transport[{extra}] @ {wheel.as_uri()}"], environment)
    elsewhere = BUILD / "elsewhere"  # the checkout is not in sys.path there
    elsewhere.mkdir(exist_ok=True)
    run("a payload written and read", [python, str(Path(__file__).with_name("use.py"))], environment, elsewhere)
    for arguments in (["--version"], ["bench", "--help"], ["doctor", "--help"]):
        command = [str(home / "bin" / "transport"), *arguments]
        run(f"transport {' '.join(arguments)}", command, environment, elsewhere)
    shutil.rmtree(home)


def main() -> None:
    extra = sys.argv[1]
    wheel, sdist = built()
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
    licences = {Path(name).name for name in names if ".dist-info/licenses/" in name}
    check("licences in the wheel", "missing", LICENCES - licences)
    check("py.typed in the wheel", "missing", {"transport/py.typed"} - set(names))
    others = {name.partition("/")[0] for name in names if ".dist-info/" not in name} - {"transport"}
    check("nothing in the wheel but the package", "also in it", others)
    with tarfile.open(sdist) as packed_sources:
        sources = {name.partition("/")[2] for name in packed_sources.getnames()}
    check("sources and licences in the sdist", "missing", IN_THE_SDIST - sources)

    used(wheel, extra)


if __name__ == "__main__":
    main()
