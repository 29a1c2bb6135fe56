"""Which worker runs the tests of which file. A worker that dies fails the test it ran, and the others go on.

The time limit of a test ends its worker. xdist then hands out the files that this worker had finished once more, as
work without tests: who gets it waits for ever, and the run never ends (3.8.0, scheduler/loadscope.py).
"""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadFileScheduling


class Files(LoadFileScheduling):
    """The tests of a file run in one worker, one after the other."""

    def remove_node(self, node: Any) -> str | None:
        """What is left of its files goes to others, without the test that it died in, which is returned."""
        work = self.assigned_work.pop(node)
        left = [(scope, test) for scope, tests in work.items() for test, done in tests.items() if not done]
        if not left:
            return None
        (scope, died_in), others = left[0], left[1:]
        work[scope][died_in] = True
        self.workqueue.update({scope: work[scope] for scope, _ in others})
        for each in self.assigned_work:
            self._reschedule(each)
        return died_in

    def _reschedule(self, node: Any) -> None:
        """A worker starts its last test only when it has another one, or is told that there is none."""
        while not node.shutting_down:
            super()._reschedule(node)
            if self._pending_of(self.assigned_work[node]) > 1:
                return


class OneRay(Files):
    """The files that start Ray run in one worker, too."""

    starts_ray: tuple[str, ...] = ()

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "ray" if file.startswith(self.starts_ray) else file
