"""transport doctor on CUDA: no driver, no CuPy, no device, two devices that reach each other or do not."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from transport.doctor import cuda


@pytest.fixture
def host(two_devices: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A host with driver, CuPy and two devices."""
    driver = tmp_path / "version"
    driver.touch()
    monkeypatch.setattr(cuda, "_DRIVER", driver)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    runtime = two_devices.cuda.runtime
    runtime.getDeviceProperties = lambda number: {"name": f"Card {number}".encode()}
    runtime.runtimeGetVersion = lambda: 13000
    runtime.deviceCanAccessPeer = lambda a, b: 1
    return two_devices


def test_devices_and_their_reach_are_named(host: Any) -> None:
    found = {check.name: (check.status, check.detail) for check in cuda.checks()}
    assert found == {
        "cuda": ("ok", "2 devices: Card 0, Card 1; CUDA 13000"),
        "cuda peers": ("ok", "all 2 devices access each other's memory"),
    }


def test_devices_that_do_not_reach_each_other_are_named(host: Any) -> None:
    host.cuda.runtime.deviceCanAccessPeer = lambda a, b: a < b
    *_, peers = cuda.checks()
    assert (
        peers.status == "warn"
        and "1 pairs cannot access each other's memory: 1→0; their copies go through the host" in peers.detail
    )
    assert peers.remedy


def test_what_is_missing_is_said_with_its_remedy(host: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    host.fake.count = 0
    (none,) = cuda.checks()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (no_cupy,) = cuda.checks()
    monkeypatch.setattr(cuda, "_DRIVER", tmp_path / "nothing")
    (no_driver,) = cuda.checks()
    assert (none.status, none.detail) == ("warn", "no CUDA device")
    assert no_cupy.status == "warn" and "pip install 'cupy-cuda12x" in no_cupy.remedy
    assert no_driver.status == "ok" and "host memory" in no_driver.detail


def test_one_device_has_nobody_to_reach(host: Any) -> None:
    host.fake.count = 1
    assert [check.name for check in cuda.checks()] == ["cuda"]
