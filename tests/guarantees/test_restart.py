"""A job that is killed whole, or with its hosts, and started again: its model has every payload once.

benchmarks/restart.py has the job, whose model is a ledger, and its harness. `--seeds` of it are as many jobs.
"""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

import pytest
from benchmark_programs import run_benchmark
from claimed import claim_each
from found_rings import consume, seen, take

from transport import Schema, SharedRingBuffer
from transport.claims.open import open_rings
from transport.errors import CheckpointDamagedError, DestinationError
from transport.packer.consumed_record import ConsumedRecord
from transport.snapshots import restore, snapshot, steps

pytestmark = pytest.mark.slow


def jobs(*arguments: str) -> list[dict[str, Any]]:
    done = run_benchmark("restart", *arguments, "--json", "-", timeout_s=500.0)
    if done.returncode == 77:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
    return rows


@pytest.mark.guarantee("the whole job is killed")
@pytest.mark.parametrize("seed", [1, pytest.param(101, marks=pytest.mark.nightly)])
def test_a_job_killed_whole_is_restored_with_other_rings_and_trains_on_each_once(seed: int) -> None:
    count = 2 if seed == 1 else 30
    rows = jobs("--first", str(seed), "--seeds", str(count), "--payloads", "300")
    assert all(row["kills"] for row in rows)
    assert [(row["lost"], row["twice"], row["problem"]) for row in rows] == [(0, 0, "")] * count


@pytest.mark.nightly
@pytest.mark.guarantee("every process of a job is killed, its rings in files")
@pytest.mark.guarantee("their host starts again")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("way", "hosts", "count"),
    [
        ("files", 1, 2),
        ("files", 4, 1),
        pytest.param("files", 1, 30, marks=pytest.mark.nightly),
        pytest.param("files", 4, 5, marks=pytest.mark.nightly),
        pytest.param("snapshot", 4, 5, marks=pytest.mark.nightly),
    ],
)
def test_a_job_killed_whole_goes_on_over_files_and_on_several_hosts(way: str, hosts: int, count: int) -> None:
    rows = jobs("--way", way, "--hosts", str(hosts), "--seeds", str(count), "--payloads", "300")
    assert all(row["kills"] for row in rows)
    assert [(row["lost"], row["twice"], row["problem"]) for row in rows] == [(0, 0, "")] * count


@pytest.mark.nightly
@pytest.mark.guarantee("the same, while a snapshot is taken or restored")
@pytest.mark.parametrize("event", ["taken", "restoring"])
def test_a_job_killed_at_a_cut_or_while_it_restores_loses_nothing_and_repeats_nothing(event: str) -> None:
    [row] = jobs("--first", "7", "--seeds", "1", "--payloads", "300", "--kills", "3", "--only", event)
    assert row["kills"][event] >= 1 and (row["lost"], row["twice"], row["problem"]) == (0, 0, "")


SCHEMA = Schema.of(number=("int64",))


@pytest.mark.guarantee("the destination of snapshots is away, full or slow, or returns other bytes")
def test_a_job_whose_destination_fails_goes_on_and_is_restored_to_the_step_before(tmp_path: Path) -> None:
    """Away for the second snapshot, other bytes in the third: the first one and its checkpoint are what is left."""
    prefix = f"restart-{secrets.token_hex(4)}-"
    place = tmp_path / "destination"
    place.mkdir()
    checkpoints: dict[int, tuple[list[int], bytes, str]] = {}
    with SharedRingBuffer.create(SCHEMA, slots=16, prefix=prefix) as ring, open_rings(f"rings:{prefix}") as queue:
        ring.write_many([{"number": number} for number in range(12)])
        model: list[int] = []
        record = ConsumedRecord()
        for step in (1, 2, 3):
            for payload in seen(parts := take(queue, 3)):
                name, slot, generation = payload.name.split("/")
                model.append(int(payload.data[:8].view("int64")[0]))
                assert record.accept(name, int(slot), int(generation), 0)
            assert consume(parts) == [True] * 3
            del payload, parts
            if step == 2:
                place.rename(tmp_path / "away")
            taken = snapshot(queue, str(place), step)
            checkpoints[step] = list(model), record.to_bytes(), taken.attempt
            if step == 2:
                with pytest.raises(DestinationError):
                    taken.wait(60)
                (tmp_path / "away").rename(place)
            else:
                taken.wait(60)
        assert len(model) == 9
    [data] = (place / "run/snapshots/step-000000000003").rglob("*.payloads")
    data.write_bytes(bytes(data.stat().st_size))
    assert list(steps(str(place))) == [1, 3]
    with SharedRingBuffer.create(SCHEMA, slots=16, prefix=prefix) as ring:
        with pytest.raises(CheckpointDamagedError, match="checksum mismatch"):
            restore(str(place), 3, ring)
        assert ring.unread() == []
        model, kept, attempt = checkpoints[1]
        restore(str(place), 1, ring, attempt=attempt, consumed=[ConsumedRecord.from_bytes(kept)])
        model += [int(claim.payload["number"]) for claim in claim_each(ring, 100)]
    assert sorted(model) == list(range(12))
