"""Soak over a bad network: every TCP connection between rollouts and trainers passes network_proxy.py.

    python benchmarks/soak/network.py --minutes 60 --seed 1 --json build/network.json

Two writers, three trainers and their listeners run as in the soak, over tcp and with the rings as the queue, at a
moderate rate; no process is killed. One payload in 128 has up to 6 MiB. Account, report and exit status are the soak's;
docs/developers/TESTING.md has the rest.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import msgspec
from command import finish, parser, status_of_isolated_run
from fault_injection import ISOLATED
from network_proxy import KINDS, Proxy
from plan import TrainerPlan, WriterPlan
from process_tree import Child
from run import RANKS, READERS, Options, Soak

HERE = Path(__file__).resolve().parent
_DETOURED = HERE.parent.parent / "tests" / "support" / "detoured.c"
_LARGEST = 6 << 20
_SLOTS = 48
_CLAIMS = 16  # of a batch
_UNLIMITED = 1 << 40  # payloads: time ends the run


class NetworkSoak(Soak):
    """One run.

    Args:
        minutes: for which payloads are written and faults happen.
        per_second: payloads, of both writers together.
        every_s: mean time between faults.
        only: the one kind of fault; "": all.
    """

    def __init__(
        self, options: Options, folder: Path, minutes: float, per_second: float, every_s: float, only: str
    ) -> None:
        self._seconds = 60 * minutes
        self._per_second = per_second / len(READERS)
        super().__init__(options)
        self._plan = msgspec.structs.replace(self._plan, slots=_SLOTS)
        library, asked_at = folder / "detoured.so", folder / "detour"
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", _DETOURED, "-o", library, "-ldl"], check=True)
        self._environment |= {"LD_PRELOAD": str(library), "DETOUR": str(asked_at)}
        self._proxy = Proxy(asked_at, options.seed, every_s, {only: 1} if only else KINDS)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=lambda: self._loop.run_until_complete(self._proxy.run()), daemon=True).start()

    def _writer(self, number: int) -> Child:
        def part() -> bytes:
            first = self._accounts.intended_by(number)
            return msgspec.json.encode(
                WriterPlan(
                    plan=self._plan, number=number, readers=READERS[number], first=first, left=_UNLIMITED,
                    per_second=self._per_second, seconds=self._seconds,
                )
            )  # fmt: skip

        return Child(f"writer-{number}", "writer.py", part, lambda: self._environment)

    def _trainer(self, number: int) -> Child:
        def part() -> bytes:
            return msgspec.json.encode(
                TrainerPlan(plan=self._plan, number=number, rank=RANKS[number], wire=["tcp"], batch=_CLAIMS)
            )

        return Child(f"trainer-{number}", "trainer.py", part, lambda: self._environment)

    def _tend(self) -> None:
        super()._tend()
        if all(self._accounts.finished(number) for number in range(len(READERS))):
            self._loop.call_soon_threadsafe(self._proxy.calm)

    def run(self) -> dict[str, Any]:
        """Everything, to the report. A listener or supervisor that was started again has ended by itself."""
        found = super().run()
        logs = [log.read_text(errors="replace") for log in Path(self._plan.folder).glob("*.log")]
        found["crashes"] += [line for log in logs for line in log.splitlines() if "restarting it" in line]
        found["passed"] = found["passed"] and not found["crashes"]
        return found | {"network": dict(sorted(self._proxy.counts.items()))}


def main() -> int:
    """The exit status."""
    given = parser(__doc__, "build/network")
    given.add_argument("--minutes", type=float, default=60.0)
    given.add_argument("--per-second", type=float, default=100.0, help="payloads that are written, at most")
    given.add_argument("--every-s", type=float, default=1.0, help="mean time between two faults")
    given.add_argument("--only", choices=KINDS, default="", help="no other faults on the network")
    chosen = given.parse_args()
    # SOAK_LARGEST is read when payloads.py is imported.
    if (status := status_of_isolated_run(__file__, {"SOAK_LARGEST": str(_LARGEST)})) is not None:
        return status
    options = Options(
        payloads=_UNLIMITED, kills=0, seed=chosen.seed, folder=chosen.folder.resolve(), stuck_s=chosen.stuck_s,
        isolated=os.environ[ISOLATED] == "1", build=None, plant=chosen.plant,
    )  # fmt: skip
    if options.isolated:  # so that whatever is left there is of this run
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], check=True)
    with tempfile.TemporaryDirectory(prefix="soak-network-") as folder:
        soak = NetworkSoak(options, Path(folder), chosen.minutes, chosen.per_second, chosen.every_s, chosen.only)
        report = soak.run()
    if options.isolated:
        report["left_behind"] += [entry.name for entry in Path("/dev/shm").iterdir()]
        report["passed"] = report["passed"] and not report["left_behind"]
    finish(report, chosen.json)
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
