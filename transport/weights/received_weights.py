"""ReceivedWeights: what an engine receives, and the worker that is to serve it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from transport.errors import UsageError
from transport.weights.version_switch import SwitchedWorker, VersionSwitch, WorkerState

if TYPE_CHECKING:
    from transport.weights.engine import WeightsEngine
    from transport.weights.versions.copies import ShardHeld


class ReceivedWeights:
    """A receiver's end of a version, from its landing to the decision whether it stays.

    Attributes:
        landed: the version that has landed in this group, and is neither kept nor given up.
    """

    def __init__(self, engine: WeightsEngine, worker: SwitchedWorker, wait: Callable[[Awaitable[Any]], Any]) -> None:
        self.landed: ShardHeld | None = None
        self._engine = engine
        self.switch: VersionSwitch[ShardHeld] = VersionSwitch(engine.name, worker, self._arrays, wait)

    @property
    def in_doubt(self) -> bool:
        """True if a version is loaded, and not decided."""
        return self.switch.state is WorkerState.IN_DOUBT

    @property
    def mixed(self) -> bool:
        """True if the worker may serve what is no version of its group."""
        return self._engine.spoilt or self.switch.state in (WorkerState.MIXED, WorkerState.IN_DOUBT)

    def _arrays(self, held: ShardHeld) -> dict[str, Any]:
        arrays = dict(self._engine.arrays(held))
        held.settle()  # the worker's threads and streams are its own
        return arrays

    async def land(self, version: int) -> ShardHeld:
        """Receive a version and prove what landed. The one before is served until `load`, except in place."""
        try:
            self.landed = await self._engine.receive(version)
        finally:
            if self._engine.in_place and (self.landed is not None or self._engine.spoilt):
                self.switch.changed()
        return self.landed

    def load(self) -> None:
        """Load the version that has landed, and prove it: it is in doubt then."""
        if self.landed is None:
            raise UsageError(f"{self._engine.name}: no version has landed that could be loaded")
        self.switch.load(self.landed)

    def keep(self) -> None:
        """Serve what was loaded: it is decided that it stays."""
        self.switch.keep()
        self.landed = None  # last, so that after an interrupt the next call finishes

    def go_back(self, why: BaseException | None = None) -> None:
        """Serve the version before again, if there is one. In place it is gone: nothing is proven.

        An error of the return becomes a note of ``why``.
        """
        landed, self.landed = self.landed, None
        if landed is not None:
            self.switch.go_back(landed, self._before, why)

    def _before(self) -> ShardHeld | None:
        self._engine.revert()
        return None if self._engine.in_place else self._engine.held

    async def finalize(self) -> None:
        """Leave the group; a version that is not kept is dropped."""
        landed, self.landed = self.landed, None
        self.switch.drop()
        try:
            if landed is not None:
                self._engine.revert()
        finally:
            await self._engine.finalize()
