"""Which tests `make pytest` leaves to `make nightly`: those that take long and seldom find what the others do not.

`@pytest.mark.nightly` leaves out a test, `@pytest.mark.nightly(keep=8)` all but eight of its cases, which are evenly
spread over the list of them, from one that depends on the test's name, and the same each time. A test that is asked
for by its name (FILE::TEST), or that failed before (--last-failed), runs whatever its marker is.
"""

from __future__ import annotations

import zlib
from collections import defaultdict

import pytest

SHORT = 2  # cases of each test that `make nightly SHORT=1` runs


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="run what the nightly marker leaves out, and nothing else")
    parser.addoption("--short", action="store_true", help=f"with --nightly: {SHORT} cases of each test at most")


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    nightly, short = config.getoption("--nightly"), config.getoption("--short")
    by_name = any("::" in argument for argument in config.args)
    if config.getoption("lf", False) or (by_name and not nightly):
        return
    left_out: set[pytest.Item] = set()
    for cases in _cases_of_each_test(items):
        marked = {case: marker for case in cases if (marker := case.get_closest_marker("nightly"))}
        keep = next(iter(marked.values())).kwargs.get("keep", 0) if marked else 0
        by_default = set(cases) - set(marked) | _spread(list(marked), keep)
        if not nightly:
            left_out.update(set(cases) - by_default)
            continue
        others = [case for case in cases if case not in by_default]
        left_out |= by_default | (set(others) - _spread(others, SHORT) if short else set())
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def _cases_of_each_test(items: list[pytest.Item]) -> list[list[pytest.Item]]:
    found = defaultdict(list)
    for item in items:
        found[item.nodeid.partition("[")[0]].append(item)
    return list(found.values())


def _spread(cases: list[pytest.Item], count: int) -> set[pytest.Item]:
    """``count`` of the cases, from another one on for each test, so that together they reach every wire and queue."""
    if count >= len(cases):
        return set(cases)
    first = zlib.crc32(cases[0].nodeid.partition("[")[0].encode())
    return {cases[(first + at * len(cases) // count) % len(cases)] for at in range(count)}
