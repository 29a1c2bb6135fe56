"""A Python that can import the package: what is missing is installed from build/wheels and built; then the checks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WHEELS = ROOT / "build" / "wheels"
BUILT = ROOT / "build" / "gpu"
TESTS = ROOT / "tests" / "gpu"
NEEDED = (
    "numpy",
    "msgspec",
    "uvloop",
    "ml_dtypes",
    "typer",
    "ucxx",
    "libucx",
    "pytest",
    "pytest_timeout",
    "hypothesis",
)


def lacking(inherited: dict[str, str], modules: tuple[str, ...]) -> list[str]:
    """Of these modules, those that a Python with this environment cannot find."""
    look = "import importlib.util as u, sys; print(*[name for name in sys.argv[1:] if u.find_spec(name) is None])"
    done = subprocess.run([sys.executable, "-P", "-c", look, *modules], env=inherited, capture_output=True, text=True)
    return done.stdout.split()


def environment() -> dict[str, str]:
    """What a Python needs to import the package: nothing where it is installed, else wheels and a build beside it."""
    inherited = {**os.environ, "PYTHONSAFEPATH": "1"}
    modules = (*NEEDED, "transport")
    if not lacking(inherited, modules):
        return inherited
    inherited["PYTHONPATH"] = os.pathsep.join([str(BUILT), *filter(None, [os.environ.get("PYTHONPATH")])])
    install = [sys.executable, "-P", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
    install += ["--no-deps", "--upgrade", "--target", str(BUILT)]
    wheels = sorted(map(str, WHEELS.glob("*.whl")))
    if wheels and lacking(inherited, NEEDED):
        print(f"installing {len(wheels)} wheels into {BUILT} …", flush=True)
        subprocess.run([*install, *wheels], check=True, env=inherited)
    if missing := lacking(inherited, NEEDED):
        raise SystemExit(
            f"missing: {', '.join(missing)}; put wheels of them into {WHEELS} (make gpu-wheels begins that)"
        )
    print(f"building into {BUILT} …", flush=True)
    subprocess.run([*install, "--no-build-isolation", str(ROOT)], check=True, env=inherited)
    return inherited


def check(inherited: dict[str, str]) -> tuple[str, int]:
    """Run the tests, each file in a process of its own: the last line that each prints, and an exit status."""
    outcomes, failed = [], 0
    for file in sorted(TESTS.glob("test_*.py")):
        command = [sys.executable, "-P", "-m", "pytest", "-q", "-s", "-m", "gpu", "-p", "no:cacheprovider", str(file)]
        process = subprocess.Popen(command, cwd=ROOT, env=inherited, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        last = ""
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
        status = process.wait()
        outcomes.append(f"{file.name}: {last}" if status >= 0 else f"{file.name}: ended by signal {-status}")
        failed = failed or status
    return "; ".join(outcomes), failed
