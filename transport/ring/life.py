"""The life of a ring: made, attached to, closed, and taken over from a writer that was killed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NoReturn, ParamSpec, Self, TypeVar

from transport import _ring
from transport.devices.streams import RegisteredPages
from transport.errors import LayoutError, PayloadTooLargeError, SchemaError, UsageError
from transport.ring import attachment
from transport.ring.attachment import Attachment
from transport.ring.consumers import Consumers, consumers_of, consumers_text, rank_of
from transport.ring.overflow import Overflow, Overflowing
from transport.ring.states import named
from transport.runtime.arguments import expect, whole
from transport.runtime.logs import Seldom
from transport.schema import Schema

P = ParamSpec("P")
T = TypeVar("T")


_ROLES = "'writer', 'listener', 'reader' or 'observer'"


class RingLife(Attachment):
    """What `SharedRingBuffer` is before it writes or reads."""

    def __init__(self, native: _ring.Ring, schema: Schema | None, overflow: Overflow, *, writable: bool = True) -> None:
        super().__init__(native)
        self.schema = schema
        self._overflowing = Overflowing(native, overflow)
        self._secret = native.secret
        self._pages = RegisteredPages(read_only=not writable)
        self._refusals = Seldom()
        self._named_ranks = 0
        if writable:
            self._named_ranks = sum(map(len, consumers_of(native.consumers).values()))
        self.arrived: set[tuple[str, int, int]] = set()  # of a queue over this ring: see transport/queue/rings.py

    def __reduce__(self) -> NoReturn:
        """Raises UsageError, for `pickle` and `copy`."""
        raise UsageError(
            "a ring is not pickled: send its name, and attach there with SharedRingBuffer.attach(name, schema)"
        )

    @property
    def overflow(self) -> Overflow:
        """What a write does when every slot is in use; may be set."""
        return self._overflowing.policy

    @overflow.setter
    def overflow(self, policy: Overflow) -> None:
        self._overflowing.policy = policy

    # --- making one ---------------------------------------------------------------------------------
    @classmethod
    def create(
        cls,
        schema: Schema | None = None,
        *,
        slots: int = 64,
        slot_bytes: int | None = None,
        name: str | None = None,
        prefix: str = "",
        overflow: Overflow = "block",
        consumers: Sequence[str] | Mapping[str, int] | None = None,
    ) -> Self:
        """Make the ring, or take over the one of a dead writer when ``name`` exists.

        Args:
            schema: of every payload; None: each payload brings its own description.
            slots: payloads the ring holds, unread ones included.
            slot_bytes: payload bytes per slot; default the schema's largest payload.
            name: only for a ring that a restarted writer shall find again; default random.
            prefix: prefix of the random name, by which a parent process finds the segments of a killed writer.
            overflow: when every slot is in use, "block" waits, "error" raises, "overwrite" takes the oldest unread.
            consumers: names of stages that each see every payload once, or names with how many ranks each has; at most
                16 together. Every payload is written for all of them; `rank_of` and ``claim(rank="name")`` know them.

        Raises:
            RingBusyError: a living process keeps a ring of this name.
            LayoutError: a dead writer's ring of this name has another layout or schema. Without ``name`` the new ring
                is made beside it. With one it is not: other processes attach by the name, and would find the old ring.
            SharedMemoryError: /dev/shm is too small or full; nothing is left behind.
            UsageError: a size that makes no sense.
        """
        if schema is not None:
            expect(schema, Schema, "schema of create()", "a Schema, as Schema.of(...) makes it")
        expect(prefix, str, "prefix of create()", "text")
        slots = whole(slots, "slots of create()")
        slot_bytes = None if slot_bytes is None else whole(slot_bytes, "slot_bytes of create()")
        if name is not None:
            expect(name, str, "name of create()", "text, or None for a random one")
        if overflow not in ("block", "error", "overwrite"):
            raise UsageError(f"overflow={overflow!r}; choose 'block', 'error' or 'overwrite'")
        if slot_bytes is None:
            if schema is None:
                raise UsageError("a ring without a schema needs slot_bytes, the size of its largest payload")
            slot_bytes = schema.max_bytes
        elif schema is not None and slot_bytes < schema.max_bytes:
            raise PayloadTooLargeError(
                f"slot_bytes={slot_bytes} cannot hold the schema's largest payload of {schema.max_bytes} bytes"
            )
        if slots < 1 or slot_bytes < 1:
            raise UsageError(f"slots={slots} and slot_bytes={slot_bytes} must both be at least 1")
        names = consumers_text(consumers)
        fingerprint = bytes.fromhex(schema.fingerprint) if schema is not None else bytes(16)
        chosen = attachment.random_name(prefix) if name is None else name
        native: _ring.Ring | None = None
        try:
            native = attachment.create(chosen, slots, slot_bytes, fingerprint)
            ring = cls(native, schema, overflow)
            ring._made_here = True
            ring._name_consumers(names)
            if name is None:  # a named ring may be meant for a successor
                ring._forget_with(ring._pages.release, only_empty=False)
            return ring
        except LayoutError as error:
            if native is not None:  # it was attached to, and has other consumers
                raise
            raise LayoutError(
                f"{error}, expected {slots} slots of {slot_bytes} bytes and fingerprint {fingerprint.hex()}. The "
                "last process that serves the old ring removes it when its payloads are consumed. Give another name, "
                "or none, to make a new ring now; `transport reclaim` removes a ring that no process serves"
            ) from error
        except BaseException:  # an interrupt: the caller has no object yet through which to remove the segment
            attachment.give_up(native)
            raise

    @classmethod
    def attach(
        cls, name: str, schema: Schema | None = None, *, role: Literal["writer", "listener", "reader", "observer"]
    ) -> Self:
        """Attach to an existing ring. Each process that writes, serves or maps takes one of 16 owner places.

        Raises:
            RingNotFoundError: no such segment on this host, or its writer is still making it.
            LayoutError: not a ring, another layout version, or another schema than ``schema``.
            NoOwnerError: sixteen living processes are attached already.
            SharedMemoryError: the segment belongs to another user.
        """
        expect(name, str, "name of attach()", "the text that `ring.name` is")
        if schema is not None:  # before there is an owner place to be given back
            expect(schema, Schema, "schema of attach()", "the Schema that the ring was made with")
        expect(role, str, "role of attach()", _ROLES)
        if role not in attachment.ROLES:
            raise UsageError(f"role={role!r}; choose {_ROLES}")
        native: _ring.Ring | None = None
        try:
            native = attachment.attach(name, role)
            if schema is not None and native.fingerprint.hex() != schema.fingerprint:
                raise SchemaError(
                    f"schema mismatch: ring {name} was made for {native.fingerprint.hex()}, "
                    f"got {schema.fingerprint}: both sides must use the same tensors, dtypes and shapes"
                )
            ring = cls(native, schema, "block", writable=role == "writer")
            ring._forget_with(ring._pages.release, only_empty=True)
            return ring
        except BaseException:  # an interrupt, too: the caller has no object yet through which to detach
            attachment.give_up(native)
            raise

    def _name_consumers(self, names: str) -> None:
        """Of a new ring; one that was taken over keeps those that its payloads were written for."""
        before = self.native.consumers
        if before != names:
            if before or self.native.state_counts()[0] != self.slot_count:
                self.close(keep_unread=True)
                raise LayoutError(
                    f"ring {self.name} was made for the consumers {before or 'without names'}, not for "
                    f"{names or 'none with names'}; give the same ones, or another name"
                )
            self.native.consumers = names
        self._named_ranks = sum(map(len, self.consumers.values()))

    @property
    def consumers(self) -> Consumers:
        """Ranks by the name of the stage, as the ring was made; empty: ranks have no names."""
        return consumers_of(self._call(lambda: self.native.consumers))

    def rank_of(self, consumer: str | int, rank: int | None = None) -> int:
        """The rank of this consumer's own ``rank``, for reads and acknowledgements; an int stays what it is.

        RankError: the ring has no consumer of this name, it has fewer ranks, or several and none was given.
        """
        return consumer if isinstance(consumer, int) else rank_of(self.consumers, consumer, rank)

    def readers_of(self, readers: int | None) -> int:
        """For how many ranks a payload is written: None: for all named consumers, or one. UsageError: for others."""
        if readers is None:
            return self._named_ranks or 1
        if self._named_ranks and readers != self._named_ranks:
            raise UsageError(
                f"readers={readers!r:.40}; this ring's payloads are for its {self._named_ranks} named ranks: leave "
                "readers out"
            )
        return readers

    def close(self, *, keep_unread: bool = False) -> None:
        """Give up every hold and detach. Idempotent.

        Args:
            keep_unread: leave unread payloads to the next writer of this ring's ``name``, as a killed writer does; for
                one that took a ring over and then cannot work.

        When the writer closes, it discards unread payloads, because no process serves them. It removes the segment
        unless listeners or other writers are attached. Others leave unread payloads, because a successor may take over
        the ring of a dead writer. The last owner removes an empty segment.

        It does not wait. A slot that a write, a lease or a view of another thread still uses stays theirs until they
        end, with ClosedError where there is something to publish or to consume, and so does the owner place.
        """
        if keep_unread:
            self._made_here = False
        super().close()

    def _leave(self) -> None:
        mapped = self.native.payload(0)  # what is registered with CUDA is given back before it is unmapped
        attachment.leave(self.native, only_empty=not self._made_here, give_up_unread=self._made_here)
        self.settle()
        mapped.release()

    def settle(self) -> None:
        """A lease has ended, or the ring was closed: the last of them gives CUDA's registrations back."""
        if self.native.closed and not self.native.lent:
            self._pages.release()

    def register(self, slot: int, device: int) -> bool:
        """Register a slot's pages with CUDA, once, so that copies between them and a device run at the bus's speed.

        False where CUDA refuses; copies work all the same.
        """
        return self._pages.ensure(slot, lambda: self._call(self.native.payload, slot), device)

    def _call(self, function: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> T:
        try:
            return function(*arguments, **keywords)
        except _ring.RingFault as fault:
            raise named(fault) from None
