"""Fixtures of the tests that need a CUDA device."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_payloads import opened


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print a failure at once: if the driver ends this process later, pytest prints nothing more."""
    if report.failed:
        print(f"\n{report.nodeid}, {report.when}:\n{report.longreprtext}", flush=True)


@pytest.fixture(scope="module")
def device() -> Any:
    """The real CuPy."""
    return opened()


@pytest.fixture(scope="module")
def torch(device: Any) -> Any:
    """The real torch, whose context on the device is made."""
    found = pytest.importorskip("torch", reason="torch is not installed")
    found.zeros(3, device="cuda").sum().item()
    return found
