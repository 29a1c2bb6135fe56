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
import time
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "harness"))
os.environ["SOAK_LARGEST"] = str(6 << 20)  # read when payloads.py is imported

from command import finish, isolated, new_folder, parser
from planted import PLANTS

KINDS = {"cut by RST": 4, "cut by FIN": 4, "stall": 3, "slow": 3, "flip in a payload": 4, "flip in a message": 6}
_DETOURED = Path(__file__).resolve().parents[2] / "tests" / "support" / "detoured.c"
_SLOTS = 48
_CLAIMS = 16  # of a batch
_UNLIMITED = 1 << 40  # payloads: time ends the run


def main() -> int:
    """The exit status."""
    given = parser(__doc__, "build/network")
    given.add_argument("--plant", choices=PLANTS, default="", help="a fault that this run must find (planted.py)")
    given.add_argument("--stuck-s", type=float, default=90.0, help="without any payload for so long it has failed")
    given.add_argument("--minutes", type=float, default=60.0)
    given.add_argument("--per-second", type=float, default=100.0, help="payloads that are written, at most")
    given.add_argument("--every-s", type=float, default=1.0, help="mean time between two faults")
    given.add_argument("--only", choices=KINDS, default="", help="no other faults on the network")
    chosen = given.parse_args()
    alone = isolated()
    from network_proxy import Proxy  # not before the fork: numpy has threads
    from plan import Part
    from run import READERS, Options, Soak

    class NetworkSoak(Soak):
        """One run. A listener or supervisor that was started again has ended by itself."""

        def __init__(self, options: Options, short: Path) -> None:
            super().__init__(options)
            library, asked_at = short / "detoured.so", short / "detour"
            subprocess.run(["cc", "-shared", "-fPIC", "-O1", _DETOURED, "-o", library, "-ldl"], check=True)
            self._environment |= {"LD_PRELOAD": str(library), "DETOUR": str(asked_at)}
            self._proxy = Proxy(asked_at, options.seed, chosen.every_s, {chosen.only: 1} if chosen.only else KINDS)
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=lambda: self._loop.run_until_complete(self._proxy.run()), daemon=True).start()
            self._ends_at = float("inf")
            self._written = False

        def _part(self, name: str, **more: Any) -> Part:
            if name.startswith("writer"):
                own = {"left": 0} if self._written else {}
                return super()._part(name, slots=_SLOTS, per_s=chosen.per_second / len(READERS), **own)
            return super()._part(name, wire=["tcp"], batch=_CLAIMS)

        def _tend(self) -> None:
            super()._tend()
            if self._ledger.due and self._ends_at == float("inf"):
                self._ends_at = time.monotonic() + 60 * chosen.minutes
            if time.monotonic() >= self._ends_at and not self._written:
                self._written = True
                self._loop.call_soon_threadsafe(self._proxy.calm)
                for number in range(len(READERS)):
                    self._children[f"writer-{number}"].stop_writing()

        def run(self) -> dict[str, Any]:
            found = super().run()
            logs = [log.read_text(errors="replace") for log in self._options.folder.glob("*.log")]
            found["crashes"] += [line for log in logs for line in log.splitlines() if "restarting it" in line]
            found["passed"] = found["passed"] and not found["crashes"]
            return found | {"network": dict(sorted(self._proxy.counts.items()))}

    options = Options(
        folder=new_folder(chosen.folder),
        seed=chosen.seed,
        isolated=alone,
        stuck_s=chosen.stuck_s,
        plant=chosen.plant,
        payloads=_UNLIMITED,
    )
    with tempfile.TemporaryDirectory(prefix="soak-network-") as short:  # a socket's path is short
        report = NetworkSoak(options, Path(short)).run()
    finish(report, chosen.json)
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
