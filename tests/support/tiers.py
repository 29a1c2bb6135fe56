"""Which tests `make pytest` leaves to `make nightly` and to `make verbs`.

To `make nightly`: those that take long and seldom find what the others do not. Properties run there as well, with
many examples (properties.py).

`@pytest.mark.nightly` leaves out a test, `@pytest.mark.nightly(keep=8)` all but eight of its cases, which are evenly
spread over the list of them, from one that depends on the test's name, and the same each time. A test that is asked
for by its name (FILE::TEST), that failed before (--last-failed), or that needs a framework (--frameworks, which the
night lacks) runs whatever its marker is.

To `make verbs`: tests marked `verbs`, which need software RoCE and a second host. There `--verbs` runs them and, over
the wires that TEST_WIRES names, the tests of `ROOMS` whose clients use these wires, without the cases of other ones.
"""

from __future__ import annotations

import sys
import zlib
from collections import defaultdict
from types import ModuleType, SimpleNamespace

import pytest

SHORT = 2  # cases of each test that `make nightly SHORT=1` runs
ROOMS = ("client", "server", "claims", "weights", "guarantees")
_NO_PARAMETERS = SimpleNamespace(params={})


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="run what the nightly marker leaves out, and nothing else")
    parser.addoption("--short", action="store_true", help=f"with --nightly: {SHORT} cases of each test at most")
    parser.addoption("--verbs", action="store_true", help="run the tests of `make verbs` and nothing else")
    parser.addoption("--share", default="1/1", metavar="N/M", help="with --nightly: the Nth of M shares of the files")


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    nightly, short = config.getoption("--nightly"), config.getoption("--short")
    by_name = any("::" in argument for argument in config.args)
    if config.getoption("--verbs"):
        _leave_out(config, items, {item for item in items if not _is_over_verbs(item)})
    elif not by_name:
        _leave_out(config, items, {item for item in items if _is_elsewhere(item)})
    if config.getoption("lf", False) or config.getoption("--frameworks") or (by_name and not nightly):
        return
    share, shares = map(int, config.getoption("--share").split("/"))
    left_out: set[pytest.Item] = set()
    for cases in _cases_of_each_test(items):
        marked = {case: marker for case in cases if (marker := case.get_closest_marker("nightly"))}
        keep = next(iter(marked.values())).kwargs.get("keep", 0) if marked else 0
        by_default = set(cases) - set(marked) | _spread(list(marked), keep)
        if not nightly:
            left_out.update(set(cases) - by_default)
            continue
        by_default = {case for case in by_default if not _is_property(case)}
        others = [case for case in cases if case not in by_default]
        if zlib.crc32(cases[0].path.name.encode()) % shares != share - 1:
            left_out.update(cases)
            continue
        left_out |= by_default | (set(others) - _spread(others, SHORT) if short else set())
    _leave_out(config, items, left_out)


def _leave_out(config: pytest.Config, items: list[pytest.Item], left_out: set[pytest.Item]) -> None:
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def _is_elsewhere(item: pytest.Item) -> bool:
    return item.get_closest_marker("verbs") is not None


def _is_over_verbs(item: pytest.Item) -> bool:
    if _is_elsewhere(item):
        return True
    room = item.path.relative_to(item.config.rootpath / "tests").parts[0]
    if room not in ROOMS or item.get_closest_marker("ucx") is None:
        return False
    if not _names_network(item.module):  # type: ignore[attr-defined]
        return False
    parameters = [each for each in getattr(item, "callspec", _NO_PARAMETERS).params.values() if isinstance(each, str)]
    # What is on the way of a connection by TCP (`way`) sees no RDMA.
    return not {"mapped", "shm"}.intersection(parameters) and "way" not in getattr(item, "fixturenames", ())


def _is_property(item: pytest.Item) -> bool:
    return bool(getattr(getattr(item, "obj", None), "is_hypothesis_test", False))


def _names_network(module: ModuleType) -> bool:
    """Return whether its clients use the wires of `helpers.NETWORK`, named there or in a module of support."""
    names = vars(module)
    if {"NETWORK", "NETWORK_WIRE", "over_ucx", "every_wire"} & names.keys():
        return True
    homes = {getattr(each, "__module__", None) or getattr(each, "__name__", "") for each in names.values()}
    return any(hasattr(sys.modules.get(home), "NETWORK") for home in homes - {"helpers"})


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
