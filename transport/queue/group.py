"""GroupQueue: one delivery for all ranks of a model-parallel group, which train on the same payloads in the same order.

The ranks of a group compute one model together, so a payload is for all of them or for none. Rank 0 leads: it alone
claims, renews and consumes at the rings, and tells the others through a store. Payloads are written for ``readers`` =
ranks of the group (``setup_ucxx(..., grouped=True)``).

    leader     claim ──► record "claims/k" ──► every follower's claim k: the same tickets, the same order
    each rank  ack: votes yes    discard, retry: votes no
    leader     all voted yes ──► acks at the queue        ──► decided yes: every rank's ack returned True
               one voted no, or is silent ──► gives back  ──► decided no: no rank trains on it

Votes and decisions are final (transport.store.decision), so ranks never differ in what they train on. An ack that is
repeated has the same answer. The claims of a group that died are claimed by another group when the leader's lease ends.
A rank that cannot read a decision raises GroupBrokenError: the group must be restarted under another name.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING
from urllib.parse import quote

import msgspec

from transport.config import lease_or_configured
from transport.errors import ConfigurationError, GroupBrokenError, RankError, StoreError
from transport.queue import arguments
from transport.queue.base import (
    Carrier,
    Claim,
    Failure,
    Notice,
    PayloadBytes,
    QueueDepth,
    TicketQueue,
)
from transport.runtime.decoders import ready
from transport.store.base import ABSENT, Store, check_key
from transport.store.decision import decide_all, wait_decided

if TYPE_CHECKING:
    from transport.runtime.loop_thread import LoopThread
    from transport.schema import Schema

LEADER = 0
_KEEP_S = 3600.0  # records of a group; a rank that is further behind is taken for dead
_AGAIN_S = 0.1  # interval of questions to a ring out of reach
_MOST_TOKEN = 200
_YES, _NO = b"yes", b"no"  # decisions on a claim


class _Vote(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The vote of one rank on one claim."""

    yes: bool
    final: bool = False  # of a no: no rank can read the payload, so it is discarded
    reason: str = ""
    delay_s: float = 0.0


ready(Claim, _Vote)


def _part(claim: Claim) -> str:
    """A claim's part of a key: what tokens are made of is the queue's affair, and keys have fewer characters."""
    token = quote(claim.token, safe="/:@")
    return token if len(token) <= _MOST_TOKEN else hashlib.sha256(claim.token.encode()).hexdigest()


def counted(votes: Sequence[_Vote | None]) -> _Vote:
    """The group's decision from the votes of its ranks; None: no vote in time. A final no takes precedence."""
    noes = [
        _Vote(False, reason=f"rank {rank} of the group was silent") if vote is None else vote
        for rank, vote in enumerate(votes)
        if vote is None or not vote.yes
    ]
    return next((vote for vote in noes if vote.final), noes[0]) if noes else _Vote(True)


