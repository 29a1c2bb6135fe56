"""Programs in C++ that measure: built from the project's sources when they are needed, in release mode."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from transport.bench.processes import run_group
from transport.errors import InternalError, LinkError, MissingDependencyError
from transport.runtime.installing import install

ROOT = Path(__file__).resolve().parents[2]
_BUILD_S = 900.0
_TIDY_S = 0.5  # of a build that is interrupted: half an object file would fail the next one


def build(name: str, definitions: Sequence[str] = ()) -> Path:
    """Build the program ``name`` of native/tests where its sources have changed. MissingDependencyError: no cmake."""
    sources, folder = ROOT / "native", ROOT / "build" / "bench"
    cmake = shutil.which("cmake") or shutil.which("cmake", path=str(Path(sys.executable).parent))
    if cmake is None:
        raise MissingDependencyError(f"the C++ rows need cmake: {install('cmake')}")
    options = ["-DTRANSPORT_NATIVE_TESTS=ON", "-DCMAKE_BUILD_TYPE=Release", *definitions]
    for command in (
        [cmake, "-S", str(sources), "-B", str(folder), *options],
        [cmake, "--build", str(folder), "--target", name],
    ):
        try:
            run_group(command, {}, _BUILD_S, tidy_s=_TIDY_S)
        except LinkError as error:
            raise InternalError(f"{' '.join(command[:4])} failed: {error}") from error
    return next(path for path in folder.rglob(name) if path.is_file())
