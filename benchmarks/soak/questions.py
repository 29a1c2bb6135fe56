"""What the queue is asked during a soak: what became of claims whose trainers were killed, and what it has given up."""

from __future__ import annotations

from collections.abc import Callable

import audit
import msgspec
from accounts import Accounts
from plan import Plan
from queues import open_queue
from report import allowed, reason_of

from transport.queue.base import QueueDepth

_HARVESTED = 5000  # reports at a time; the queue forgets them in the end


class Questions:
    """Asks the queue of one run, and enters the answers in its accounts.

    Args:
        hear: reads what all processes have said so far.

    Attributes:
        failures: of the queue, and not allowed as far as is known: its reason, by rank and ticket.
    """

    def __init__(self, plan: Plan, accounts: Accounts, hear: Callable[[], None]) -> None:
        self._plan = plan
        self._accounts = accounts
        self._hear = hear
        self._allowed = allowed(plan)
        self._expired = 0
        self.failures: dict[tuple[int, str], str] = {}

    def ask(self) -> None:
        """What became of the claims that trainers were about to have accepted when they were killed."""
        questions = self._accounts.open_questions()
        if self._plan.queue.startswith("rings"):
            self._ask_rings(questions)
            return
        for (rank, token), accepted in audit.fates(self._plan.queue, questions).items() if questions else ():
            self._accounts.answer(rank, token, accepted)

    def _ask_rings(self, questions: list[tuple[int, str]]) -> None:
        perishable = self._accounts.perishable()
        asked = {*questions, *perishable}
        over = audit.ended(self._plan.queue.partition(":")[2], asked) if asked else set()
        if over:
            self._hear()  # the process that ended them has said before that it was about to
        for rank, token in over.intersection(questions):
            self._accounts.over(rank, token)
        for question in over.intersection(perishable):
            self._accounts.perished(perishable[question])

    def harvest(self, patience_s: float) -> QueueDepth:
        """Enter what the queue reports."""
        with open_queue(self._plan, patience_s) as queue:
            for failure in queue.failures(_HARVESTED):
                named = self._accounts.named(failure.ticket_id)
                reason = f"{failure.state}: {failure.reason}"
                if named is not None:
                    reason = reason_of(failure, *named, self._plan)
                    self._accounts.report(failure.rank, *named, reason)
                self.failures[failure.rank, failure.ticket_id] = reason
                if reason.partition(":")[0] in self._allowed:
                    del self.failures[failure.rank, failure.ticket_id]
            depth = queue.depth()
        self._expired = max(self._expired, depth.expired)  # rings take their counts with them
        return msgspec.structs.replace(depth, expired=self._expired)
