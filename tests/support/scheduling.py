"""Which worker runs the tests of which file. A worker that dies fails the test it ran, and the others go on.

The time limit of a test ends its worker. xdist then hands out the files that this worker had finished once more, as
work without tests: who gets it waits for ever, and the run never ends (3.8.0, scheduler/loadscope.py).
"""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadFileScheduling

# Seconds of the longest files, roughly, on a quiet machine; a name without .py stands for all files that begin so. What
# is not here is taken to be short. Started last, one of these would keep one worker busy when the others have no work.
LONGEST = {
    "tests/weights/test_sharded_kills": 50, "tests/demo/test_demo": 30, "tests/benchmarks/test_soak": 30,
    "tests/deploy/test_slurm": 50, "tests/client/test_client_faults": 25, "tests/docs/test_docs": 25,
    "tests/bench/test_job_runs": 20, "tests/benchmarks/test_cluster": 20, "tests/bench/test_runs": 20,
    "tests/benchmarks/test_simulation": 15, "tests/benchmarks/test_teardown": 15, "tests/queue/test_found_faults": 15,
    "tests/client/test_two_hosts": 12, "tests/cooldown/test_kill_matrix": 12, "tests/weights/test_manager": 12,
    "tests/client/takes/test_take_outcomes": 12, "tests/test_scheduling": 10, "tests/cli/test_interrupts": 10,
    "tests/cooldown/test_s3": 10, "tests/cooldown/test_sharded": 10, "tests/bench/test_floor": 10,
    "tests/bench/test_job": 10, "tests/weights/test_sharded": 8, "tests/server/test_attacks": 8,
    "tests/client/test_two_users": 8, "tests/server/test_server": 8, "tests/ring/test_interrupted_claims": 8,
    "tests/server/test_strangers": 8, "tests/misuse/": 8, "tests/rendezvous/": 6, "tests/server/test_supervisor": 6,
    "tests/joined/test_joined": 6,
}  # fmt: skip
_OF_A_TEST_S = 0.04


def seconds(file: str, tests: int) -> float:
    """About how long a file takes: by the longest name of the list that it begins with, or by how many tests it has."""
    names = [name for name in LONGEST if file.startswith(name)]
    return max(LONGEST[max(names, key=len)] if names else 0.0, tests * _OF_A_TEST_S)


class Files(LoadFileScheduling):
    """The tests of a file run in one worker, one after the other; files that take long come first."""

    def _assign_work_unit(self, node: Any) -> None:
        longest = max(self.workqueue, key=lambda scope: seconds(scope, len(self.workqueue[scope])))
        self.workqueue.move_to_end(longest, last=False)  # the unit that is taken next
        super()._assign_work_unit(node)

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
