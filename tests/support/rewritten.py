"""Rewrites the asserts of each test file once for all workers of pytest-xdist.

Workers collect the same files in the same order, so that after a checkout each of them would rewrite every file.
Instead each begins with a share of the files, and finds the others in the cache.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest
from _pytest.assertion import rewrite


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    worker = getattr(session.config, "workerinput", None)
    if worker is not None and not sys.dont_write_bytecode:
        rewrite_share(session.config, int(worker["workerid"].removeprefix("gw")), worker["workercount"])


def rewrite_share(config: pytest.Config, number: int, count: int) -> None:
    """Rewrite every ``count``-th of the files that are not in pytest's cache, of those that it was asked for."""
    files: set[Path] = set()
    for argument in config.args:
        path = config.invocation_params.dir / argument.partition("::")[0]
        files.update(path.rglob("test_*.py") if path.is_dir() else [path])
    for path in sorted(files)[number % count :: count]:
        folder = rewrite.get_cache_dir(path)
        cached = folder / f"{path.stem}{rewrite.PYC_TAIL}"
        if not cached.exists() and rewrite.try_makedirs(folder):
            with contextlib.suppress(OSError, SyntaxError, ValueError):  # which its collection reports
                source_hash, code = rewrite._rewrite_test(path, config)
                rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source_hash, cached)
