"""ClaimBook: what a trainer asks of the queue beyond claims themselves. (The rest is tested through the packer.)"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import pytest
from helpers import eventually

from transport import SharedRingBuffer, UCXXDataPackerMixin
from transport.errors import UsageError
from transport.packer.claims import ClaimBook
from transport.queue import Claim, RingQueue
from transport.settings import DEFAULTS


@pytest.fixture
def ring(queue: RingQueue) -> Iterator[SharedRingBuffer]:
    """Whose payloads the queue hands out."""
    with SharedRingBuffer.create(slots=8, slot_bytes=64) as made:
        queue.hand_out(made)
        yield made


def test_what_is_further_behind_than_allowed_is_not_claimed(ring: SharedRingBuffer, queue: RingQueue) -> None:
    for version in range(6):
        ring.write({"x": np.zeros(1)}, policy_version=version)
    book = ClaimBook(queue, 0, "trainer", DEFAULTS, max_policy_age=2)
    assert [claim.policy_version for claim in book.claim(9, 0.0, policy_version=5)] == [3, 4, 5]
    assert queue.depth().aged == 3


def test_payloads_without_a_version_pass_with_a_warning(
    ring: SharedRingBuffer, queue: RingQueue, caplog: pytest.LogCaptureFixture
) -> None:
    book = ClaimBook(queue, 0, "trainer", DEFAULTS, max_policy_age=0)
    held = []
    for version in (5, None, None):
        ring.write({"x": np.zeros(1)}, policy_version=version)
        held += book.claim(1, 0.0, policy_version=5)
        assert held[-1].policy_version == version
        assert [each for each in caplog.messages if "max_policy_age" in each] == caplog.messages
        assert len(caplog.messages) == (version is None)  # once


def test_a_limit_needs_the_trainers_version(queue: RingQueue) -> None:
    book = ClaimBook(queue, 0, "trainer", DEFAULTS, max_policy_age=0)
    with pytest.raises(UsageError, match="needs policy_version="):
        book.claim(1, 0.0)
    with pytest.raises(UsageError, match="max_policy_age=-1"):
        ClaimBook(queue, 0, "trainer", DEFAULTS, max_policy_age=-1)


@pytest.mark.parametrize(("renew_s", "lease_s"), [(0.05, 3000.0), (3000.0, 0.15)])
def test_claims_are_renewed_as_often_as_the_operator_says_and_three_times_in_a_lease(
    renew_s: float, lease_s: float
) -> None:
    renewed = threading.Event()

    class Renewed(RingQueue):
        def renew(self, claims: Sequence[Claim]) -> list[Claim]:
            renewed.set()
            return super().renew(claims)

    settings = msgspec.structs.replace(DEFAULTS, claim_renew_s=renew_s, claim_lease_s=3 * renew_s)
    with (
        SharedRingBuffer.create(slots=1, slot_bytes=64) as ring,
        Renewed([ring], lease_s=lease_s) as queue,
        UCXXDataPackerMixin() as trainer,
    ):
        trainer.setup_ucxx_packer(queue=queue, settings=settings)
        ring.write_raw(b"x")
        held = trainer.claim_tickets(1, 5.0)
        assert renewed.wait(60.0)
        del held


def test_claims_that_were_renewed_and_are_dropped_go_back() -> None:
    renewed = threading.Event()

    class Renewed(RingQueue):
        def renew(self, claims: Sequence[Claim]) -> list[Claim]:
            kept = super().renew(claims)
            renewed.set()
            return kept

    class Trainer(UCXXDataPackerMixin):
        """The mixin alone."""

    settings = msgspec.structs.replace(DEFAULTS, claim_renew_s=0.05)
    with SharedRingBuffer.create(slots=1, slot_bytes=64) as ring, Renewed([ring]) as queue:
        trainer = Trainer()
        trainer.setup_ucxx_packer(queue=queue, settings=settings)
        try:
            ring.write_raw(b"x")
            claims = trainer.claim_tickets(1, 5.0)
            assert renewed.wait(60.0)
            del claims
            eventually(lambda: ring.native.depth(0)["ready"] == 1, "the payload is ready again")
        finally:
            trainer.cleanup_ucxx_packer()
