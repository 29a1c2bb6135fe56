"""docs/SCALING.md says what the simulation of the pool says."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| (\d+) \| ([\d.]+) % \| (\d+) \| (\d+) MB \|$", re.MULTILINE)
KIB_OF_A_LINK = 56  # at the client, the middle of what was measured


@pytest.fixture(scope="module")
def pool_reuse() -> ModuleType:
    """The program, which is no part of the package."""
    specification = importlib.util.spec_from_file_location("pool_reuse", ROOT / "benchmarks" / "pool_reuse.py")
    assert specification is not None and specification.loader is not None
    module = sys.modules["pool_reuse"] = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_the_table_is_the_simulations(pool_reuse: ModuleType) -> None:
    table = (ROOT / "docs" / "SCALING.md").read_text().partition("<!-- pool_reuse -->")[2].partition("<!-- /")[0]
    rows = ROW.findall(table)
    assert len(rows) == 4
    for idle, share, links, megabytes in rows:
        reuse = pool_reuse.simulate(10_000, 100.0, int(idle))
        assert (share, links) == (f"{100 * reuse.share:.1f}", f"{reuse.open_links:.0f}")
        assert int(megabytes) == round(reuse.open_links * KIB_OF_A_LINK * 1024 / 1e6)


def test_few_servers_are_always_connected(pool_reuse: ModuleType) -> None:
    assert pool_reuse.simulate(64, 100.0, 256).share == 1.0
