"""A proxy between two processes: what one of them sends to the other passes through a third, which may spoil it.

Both sides are preloaded with detoured.c, so that each of their TCP connections comes here, also those that UCX makes by
itself, from either side, to addresses that its peer told it. What happens, happens at a byte that the test names, once:

    cut    every connection is reset behind that byte; what was sent before it arrives
    flip   one bit of that byte is changed, and everything goes on
    hold   nothing goes on behind that byte, in that direction, until `resume` or `cut`
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from helpers import Child
from preloaded import preloaded

Action = Literal["cut", "flip", "hold"]
Direction = Literal["to the listener", "to the trainer"]
_PROXY = "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__')"


class Detour(Child):
    """At most one fault at a time waits to happen.

    Attributes:
        trainer, listener: environments of the processes of both sides.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "detour"
        library = preloaded("detoured", folder)
        self.trainer, self.listener = ({**library, "DETOUR": f"{path}.{side}"} for side in ("trainer", "listener"))
        super().__init__(_PROXY, Path(__file__).with_name("detour_proxy.py"), path)
        self.line()

    def _ask(self, method: str, *arguments: object) -> Any:
        self.tell(json.dumps([method, *arguments]))
        return json.loads(self.line())

    def arm(self, action: Action, direction: Direction, marks: Sequence[bytes] = ()) -> None:
        """Let this happen when one of these passes in that direction; with none, before whatever passes next."""
        self._ask("arm", action, direction, [mark.hex() for mark in marks])

    def wait(self) -> None:
        """Until it has happened."""
        assert self._ask("wait"), "these bytes never passed"

    def resume(self) -> None:
        """What is held goes on."""
        self._ask("resume")

    def reach(self, reachable: bool) -> None:
        """Whether new connections are made; those that there are stay."""
        self._ask("reach", reachable)

    def cut(self) -> None:
        """Reset every connection; what is held is lost."""
        self._ask("cut")
