"""What has passed is not run again: `--passed FILE` leaves out the tests that FILE names, and adds those that pass.

For runs of one commit by several users or with more packages each, one after the other: each runs what the ones before
it had to skip. A test is named as pytest does, with its parameters; one that is tried again runs.
"""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--passed", type=Path, metavar="FILE", help="leave out what it names, and add what passes")


def pytest_configure(config: pytest.Config) -> None:
    if file := config.getoption("--passed"):
        config.pluginmanager.register(Passed(file, writes=not hasattr(config, "workerinput")))


class Passed:
    """The names in the file. Workers of pytest-xdist only read it."""

    def __init__(self, file: Path, writes: bool) -> None:
        self._file = file
        self._writes = writes
        self._before = set(file.read_text(encoding="utf-8").splitlines()) if file.exists() else set()
        self._ran: set[str] = set()
        self._failed: set[str] = set()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if config.getoption("lf", False):
            return
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in self._before])
        items[:] = [item for item in items if item.nodeid not in self._before]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid)
        elif report.when == "call" and report.passed:
            self._ran.add(report.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self._before:
            session.exitstatus = pytest.ExitCode.OK
        if self._writes:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            names = sorted(self._before | (self._ran - self._failed))
            self._file.write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
