"""What a soak says in the end, and whether it has passed."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import payloads
from accounts import EXPIRED, Verdict
from plan import Plan

from transport.queue.base import DeliveryState, Failure, QueueDepth

_MOST_FAILURES = 20
_LATE = ("StaleSlotError", "its deadline has passed")  # of a trainer, of a ring


class End(NamedTuple):
    """How a run came to its end."""

    verdict: Verdict
    depth: QueueDepth
    failures: list[str]  # of the queue, for reasons that are not allowed
    counts: Counter[str]  # of faults, see `FaultInjector`
    kills: int
    not_done: int  # faults of the schedule
    crashes: list[str]
    left_behind: list[str]
    stuck: bool
    seconds: float


def perishes(plan: Plan, writer: int, number: int) -> bool:
    """Whether a delivery of this payload may end with no trace but its slot's: a ring discards what is too late."""
    return plan.queue.startswith("rings") and plan.deadlines and payloads.deadline_s(writer, number) is not None


def allowed(plan: Plan) -> tuple[str, ...]:
    """Kinds of reports for which a delivery may end without consumption, in a run with this plan."""
    return (EXPIRED,) if plan.deadlines else ()


def reason_of(failure: Failure, writer: int, number: int, plan: Plan) -> str:
    """The queue's report of this payload, its kind before the colon. Only a payload that has a deadline can expire."""
    said = f"{failure.state}: {failure.reason}"
    has_deadline = plan.deadlines and payloads.deadline_s(writer, number) is not None
    if failure.state is DeliveryState.DISCARDED and has_deadline and failure.reason.startswith(_LATE):
        return f"{EXPIRED}: {failure.reason}"
    return said


def report(plan: Plan, end: End) -> dict[str, Any]:
    """Everything, for the table and the JSON."""
    verdict, counts = end.verdict, end.counts
    bad = verdict.lost + verdict.wrong + verdict.duplicated + len(end.crashes) + len(end.left_behind)
    bad += end.depth.unfinished + end.stuck
    return {
        "passed": not bad,
        "queue": plan.queue.partition(":")[0],
        "payloads": verdict.payloads,
        "deliveries": verdict.deliveries,
        "kills": end.kills,
        "kills_by_role": {name[5:]: count for name, count in counts.items() if name.startswith("kill ")},
        "kills_and_stops_at_points": {
            name[6:]: count for name, count in sorted(counts.items()) if name[:6] == "point "
        },
        "other_faults": {name: count for name, count in counts.items() if name[:5] not in ("kill ", "point")},
        "not_done": end.not_done,
        "lost": verdict.lost,
        "wrong": verdict.wrong,
        "duplicated": verdict.duplicated,
        "reported": verdict.reported,
        "queue_failures": end.failures[:_MOST_FAILURES],
        "never_published": verdict.never_published,
        "acked_silently": verdict.silent,
        "claims_expired": end.depth.expired,
        "unfinished": end.depth.unfinished,
        "crashes": end.crashes,
        "left_behind": end.left_behind,
        "stuck": end.stuck,
        "named": verdict.named,
        "seconds": round(end.seconds, 1),
        "per_second": round(verdict.payloads / end.seconds, 1),
        "seed": plan.seed,
    }