class GroupQueue(TicketQueue):
    """A queue as one rank of a group sees it. Every rank makes one; `claim`, `ack_many` and the rest as of any queue.

    Args:
        queue: not closed by this one. Only the leader claims from it.
        store: shared by the ranks, not closed either.
        group: name of this start of the group; another one at each start.
        rank, ranks: which one this is, of how many.
        patience_s: how long the leader waits for a vote, and then for a ring that is out of reach; a follower waits
            three times that for the decision. None: the lease of claims that the operator configured.
    """

    def __init__(
        self,
        queue: TicketQueue,
        store: Store,
        group: str,
        rank: int,
        ranks: int,
        *,
        patience_s: float | None = None,
    ) -> None:
        if not 0 <= rank < ranks:
            raise RankError(f"rank {rank} of a group of {ranks}; ranks are 0 to {ranks - 1}")
        self.lease_s = queue.lease_s
        self._queue = queue
        self._store = store
        self._prefix = check_key(f"groups/{group}/")
        self._rank = rank
        self._ranks = ranks
        self._patience_s = lease_or_configured(patience_s)
        # The number of the next claim, and what the leader has claimed for it and not yet told; replaced in one step.
        self._next: tuple[int, list[Claim]] = 0, []
        self._said_over = False  # the others may have been told that the data has ended
        if rank == LEADER and store.compare_and_set(self._key("began"), b"", ABSENT) is None:
            raise ConfigurationError(f"group name {group!r} was used before: give each start of a group a new name")

    def __repr__(self) -> str:
        return f"<GroupQueue {self._prefix} rank {self._rank} of {self._ranks} over {self._queue!r}>"

    def _key(self, *parts: object) -> str:
        return self._prefix + "/".join(map(str, parts))

    @property
    def leads(self) -> bool:
        """Whether this rank is the leader, which claims for all ranks."""
        return self._rank == LEADER

    # --- claiming ------------------------------------------------------------------------------
    def claim(
        self, n: int, timeout_s: float = 0.0, *, rank: int | str = 0, consumer: str, oldest_version: int | None = None
    ) -> list[Claim]:
        """The leader's next claims, the same for every rank; ``n`` and ``oldest_version`` are the leader's.

        ``rank`` is that of this member. An empty list when the time is over; the ranks' calls need not be as many.

        StoreError: the leader's claims may have been told. They stay the group's next ones: repeat the call.
        """
        if rank != self._rank:
            raise RankError(
                f"rank {rank!r:.80} claims through the queue of rank {self._rank}; use one GroupQueue for each rank"
            )
        arguments.claimed(n, timeout_s, 0, oldest_version)
        step, made = self._next
        if not self.leads:
            claims = self._told(step, timeout_s)
        else:
            claims = made or self._queue.claim(n, timeout_s, rank=0, consumer=consumer, oldest_version=oldest_version)
            self._next = step, claims
            self._tell(step, claims)
        self._next = step + bool(claims), []
        return claims

    def _tell(self, step: int, claims: list[Claim]) -> None:
        """Give the leader's claims to the others."""
        if not claims:
            return
        plain = [Claim(*(getattr(claim, name) for name in Claim.__struct_fields__)) for claim in claims]
        self._take_back_the_end()
        self._store.put(self._key("claims", step), msgspec.msgpack.encode(plain), lease_s=_KEEP_S)

    def _told(self, step: int, timeout_s: float) -> list[Claim]:
        """The leader's claims, as of this rank."""
        entry = self._store.watch(self._key("claims", step), ABSENT, timeout_s)
        if entry is None:
            return []
        claims = msgspec.msgpack.decode(entry.value, type=list[Claim])
        return [msgspec.structs.replace(claim, rank=self._rank) for claim in claims]

    def renew(self, claims: Sequence[Claim]) -> list[Claim]:
        """The leader renews; a follower's claims are the group's until a decision says otherwise."""
        return self._queue.renew(claims) if self.leads else list(claims)

    # --- consuming -----------------------------------------------------------------------------
    def ack_many(self, claims: Sequence[Claim]) -> list[Claim]:
        """Consume what every rank could; returns the same claims at every rank. Waits for the other ranks.

        Raises GroupBrokenError when the decision cannot be learned, or cannot be told: these deliveries are done then,
        and trained on by none. The leader raises it, too, for claims `in_question`; the repeated call asks their ring
        again.
        """
        claims = arguments.held(claims, "ack")
        if not claims:
            return []
        if self.leads:
            return self._lead(claims)
        self._vote(claims, _Vote(True))
        return self._follow(claims)

    def in_question(self, claims: Sequence[Claim]) -> list[Claim]:
        """See `TicketQueue.in_question`; the leader alone asks."""
        return self._queue.in_question(claims) if self.leads else []

    def _lead(self, claims: list[Claim]) -> list[Claim]:
        """Decide on what is not decided. The queue's answers are the same when a call is repeated, so decisions are."""
        before = self._store.get_many([self._decision(claim) for claim in claims])
        said = {claim.token: entry.value == _YES for claim, entry in zip(claims, before, strict=True) if entry}
        fresh = [claim for claim in claims if claim.token not in said]
        decisions = [counted([_Vote(True), *each]) for each in self._votes(fresh)]
        wanted = [claim for claim, decision in zip(fresh, decisions, strict=True) if decision.yes]
        accepted, asked = self._consume(wanted)
        self._decide([(claim, True) for claim in accepted])
        refused: dict[_Vote, list[Claim]] = {}
        for claim, decision in zip(fresh, decisions, strict=True):
            if not decision.yes:
                refused.setdefault(decision, []).append(claim)
        for decision, group in refused.items():
            self._give_up(group, decision)
        known = {claim.token for claim in (*accepted, *asked)}
        self._decide([(claim, False) for claim in fresh if claim.token not in known])
        if asked:
            raise GroupBrokenError(
                f"the ring of {len(asked)} claims of {self._prefix} is out of reach, and may have accepted them: "
                "repeat the call, or restart the group under another name"
            )
        mine = {claim.token for claim in accepted}
        return [claim for claim in claims if said.get(claim.token) or claim.token in mine]

    def _consume(self, claims: list[Claim]) -> tuple[list[Claim], list[Claim]]:
        """Have the queue consume claims: those that it accepted, and those that it may have accepted."""
        if not claims:
            return [], []
        give_up_at = time.monotonic() + self._patience_s
        while True:
            accepted = self._queue.ack_many(claims)
            asked = self._queue.in_question(claims)
            left_s = give_up_at - time.monotonic()
            if not asked or left_s <= 0:
                return accepted, asked
            time.sleep(min(left_s, _AGAIN_S))

    def _votes(self, claims: Sequence[Claim]) -> list[list[_Vote | None]]:
        """Of the followers, by claim; waits for them until the patience is over."""
        if not claims:
            return []
        keys = [self._key("vote", _part(claim), rank) for claim in claims for rank in range(1, self._ranks)]
        give_up_at = time.monotonic() + self._patience_s
        while True:
            entries = self._store.get_many(keys)
            missing = [key for key, entry in zip(keys, entries, strict=True) if entry is None]
            remaining_s = give_up_at - time.monotonic()
            if not missing or remaining_s <= 0:
                break
            self._store.watch(missing[0], ABSENT, remaining_s)
        votes = [None if entry is None else msgspec.msgpack.decode(entry.value, type=_Vote) for entry in entries]
        each = self._ranks - 1
        return [votes[at * each : (at + 1) * each] for at in range(len(claims))]

    def _decision(self, claim: Claim) -> str:
        return self._key("decided", _part(claim))

    def _decide(self, outcomes: Sequence[tuple[Claim, bool]]) -> None:
        if not outcomes:
            return
        proposals = {self._decision(claim): _YES if yes else _NO for claim, yes in outcomes}
        try:
            decide_all(self._store, proposals, lease_s=_KEEP_S)
        except StoreError as error:
            raise GroupBrokenError(
                f"the queue recorded {len(outcomes)} claims of {self._prefix}, but the store did not take the decision "
                "for the other ranks: restart the group under another name"
            ) from error

    def _give_up(self, claims: Sequence[Claim], decision: _Vote) -> list[Claim]:
        """Those of the claims that were the leader's."""
        if decision.final:
            return [claim for claim in claims if self._queue.discard(claim, decision.reason)]
        return self._queue.retry_many(claims, decision.delay_s, decision.reason)

    def _follow(self, claims: Sequence[Claim]) -> list[Claim]:
        accepted = []
        give_up_at = time.monotonic() + 3 * self._patience_s
        for claim in claims:
            outcome = wait_decided(self._store, self._decision(claim), max(0.0, give_up_at - time.monotonic()))
            if outcome is None:
                raise GroupBrokenError(
                    f"the leader of {self._prefix} did not decide on {claim.ticket_id} within "
                    f"{3 * self._patience_s:g} s: restart the group under another name"
                )
            if outcome == _YES:
                accepted.append(claim)
        return accepted

    # --- giving up -----------------------------------------------------------------------------
    def discard(self, claim: Claim, reason: str) -> bool:
        """This rank can never read it: no rank will train on it, and the leader discards it."""
        return bool(self._refuse([claim], _Vote(False, final=True, reason=self._said(reason))))

    def retry_many(self, claims: Sequence[Claim], delay_s: float = 0.0, reason: str = "") -> list[Claim]:
        """This rank could not read them: no rank trains on them now, and the leader gives them back."""
        listed, delay_s = arguments.held(claims, "retry"), arguments.delayed(delay_s, "retry")
        vote = _Vote(False, reason=self._said(reason), delay_s=delay_s)
        return self._refuse(listed, vote) if listed else []

    def _said(self, reason: str) -> str:
        return reason if self.leads else f"rank {self._rank}: {reason}"

    def _refuse(self, claims: Sequence[Claim], vote: _Vote) -> list[Claim]:
        if not self.leads:
            return self._vote(claims, vote)
        given_up = self._give_up(claims, vote)
        mine = {claim.token for claim in given_up}
        others = [claim for claim in claims if claim.token not in mine]
        # What the queue has accepted, or may have, is left to the repeated ack.
        kept = [*self._queue.ack_many(others), *self._queue.in_question(others)] if others else []
        left = {claim.token for claim in kept}
        self._decide([(claim, False) for claim in claims if claim.token not in left])
        return given_up

    def _vote(self, claims: Sequence[Claim], vote: _Vote) -> list[Claim]:
        """Those of the claims on which this rank has not voted otherwise before."""
        own = msgspec.msgpack.encode(vote)
        keys = [self._key("vote", _part(claim), self._rank) for claim in claims]
        standing = decide_all(self._store, dict.fromkeys(keys, own), lease_s=_KEEP_S)
        return [claim for claim, key in zip(claims, keys, strict=True) if standing[key] == own]

    # --- as of the queue -----------------------------------------------------------------------
    @property
    def name(self) -> str:
        return self._queue.name

    def finished(self, expected_rollouts: int | None = None) -> bool:
        """See `TicketQueue.finished`. The leader finds out, and tells the others behind which claims."""
        step, made = self._next
        if not self.leads:
            entry = self._store.get(self._key("ended"))
            return entry is not None and step >= int(entry.value)
        over = not made and self._queue.finished(expected_rollouts)
        if over:
            self._said_over = True
            self._store.put(self._key("ended"), str(step).encode(), lease_s=_KEEP_S)
        else:
            self._take_back_the_end()
        return over

    def _take_back_the_end(self) -> None:
        """Another rollout has begun, where the others were told that the data has ended."""
        if self._said_over:
            self._store.delete(self._key("ended"))
            self._said_over = False

    def depth(self, rank: int | None = None) -> QueueDepth:
        """Counts of the group's deliveries, whichever the ``rank``."""
        return self._queue.depth(None if rank is None else 0)

    def failures(self, limit: int = 100) -> list[Failure]:
        return self._queue.failures(limit)

    def reasons(self) -> Mapping[str, int]:
        return self._queue.reasons()

    def announce(self, topic: str, version: int, payload: bytes = b"") -> bool:
        return self._queue.announce(topic, version, payload)

    def latest(self, topic: str, newer_than: int | None = None, timeout_s: float = 0.0) -> Notice | None:
        return self._queue.latest(topic, newer_than, timeout_s)

    def connect(self, thread: LoopThread, client: Carrier, schemas: Sequence[Schema]) -> TicketQueue:
        """See `TicketQueue.connect`; only the leader claims."""
        if self.leads:
            self._queue = self._queue.connect(thread, client, schemas)
        return self

    def disconnect(self, client: Carrier) -> None:
        if self.leads:
            self._queue.disconnect(client)

    def payload_bytes(self, claim: Claim) -> PayloadBytes | None:
        """See `TicketQueue.payload_bytes`; the other ranks read by the ticket."""
        return self._queue.payload_bytes(claim) if self.leads else None

    def close(self) -> None:
        """Does nothing: the owner of queue and store closes them, which ends the waits."""
