"""BlockingClient takes what UCXXClient takes, type checkers see it; and a UCXXClient without a loop names it."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import NETWORK_WIRE, noise, serving

from transport import BlockingClient, UCXXClient
from transport.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
GOOD = """
from transport import BlockingClient
with BlockingClient(ack="manual", wire={"tcp"}, verify=False) as client:
    for outcome in client.read_many([], concurrency=2):
        print(outcome.index, outcome.error)
    client.warm("127.0.0.1:1")
"""
BAD = """
from transport import BlockingClient, UCXXClient
client = BlockingClient(wires={"tcp"})
BlockingClient(ack="later")
client.read_many([], concurency=2)
client.discard("", wait=1.0)
async def use() -> None:
    with UCXXClient() as wrong:
        pass
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_a_strict_type_checker_refuses_what_is_misspelt(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text(GOOD)
    bad.write_text(BAD)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--cache-dir", ROOT / ".mypy_cache",
         good, bad],
        cwd=ROOT, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert not [line for line in lines if "good.py" in line]
    assert not [line for line in lines if "bad.py" not in line]
    refused = {int(line.partition("bad.py:")[2].partition(":")[0]) for line in lines}
    assert refused == {3, 4, 5, 6, 8}, done.stdout


METHODS = ("__init__", "read", "read_many", "ack")


@pytest.mark.parametrize("method", METHODS)
def test_arguments_and_defaults_are_those_of_the_other_client(method: str) -> None:
    blocking = inspect.signature(getattr(BlockingClient, method)).parameters
    assert dict(blocking) == dict(inspect.signature(getattr(UCXXClient, method)).parameters)


def test_a_client_made_without_a_loop_names_the_one_that_needs_none() -> None:
    with pytest.raises(UsageError, match="without one use BlockingClient"):
        UCXXClient()


@pytest.mark.ucx
def test_a_client_in_a_plain_with_names_the_one_for_it_and_is_closed() -> None:
    async def use() -> UCXXClient:
        client = UCXXClient()
        with pytest.raises(UsageError, match="for a plain `with` use BlockingClient"), client:  # type: ignore[attr-defined]
            pass
        return client

    assert repr(asyncio.run(use())).startswith("<UCXXClient closed")


@pytest.mark.ucx
@pytest.mark.parametrize("wire", ["mapped", NETWORK_WIRE])
def test_an_outcome_has_the_index_of_its_ticket(wire: str) -> None:
    with serving(slots=16, slot_bytes=70_000) as (ring, _), BlockingClient(wire={wire}, ack="manual") as client:  # type: ignore[arg-type]
        tickets = [ring.write_raw(noise(size, seed)) for seed, size in enumerate((100, 60_000, 50, 70_000, 10, 20))]
        ring.discard(tickets[4])
        given = [*tickets, tickets[0], tickets[1].to_text()]  # one may be asked for twice
        outcomes = list(client.read_many(given, concurrency=3))
        assert sorted(outcome.index for outcome in outcomes) == list(range(len(given)))
        named = [*tickets, tickets[0], tickets[1]]
        for index, ticket, payload, error in outcomes:
            assert ticket == named[index]
            assert (payload is None) == (index == 4)
            assert (error is not None) == (index == 4)
