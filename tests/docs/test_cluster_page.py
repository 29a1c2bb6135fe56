"""docs/CLUSTER.md says what the simulation of the pool says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from benchmark_programs import benchmark_module

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| (\d+) \| ([\d.]+) % \| (\d+) \| (\d+) MB \|$", re.MULTILINE)
KIB_OF_A_LINK = 56  # at the client, the middle of what was measured


pool_reuse = benchmark_module("pool_reuse")


@pytest.mark.nightly
def test_the_table_is_the_simulations() -> None:
    table = (ROOT / "docs" / "CLUSTER.md").read_text().partition("<!-- pool_reuse -->")[2].partition("<!-- /")[0]
    rows = ROW.findall(table)
    assert len(rows) == 2
    for idle, share, links, megabytes in rows:
        reuse = pool_reuse.simulate(10_000, 100.0, int(idle))
        assert (share, links) == (f"{100 * reuse.share:.1f}", f"{reuse.open_links:.0f}")
        assert int(megabytes) == round(reuse.open_links * KIB_OF_A_LINK * 1024 / 1e6)


def test_few_servers_are_always_connected() -> None:
    assert pool_reuse.simulate(64, 100.0, 256).share == 1.0
