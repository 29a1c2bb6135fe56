"""Runs on one host, also with names that begin alike: none gets another's payloads, also where no queue was given."""

from __future__ import annotations

import numpy as np
import pytest
from packers import Worker

from transport import RingOptions
from transport.errors import ConfigurationError, UsageError
from transport.queue import open_queue


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
        with open_queue("rings:") as queue:
            assert len(queue.claim(1, 0.3, consumer="a")) == found
    finally:
        worker.cleanup_ucxx()


def test_a_name_of_a_run_that_no_ring_can_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSPORT_RUN", "../seven")
    with pytest.raises(ConfigurationError, match="TRANSPORT_RUN"):
        open_queue("rings:")


@pytest.mark.ucx
def test_a_name_that_is_the_beginning_of_another_one_does_not_find_its_rings_and_notices(prefix: str) -> None:
    first, second = f"{prefix}job1", f"{prefix}job10"
    worker, other = Worker(), Worker()
    with open_queue(f"rings:{first}") as queue, open_queue(f"rings:{second}") as theirs:
        try:
            worker.setup_ucxx(slots=2, mode="thread", ring=RingOptions(slot_bytes=64), rings=queue)
            other.setup_ucxx(slots=2, mode="thread", ring=RingOptions(slot_bytes=64), rings=theirs)
            assert theirs.announce("0policy", 1)
            assert queue.announce("policy", 2)
            with open_queue(f"rings:{first}") as trainer:
                other.write_to_buffer({"step": np.zeros(1)})
                assert trainer.claim(1, 0.3, consumer="a") == []
                assert trainer.latest("00policy") is None
                worker.write_to_buffer({"step": np.zeros(1)})
                [claim] = trainer.claim(1, 30.0, consumer="a")
                assert claim.ticket_id.startswith(worker.ring.ring_id)
            with pytest.raises(UsageError):
                Worker().setup_ucxx(slots=2, mode="thread", rings=queue, name=f"{second}-mine")
        finally:
            worker.cleanup_ucxx()
            other.cleanup_ucxx()
