"""The last build of this repository that spoke the former version of the wire, from its history, in build/former."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from transport.wire import frames

_ROOT = Path(__file__).resolve().parents[2]
_FRAMES = "transport/wire/frames.py"
# Runs at the start of each process, also of those that the package starts: an editable installation of the present
# build has a finder in sys.meta_path, before every folder.
_SITECUSTOMIZE = """
import sys
sys.meta_path[:] = [each for each in sys.meta_path if not type(each).__name__.startswith("ScikitBuild")]
"""


def _git(*words: str) -> str:
    """What git says. CalledProcessError if it fails."""
    return subprocess.run(["git", "-C", str(_ROOT), *words], check=True, capture_output=True, text=True).stdout.strip()


def _version(commit: str) -> int:
    found = re.search(r"^VERSION = (\d+)", _git("show", f"{commit}:{_FRAMES}"), re.MULTILINE)
    return int(found[1]) if found else 0


def _commit() -> str:
    """The last one before the present version. Skips where the history does not have it."""
    newer = ""
    try:
        for commit in _git("log", "--first-parent", "--format=%H", "--", _FRAMES).split():
            if _version(commit) < frames.VERSION:
                return _git("rev-parse", f"{newer}^")
            newer = commit
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"two builds are not tested: git has no history here: {getattr(error, 'stderr', error)}")
    pytest.skip(
        f"two builds are not tested: no commit of this history speaks version {frames.VERSION - 1} (a shallow clone?)"
    )


@functools.cache
def former_build() -> Path:
    """A folder from which that build is imported; made once for a commit, which takes about a minute."""
    commit = _commit()
    made = _ROOT / "build" / "former" / commit
    if not made.exists():
        made.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=made.parent) as folder:
            source, site = Path(folder) / "source", Path(folder) / "site"
            source.mkdir()
            archive = subprocess.run(["git", "-C", str(_ROOT), "archive", commit], check=True, capture_output=True)
            subprocess.run(["tar", "x", "-C", str(source)], input=archive.stdout, check=True)
            command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--quiet"]
            done = subprocess.run(
                [*command, "--target", str(site), str(source)], capture_output=True, text=True, env=_plain_environment()
            )
            assert done.returncode == 0, f"the former build {commit} was not made: {done.stderr[-2000:]}"
            (site / "sitecustomize.py").write_text(_SITECUSTOMIZE)
            site.rename(made)
    return made


def _plain_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("UCX", "PYTHONPATH"))}


def environment_of(folder: Path) -> dict[str, str]:
    """Of processes that are of that build."""
    return {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}  # the current folder has the present build
