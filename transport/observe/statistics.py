"""Counters of a packer, as `ucxx_statistics` and the metrics show it."""

from __future__ import annotations

import msgspec

from transport.client.payload import ClientStatistics


class PackerStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since `setup_ucxx_packer`."""

    batches: int
    consumed: int
    duplicates: int  # received a second time and dropped
    failed: int  # tickets whose payload could not be read
    stale: int  # of those: the payload was no longer in its slot
    returned: int  # claims given back to the queue
    lost_claims: int  # another trainer had the claim by the time of the ack; not trained on
    client: ClientStatistics


class TrainerStatistics(PackerStatistics, frozen=True, kw_only=True):
    """Counters of a `Trainer` since it began.

    Attributes:
        failed: payloads that were left out: no ticket, or bytes that were wrong where a batch was made. Those that came
            over a network with wrong bytes come again, see ``client.checksum_failures``.
        stale: samples of groups that were too old. Payloads that a ring ended for their age are in its own counter.
        waited_s: seconds for which it has waited for batches and steps.
        steps: that its loop was given.
        void_steps: that were planned and given up; their groups came again.
        lag: versions by which the samples of its last step were older than `Trainer.version`, on average.
        groups: what has become of them: planned, and dropped by reason. On the rank that plans.
        open_groups: that wait for samples. On the rank that plans.
        surplus: samples that were left out, since their groups were complete.
    """

    waited_s: float
    steps: int
    void_steps: int
    lag: float
    groups: dict[str, int]
    open_groups: int
    surplus: int
