"""A short soak with every kind of fault loses nothing, and one with a planted fault finds it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmark_programs import BENCHMARKS
from preloaded import needs_compiler

SOAK = BENCHMARKS / "soak"
BUILD = BENCHMARKS.parent / "build" / "faults"

sys.path[:0] = [str(SOAK), str(BENCHMARKS / "harness")]
try:
    import mutations
    import payloads
    import run
    from planted import PLANTS
finally:
    del sys.path[:2]


def numbers(with_deadline: bool) -> int:
    """The first number of a payload that has a deadline, or has none."""
    return next(each for each in range(1000) if (payloads.deadline_s(0, each) is not None) == with_deadline)


@pytest.mark.parametrize(
    ("how", "with_deadline", "excused"),
    [
        ("discarded: StaleSlotError: the deadline has passed", True, True),
        ("discarded: StaleSlotError: the deadline has passed", False, False),
        ("discarded: its deadline has passed", True, True),
        ("discarded: PayloadLostError: nobody serves it", True, False),
        (run.VANISHED, True, True),
        (run.VANISHED, False, False),
        ("twice", True, False),
    ],
)
def test_only_a_deadline_excuses_a_delivery(how: str, with_deadline: bool, excused: bool) -> None:
    assert bool(run.excused((0, 0, numbers(with_deadline)), how)) == excused


# --- planted faults -----------------------------------------------------------------------------------
def test_every_module_that_is_marked_or_planted_into_is_there() -> None:
    """Where a module has moved, nothing would be marked, and nobody would notice."""
    spec = importlib.util.spec_from_file_location("soak_points", SOAK / "points" / "sitecustomize.py")
    assert spec is not None
    assert spec.loader is not None
    points = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(points)
    marked = {*points.CHANGES, *(name for plant in PLANTS.values() for name in plant.changes)}
    assert [name for name in sorted(marked) if importlib.util.find_spec(name) is None] == []


def test_every_planted_fault_finds_what_it_changes() -> None:
    """In a process of its own, which has them all afterwards."""
    program = "import sys; sys.path.append(sys.argv[1]); from importlib import import_module as module\n"
    program += "from planted import PLANTS\n"
    program += (
        "for plant in PLANTS.values():\n    for name, change in plant.changes.items():\n        change(module(name))\n"
    )
    subprocess.run([sys.executable, "-c", program, str(SOAK)], check=True)


def test_a_planted_fault_is_found_only_by_its_own_figure() -> None:
    clean = {"passed": True, "deliveries": 9, "lost": 0, "wrong": 0, "duplicated": 0, "crashes": [], "left_behind": []}
    assert mutations.found("", clean)
    assert not mutations.found("unfenced", clean)
    assert mutations.found("unfenced", clean | {"passed": False, "duplicated": 1})
    assert not mutations.found("unfenced", clean | {"passed": False, "lost": 1})
    assert not mutations.found("dropped", clean | {"passed": False, "lost": 9})
    assert not mutations.found("flipped", clean | {"passed": False, "lost": 1, "wrong": 1})


# --- a short soak ----------------------------------------------------------------------------------------
@pytest.mark.nightly
@pytest.mark.ucx
@pytest.mark.slow
def test_a_short_soak_loses_mixes_up_and_leaves_behind_nothing(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, SOAK, "--payloads", "2500", "--kills", "8", "--seed", "5", "--json", report]
    command += ["--folder", tmp_path / "run", "--stuck-s", "60"]
    if (BUILD / "stamp").exists():
        command += ["--build", BUILD]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=110)
    said = json.loads(report.read_text())
    assert done.returncode == 0, json.dumps(said, indent=1)
    assert (said["lost"], said["wrong"], said["duplicated"], said["unfinished"]) == (0, 0, 0, 0)
    assert said["payloads"] >= 2500
    assert said["kills"] >= 6


# --- over a bad network ------------------------------------------------------------------------------------
def over_the_network(folder: Path, *options: str) -> dict[str, Any]:
    """The report of a short run of network.py, with as many faults as fit into it."""
    command = [sys.executable, SOAK / "network.py", "--seed", "1", "--every-s", "0.03", "--stuck-s", "60"]
    command += ["--minutes", "0.1", "--folder", folder / "run", "--json", folder / "report.json", *options]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=110)
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    assert (done.returncode == 0) == report["passed"]
    return report


@pytest.mark.nightly
@pytest.mark.ucx
@pytest.mark.slow
@needs_compiler
def test_over_a_network_that_cuts_and_changes_every_payload_is_consumed_once_with_its_own_bytes(tmp_path: Path) -> None:
    report = over_the_network(tmp_path)
    assert report["passed"], json.dumps(report, indent=1)
    assert report["payloads"] > 100
    assert {"cut by RST", "cut by FIN", "stall", "slow", "flip in a payload", "flip in a message"} <= {
        *report["network"]
    }


@pytest.mark.nightly
@pytest.mark.ucx
@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(("plant", "only"), [("unverified", "flip in a payload"), ("dead-connection", "cut by RST")])
def test_a_soak_over_the_network_finds_a_planted_fault(tmp_path: Path, plant: str, only: str) -> None:
    report = over_the_network(tmp_path, "--plant", plant, "--only", only)
    assert mutations.found(plant, report), json.dumps(report, indent=1)
