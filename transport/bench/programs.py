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


def build(root: Path, name: str, definitions: Sequence[str] = ()) -> Path:
    """The program ``name`` of native/tests, made anew where its sources have changed.

    Raises:
        MissingDependencyError: the sources or cmake are not here.
    """
    sources, folder = root / "native", root / "build" / "bench"
    if not (sources / "tests" / f"{name}.cpp").exists():
        raise MissingDependencyError(
            f"the C++ rows need the project's sources, which are not in {sources}; run in a checkout"
        )
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
