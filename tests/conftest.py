"""Fixtures of all tests: after each one, nothing may be left behind."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import os
import secrets
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import patience  # noqa: F401  # the first import of the package
import pytest
from fake_cupy import fake_cupy
from frameworks import Frameworks
from mounts import own_shared_memory
from prepared import prepared
from properties import choose_profile

from transport.testing import ResourceSnapshot, mark_descendants, run

# For `benchmarks`. Last: the package is the one that is installed, with its native part, and this folder has it too.
sys.path.append(str(Path(__file__).resolve().parents[1]))

pytest.register_assert_rewrite(
    *("store_conformance", "store_model"),
    *("cooldown_runs", "native_rings", "packers", "supervised", "demos"),
    *("found_rings", "mapped_views", "member_groups", "sameness", "scripted_queue"),
)

pytest_plugins = ["tiers", "passed", "rewritten"]

gc.disable()  # until the first test: a collection makes much and lets go of little

# A shell without job control starts what ends in & with SIGINT ignored; children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

if "PYTEST_XDIST_WORKER" in os.environ:
    own_shared_memory()  # so that one worker's segments are no leaks of the other's tests


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--frameworks", action="store_true", help="run the tests of adapters, all of whose frameworks must be installed"
    )


def pytest_configure(config: pytest.Config) -> None:
    choose_profile(nightly=config.getoption("--nightly"))  # before files of tests are imported
    config.pluginmanager.register(Frameworks(config), "frameworks")
    config.pluginmanager.register(SharedFixtures(), "shared fixtures")


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """What passed only when it was tried again is a defect as well: it is named last."""
    if config.getoption("lf", False):
        for report in terminalreporter.getreports("passed"):
            if report.when == "call":
                terminalreporter.write_line(f"NEEDED A SECOND RUN {report.nodeid}", red=True)


@pytest.fixture
def prefix() -> str:
    """Of the rings of this test alone."""
    return f"rings-{secrets.token_hex(4)}-"


@pytest.fixture(scope="session", autouse=True)
def warm_up() -> Iterator[None]:
    """What is opened once for the life of the process is opened before the first test, so that it is no leak."""
    mark_descendants()
    run(asyncio.sleep(0))
    resource_tracker.ensure_running()  # multiprocessing's helper process and the pipe to it
    with prepared():
        gc.collect()
        gc.freeze()  # keeps the searches of the leak check, and of every collection, among what tests make
        gc.enable()
        yield
        gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def lasting(warm_up: None) -> Iterator[None]:
    """What the tests of a file imported and cached stays, and is not searched again after every later test."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A stand-in for CuPy and its device; `cupy.fake` says what was asked of it."""
    module = fake_cupy()
    monkeypatch.setitem(sys.modules, "cupy", module)
    yield module
    gc.collect()  # what arrays do when they are gone is this device's
    module.fake.end()


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """As `cupy`, on a host with two devices."""
    module = fake_cupy(2)
    monkeypatch.setitem(sys.modules, "cupy", module)
    yield module
    gc.collect()  # what arrays do when they are gone is this device's
    module.fake.end()


@pytest.fixture(scope="session")
def ucx_warm_up() -> None:
    """ucxx opens files of its own at its first import."""
    if importlib.util.find_spec("ucxx"):
        from transport.wire import library as ucx

        ucx.library()


@pytest.fixture(autouse=True)
def leak_check(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves segments, descriptors, threads, tasks or processes behind, and name them."""
    if request.node.get_closest_marker("ucx"):
        request.getfixturevalue("ucx_warm_up")
    before = _left.pop() if _left else ResourceSnapshot.take()
    threads = {id(thread): thread.name for thread in threading.enumerate()}  # the watchdog of this test is a new one
    before = before._replace(threads=threads)
    yield
    after = ResourceSnapshot.take()
    leaks = before._new_in(after) and before.leaks()
    if leaks:
        pytest.fail("left behind: " + "; ".join(leaks), pytrace=False)
    _left.append(after)


# What was there after the last test is there before the next one, unless a fixture that several tests share comes or
# goes between them. A second look would be half of the check's time.
_left: list[ResourceSnapshot] = []


class SharedFixtures:
    """Registered, since pytest calls a conftest's own hooks for no fixture of the session."""

    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        if fixturedef.scope != "function":
            _left.clear()

    def pytest_fixture_post_finalizer(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        if fixturedef.scope != "function":
            _left.clear()
