"""How large a ring must be: the arithmetic, against rings that are really made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from transport import Schema, SharedRingBuffer, UpTo
from transport.cli import run
from transport.errors import UsageError
from transport.ring.sizing import ring_bytes, sized

SHARED_MEMORY = Path("/dev/shm")


def test_slots_are_what_is_on_the_way_what_a_stall_adds_and_two_batches() -> None:
    sizing = sized(1 << 20, rate=10.0, held_s=0.5, batch=8, stall_s=3.0, rings=4, mean_bytes=1000)
    assert sizing.slots == 5 + 30 + 16
    assert sizing.bytes_per_s == 40_000.0
    assert sizing.host_bytes >= 4 * sizing.ring_bytes


def test_samples_of_unfinished_groups_stay_in_their_slots() -> None:
    one, more = (
        sized(1 << 10, rate=2.0, held_s=1.0, batch=16 * 8, stall_s=0.0, samples=8, unfinished=unfinished)
        for unfinished in (0, 32)
    )
    assert (one.slots, more.slots) == (2 + 2 * 16 * 8, 2 + 2 * 16 * 8 + 32 * 8)
    assert more.in_use - one.in_use == 32 * 8


def test_what_a_rollout_may_be_ahead_bounds_what_waits() -> None:
    sizing = sized(1 << 10, rate=10.0, held_s=1.0, batch=64, stall_s=30.0, ahead=3)
    assert (sizing.slots, round(sizing.steps, 1)) == (10 + 4 * 64, 4.2)


def test_a_ring_that_does_nothing_still_has_two_slots() -> None:
    assert sized(1, rate=0, held_s=0, batch=0, stall_s=0).slots == 2


@pytest.mark.parametrize(
    "wrong",
    [{"slot_bytes": 0}, {"rate": -1.0}, {"rings": 0}, {"rate": 1e9}, {"samples": 0}, {"unfinished": -1}, {"ahead": -1}],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        sized(**{"slot_bytes": 1, "rate": 1.0, "held_s": 1.0, "batch": 1, "stall_s": 30.0, **wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize(("slots", "slot_bytes"), [(1, 1), (3, 4096), (100, 5000), (64, 1 << 16)])
def test_the_bytes_are_those_of_a_real_segment(slots: int, slot_bytes: int) -> None:
    with SharedRingBuffer.create(slots=slots, slot_bytes=slot_bytes) as ring:
        actual = (SHARED_MEMORY / ring.name.lstrip("/")).stat().st_size
    assert actual <= ring_bytes(slots, slot_bytes) <= actual + 5 * 4096


def test_the_command_takes_a_schema(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schema = Schema.of(tokens=("int32", UpTo(1000)))
    (tmp_path / "schema.json").write_text(schema.to_json())
    assert run(["size", "--schema", str(tmp_path / "schema.json"), "--rate", "2", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["slot_bytes"], found["slots"]) == (schema.max_bytes, 2 + 60 + 32)
    of_groups = ["--rate", "2", "--groups", "16", "--samples", "8", "--unfinished", "4", "--json", "-"]
    assert run(["size", "--slot-bytes", "4KiB", *of_groups]) == 0
    assert json.loads(capsys.readouterr().out)["slots"] == 2 + 60 + 2 * 16 * 8 + 4 * 8
    assert run(["size", "--slot-bytes", "4KiB"]) == 0
    assert "transport doctor --ring" in capsys.readouterr().out


def test_a_batch_is_given_as_payloads_or_as_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["size", "--slot-bytes", "1MiB", "--batch", "4", "--groups", "2"]) == 2
    assert "give either --batch N or --groups N" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["--slot-bytes", "1MiB", "--schema", "x.json"]])
def test_one_of_schema_and_size_is_needed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["size", *arguments]) == 2
    assert "give either --schema FILE or --slot-bytes SIZE" in capsys.readouterr().err
