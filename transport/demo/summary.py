"""What a run of the demo came to, and whether that is good. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

import msgspec

from transport.cooldown.epochs.records import EpochRecord
from transport.demo.plan import Plan
from transport.demo.worker import RolloutDone, TrainerDone
from transport.queue import QueueDepth


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The demo's JSON. A delivery is one payload to one rank; bytes are those of all deliveries."""

    payloads: int
    bytes: int
    lost: int  # deliveries that were published, and neither consumed nor still in the queue at the end
    duplicates: int  # deliveries that came twice; the second was dropped
    stale: int  # reads refused because the payload was gone
    retries: int
    seconds: float  # the whole run, start of the processes included
    wire: str  # what carried the payloads; several are separated by commas
    mean_return_first: float  # of the first tenth of the episodes that rank 0 consumed
    mean_return_last: float
    deliveries: int
    unread: int  # deliveries still in the queue at the end
    bytes_by_wire: dict[str, int]
    rollouts: int
    readers: int
    updates: int  # versions of the policy that were made
    policies_fetched: int
    policy_pause_ms: float  # for which a rollout did not play at each of them, median
    policy_pause_ms_most: float
    policies_missed: int  # a newer version had replaced them
    mean_staleness: float  # of an episode, in versions of the policy
    epoch: int = 0  # that this run was, with --checkpoint
    resumed_from: int = 0  # epoch whose checkpoint the run began with; 0: none
    trained_before: int = 0  # episodes, with --resume: before everything was killed
    checkpoint: str = ""  # checkpointed or timed_out, as recorded
    checkpoint_place: str = ""  # where it lies

    def problems(self, episodes: int, target: float) -> list[str]:
        """What is not as it should be, in words. ``target``: least ratio of last to first mean return."""
        found = []
        if self.payloads != episodes:
            found.append(f"{self.payloads} of {episodes} episodes were published")
        if self.lost:
            found.append(f"{self.lost} deliveries were lost")
        if self.unread:
            found.append(f"{self.unread} deliveries were not read")
        if self.duplicates:
            found.append(f"{self.duplicates} deliveries came twice")
        if self.checkpoint not in ("", "checkpointed"):
            found.append(f"epoch {self.epoch} has no checkpoint: {self.checkpoint}; see `transport cooldown status`")
        if self.mean_return_last < target * self.mean_return_first:
            found.append(
                f"the policy did not learn: the mean return went from {self.mean_return_first:.1f} to "
                f"{self.mean_return_last:.1f}, due is {target:g} times as much (more --episodes, or another --seed)"
            )
        return found

    def __str__(self) -> str:
        """For people; five lines, and one more with a checkpoint."""
        wires = ", ".join(f"{size / 1e6:.1f} MB by {wire}" for wire, size in self.bytes_by_wire.items()) or "0 bytes"
        return (
            f"payloads  {self.payloads} episodes of {self.rollouts} rollouts, {self.deliveries} deliveries to "
            f"{self.readers} {'trainer' if self.readers == 1 else 'trainers'}, in {self.seconds:.1f} s\n"
            f"bytes     {wires}\n"
            f"faults    {self.lost} lost, {self.duplicates} duplicates, {self.stale} stale, {self.retries} retries\n"
            f"learning  mean return {self.mean_return_first:.1f} → {self.mean_return_last:.1f} in {self.updates} "
            f"updates, from episodes {self.mean_staleness:.1f} versions old\n"
            f"weights   {self.policies_fetched} versions taken, each with a pause of {self.policy_pause_ms:.1f} ms "
            f"(median; longest {self.policy_pause_ms_most:.1f} ms)"
            f"{self._epoch_line()}"
        )

    def _epoch_line(self) -> str:
        if not self.epoch:
            return ""
        before = f", resumed from epoch {self.resumed_from}" if self.resumed_from else ""
        return f"\nepoch     {self.epoch}{before}: {self.checkpoint} {self.checkpoint_place}".rstrip()


def summarise(
    plan: Plan,
    rollouts: Sequence[RolloutDone],
    trainers: Sequence[TrainerDone],
    depth: QueueDepth,
    seconds: float,
    *,
    ended: EpochRecord | None = None,
    resumed_from: int = 0,
) -> Summary:
    """Add up the reports of all workers. The first trainer is rank 0."""
    pauses_s = [pause for rollout in rollouts for pause in rollout.pauses_s]
    published = sum(rollout.published for rollout in rollouts)
    consumed = sum(trainer.consumed for trainer in trainers)
    by_wire: Counter[str] = Counter()
    for trainer in trainers:
        by_wire.update(trainer.bytes_by_wire)
    learner = trainers[0]
    return Summary(
        payloads=published + plan.trained_before,
        trained_before=plan.trained_before,
        bytes=by_wire.total(),
        lost=published * plan.trainers - consumed - depth.unfinished,
        duplicates=sum(trainer.duplicates for trainer in trainers),
        stale=sum(trainer.stale for trainer in trainers),
        retries=sum(trainer.retries for trainer in trainers),
        seconds=seconds,
        wire=",".join(sorted(by_wire)),
        mean_return_first=learner.mean_return_first,
        mean_return_last=learner.mean_return_last,
        deliveries=consumed,
        unread=depth.unfinished,
        bytes_by_wire=dict(by_wire),
        rollouts=plan.rollouts,
        readers=plan.trainers,
        updates=learner.updates,
        policies_fetched=len(pauses_s),
        policy_pause_ms=1e3 * statistics.median(pauses_s or [0.0]),
        policy_pause_ms_most=1e3 * max(pauses_s, default=0.0),
        policies_missed=sum(rollout.policies_missed for rollout in rollouts),
        mean_staleness=learner.mean_staleness,
        epoch=ended.epoch if ended is not None else 0,
        resumed_from=resumed_from,
        checkpoint=ended.outcome.value if ended is not None and ended.outcome is not None else "",
        checkpoint_place=_place(ended) if ended is not None else "",
    )


def _place(record: EpochRecord) -> str:
    won = record.checkpoint
    if won is None:
        return ""
    return f"{record.destination}/{record.folder(won.upload)}"
