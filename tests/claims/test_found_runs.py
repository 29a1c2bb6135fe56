"""Runs on one host, also with names that begin alike: none gets another's payloads, also where no queue was given."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from found_rings import names, some, take
from packers import Worker

from transport import RingOptions, Rollout, Schema, SharedRingBuffer, Trainer, open_rings
from transport.claims import rings
from transport.errors import ConfigurationError, UsageError

SCHEMA = Schema.of(x="int64")


@pytest.mark.ucx
@pytest.mark.parametrize(
    ("variables", "found"),
    [({"TRANSPORT_RUN": "se-ven"}, 1), ({"TRANSPORT_RUN": "se"}, 0), ({"SLURM_JOB_ID": "se-ven"}, 1), ({}, 0)],
)
def test_a_run_that_has_a_name_keeps_its_payloads_to_itself(
    variables: dict[str, str], found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker()
    with monkeypatch.context() as patched:
        patched.setenv("TRANSPORT_RUN", "se-ven")
        worker.setup_ucxx(slots=2, mode="thread", ring=RingOptions(slot_bytes=64))
    try:
        worker.write_to_buffer({"step": np.zeros(1)})
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with open_rings("rings:") as queue:
            assert len(take(queue, 1, 0.3)) == found
    finally:
        worker.cleanup_ucxx()


def test_a_name_of_a_run_that_no_ring_can_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSPORT_RUN", "../seven")
    with pytest.raises(ConfigurationError, match="TRANSPORT_RUN"):
        open_rings("rings:")


@pytest.mark.ucx
def test_a_name_that_is_the_beginning_of_another_one_does_not_find_its_rings_and_notices(prefix: str) -> None:
    first, second = f"{prefix}job1", f"{prefix}job10"
    worker, other = Worker(), Worker()
    with open_rings(f"rings:{first}") as queue, open_rings(f"rings:{second}") as theirs:
        try:
            worker.setup_ucxx(slots=2, mode="thread", ring=RingOptions(slot_bytes=64), rings=queue)
            other.setup_ucxx(slots=2, mode="thread", ring=RingOptions(slot_bytes=64), rings=theirs)
            assert theirs.announce("0policy", 1)
            assert queue.announce("policy", 2)
            with open_rings(f"rings:{first}") as trainer:
                other.write_to_buffer({"step": np.zeros(1)})
                assert take(trainer, 1, 0.3) == []
                assert trainer.latest("00policy") is None
                worker.write_to_buffer({"step": np.zeros(1)})
                assert names(some(trainer, 1))[0].startswith(worker.ring.ring_id)
            with pytest.raises(UsageError):
                Worker().setup_ucxx(slots=2, mode="thread", rings=queue, name=f"{second}-mine")
        finally:
            worker.cleanup_ucxx()
            other.cleanup_ucxx()


WRITER = """
import sys
from transport import Schema, SharedRingBuffer
with SharedRingBuffer.create(Schema.of(x="int64"), slots=1, name=sys.argv[1]):
    print("there", flush=True)
    sys.stdin.read()
"""


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("apart", [True, False])
def test_a_trainer_names_the_processes_of_rollouts_that_were_started_apart_without_a_run(
    prefix: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, apart: bool
) -> None:
    monkeypatch.setattr(rings, "UNNAMED", prefix)
    with (
        subprocess.Popen(
            [sys.executable, "-P", "-c", WRITER, f"{prefix}a"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=apart,
        ) as other,
        SharedRingBuffer.create(SCHEMA, slots=1, name=f"{prefix}b"),
        Trainer(SCHEMA, f"rings:{prefix}") as trainer,
    ):
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline()
        assert trainer.take(1) is None
        told = [record.getMessage() for record in caplog.records if "TRANSPORT_RUN" in record.getMessage()]
        assert len(told) == apart
        assert all(str(pid) in text for text in told for pid in (other.pid, os.getpid()))
        other.stdin.close()


@pytest.mark.parametrize("ended", [True, False])
def test_a_trainer_names_the_processes_of_rings_that_had_ended_before_it_came(
    prefix: str, caplog: pytest.LogCaptureFixture, ended: bool
) -> None:
    with SharedRingBuffer.create(SCHEMA, slots=1, name=f"{prefix}former") as ring:
        ring.write({"x": 1})
        if ended:
            ring.end_data()
        with caplog.at_level("INFO", "transport"), Trainer(SCHEMA, f"rings:{prefix}") as trainer:
            told = [record.getMessage() for record in caplog.records if ring.name in record.getMessage()]
            assert len(told) == ended
            assert all(str(os.getpid()) in text for text in told)
            batch = trainer.take(1)
            assert batch is not None
            batch.consume()


@pytest.mark.ucx
def test_a_ring_that_is_found_again_by_its_name_is_of_the_same_run_also_with_a_directory(tmp_path: Path) -> None:
    def segment(run: str) -> str:
        with Rollout(SCHEMA, f"rings+sqlite://{tmp_path}/{run}.db", name="worker", slots=2, mode="thread") as rollout:
            return rollout.ring.name

    assert segment("one") == segment("one") != segment("two")
