"""Which tests `make adapters` runs, and that none of them is skipped unless it is said here why.

A test belongs to a framework if it is in tests/adapters/ (in a folder `NAME` or a file `test_NAME.py`), or is marked
`pytest.mark.adapters("NAME")`. `make pytest` skips those whose framework is not installed, and fails if a test that is
skipped for want of a framework belongs to none. `make adapters` runs them with --frameworks: an unexpected skip fails,
and so does a framework of which no test ran.

One test that starts Ray runs at a time, whichever worker has it: Ray gives its own start 30 s, which several clusters
at once on two cores exceed.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

ENGINES = ("vllm", "sglang", "torchft", "areal")  # in an environment of their own
INSTALLED = ("torch", "cupy", "ray", "cosmos_rl", "verl", "transferqueue")  # each has to have run a test
if importlib.util.find_spec("vllm") is not None:
    INSTALLED = ENGINES
NOT_INSTALLED = re.compile(
    r"\b(torch|cupy|ray|cosmos-rl|verl|transferqueue|vllm|sglang|torchft|areal)\b.* (is not installed|could not)",
    re.IGNORECASE,
)

STARTS_RAY = (
    "tests/adapters/test_ray",
    "tests/adapters/verl/test_manager.py",
    "tests/adapters/transferqueue/test_run.py",
)

_MARKED = re.compile(r"mark\.(adapters|gpu)\b")

# What is skipped in the environment of `make adapters` too: a pattern of the reason, and why it is not run.
ALLOWED = {
    r"no CUDA device": "the environment has no device; make gpu runs them where there is one",
    r"^verl is installed$": "it is about an environment without verl; make pytest runs it",
    r"^TransferQueue's own tests are not here": "its package has none; make transferqueue-sources fetches them",
    r"^NeMo-RL's sources are not on the path": "no release has its checkpoint engines; PYTHONPATH=CHECKOUT",
    r"^two hosts (cannot be made here|need redis-server)": "it needs root, network namespaces and Redis",
    r"^not run: ": "a block of the documentation that cannot run alone; the comment above it says why",
}


@contextlib.contextmanager
def _alone_with_ray() -> Iterator[None]:
    with (Path(tempfile.gettempdir()) / f"payload-transport-tests-with-ray-{os.geteuid()}").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def framework_of(item: pytest.Item) -> str | None:
    """The framework that a test belongs to."""
    marker = item.get_closest_marker("adapters")
    if marker is not None and marker.args:
        return str(marker.args[0])
    return _of_file(item.path) or ("cupy" if item.get_closest_marker("gpu") else None)


def _of_file(path: Path) -> str:
    """The framework of all tests of a file; none: ""."""
    match path.parts:
        case [*_, "tests", "adapters", file]:
            return Path(file).stem.removeprefix("test_")
        case [*_, "tests", "adapters", framework, _]:
            return framework
    return ""


class Frameworks:
    """The plugin that selects, counts and judges."""

    def __init__(self, config: pytest.Config) -> None:
        self._all = bool(config.getoption("--frameworks"))
        self._again = bool(config.getoption("lf", False))  # only what failed before
        self._run: dict[str, int] = defaultdict(int)
        self._skipped: dict[tuple[str, str], list[str]] = defaultdict(list)
        self._wrong: list[str] = []

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """A file without such tests may import what only `make pytest` has."""
        if self._all and collection_path.suffix == ".py" and _of_file(collection_path):
            return True if (_of_file(collection_path) in ENGINES) != (INSTALLED is ENGINES) else None
        if not self._all or collection_path.suffix != ".py" or _of_file(collection_path):
            return None
        return True if not _MARKED.search(collection_path.read_text(encoding="utf-8")) else None

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        chosen, others = [], []
        for item in items:
            framework = framework_of(item)
            if framework is not None:
                item.user_properties.append(("framework", framework))
            here = framework is not None and (framework in ENGINES) == (INSTALLED is ENGINES)
            (chosen if here else others).append(item)
        if self._all:
            config.hook.pytest_deselected(items=others)
            items[:] = chosen

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # outside the test's time limit
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        with _alone_with_ray() if item.nodeid.startswith(STARTS_RAY) else contextlib.nullcontext():
            return (yield)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._skip(report.nodeid, _of_file(Path(report.nodeid)), report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        framework = str(dict(report.user_properties).get("framework", ""))
        if report.skipped:
            self._skip(report.nodeid, framework, report)
        elif report.when == "call" and framework:
            self._run[framework] += 1

    def _skip(self, nodeid: str, framework: str, report: Any) -> None:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = reason.removeprefix("Skipped: ")
        self._skipped[framework, reason].append(nodeid)
        if self._all and not any(re.search(pattern, reason) for pattern in ALLOWED):
            self._wrong.append(f"{nodeid} is skipped with every framework installed: {reason}")
        if not self._all and not framework and NOT_INSTALLED.search(reason):
            self._wrong.append(
                f"{nodeid} is skipped ({reason}), and make adapters does not run it: mark it pytest.mark.adapters(…)"
            )

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):
            return  # the controller judges
        if self._all and not self._again:
            self._wrong += [f"no test of {name} ran" for name in INSTALLED if not self._run[name]]
        if self._wrong and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._all:
            terminalreporter.section("tests of each framework")
            for name in sorted({*self._run, *(framework for framework, _ in self._skipped)}):
                terminalreporter.write_line(f"{name or 'none':20} {self._run[name]:4} run")
                for (framework, reason), nodes in sorted(self._skipped.items()):
                    if framework == name:
                        why = next(
                            (text for pattern, text in ALLOWED.items() if re.search(pattern, reason)), "UNEXPECTED"
                        )
                        terminalreporter.write_line(f"{'':20} {len(nodes):4} skipped: {reason} ({why})")
        for line in self._wrong:
            terminalreporter.write_line(f"FAILED {line}", red=True)
