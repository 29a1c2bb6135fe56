"""Tests over verbs, in virtual machines with software RoCE: `make verbs`, or this folder with options.

Makes the machine, boots two guests, and runs `pytest --verbs` in the first, or COMMAND instead; `--shell` gives an
interactive shell there. The exit status is that of what ran.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(
    1, str(Path(__file__).resolve().parents[1])
)  # beside the folder of this file, for debian_root and others

from guests import COUNTED, Guest, accelerator, two_guests
from tree import make_floor, make_tree

# Without KVM a guest is a tenth as fast as its host, which others may use as well.
PATIENCE = {"kvm": 1, "tcg": 10, COUNTED: 10}
WATCHDOG_S = 120  # as in pyproject.toml
# What runs, with the wires that clients of the tests may use: what moves bytes, breaks while they move, or ends with a
# process. What shows the same over every wire (supervisors, strangers, arguments, the phases of an update) is left to
# `make pytest`. `auto` takes shared memory within a host: it is tried between two of them, in tests/verbs.
_CLIENT = [f"tests/client/test_{name}.py" for name in ("client", "client_faults", "fields", "stalls")]
_CLAIMS = [f"tests/claims/test_{name}.py" for name in ("take", "take_outcomes", "network", "found_groups")]
_WEIGHTS = [f"tests/weights/test_{name}.py" for name in ("engine", "sharded", "sharded_delta")]
ALL = {
    "rdma": ["tests/verbs", *_CLIENT, *_CLAIMS, "tests/server/test_server.py", *_WEIGHTS, "tests/guarantees"],
    "rdma,tcp": [*_CLIENT[:2], "tests/claims/test_take.py"],
}
_CROSSING = "tests/verbs/test_two_hosts.py::test_payloads_cross_over_the_best_wire"
FEW = {"rdma": ["tests/client/test_client.py", f"{_CROSSING}[from there-auto]", f"{_CROSSING}[from here-rdma]"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="few of the tests")
    parser.add_argument("--counted", action="store_true", help="guests whose clocks count instructions, for figures")
    parser.add_argument("--shell", action="store_true", help="a shell in the first guest")
    parser.add_argument("command", nargs="*", help="in place of the tests")
    options = parser.parse_args()
    begun = time.monotonic()
    make_tree()
    if not options.short:
        make_floor()
    kind = COUNTED if options.counted else accelerator()
    print(f"{time.monotonic() - begun:6.0f} s  the machine is made", flush=True)
    with two_guests(kind) as (first, _):
        print(f"{time.monotonic() - begun:6.0f} s  two guests are up ({kind})", flush=True)
        if options.shell or options.command:
            line = shlex.join(options.command) or "bash -i"
            return subprocess.run(
                in_environment(first, line, PATIENCE[kind], "rdma", terminal=options.shell)
            ).returncode
        status = 0
        for wires, paths in (FEW if options.short else ALL).items():
            words = ["python", "-m", "pytest", "--verbs", "-v", "--durations=10", *times(kind), *paths]
            status |= subprocess.run(in_environment(first, shlex.join(words), PATIENCE[kind], wires)).returncode
            print(f"{time.monotonic() - begun:6.0f} s  wires {wires}: {(status and 'failed') or 'passed'}", flush=True)
    return status


def times(kind: str) -> list[str]:
    """The options by which a test that hangs is one that failed; where no signal ends it, the run ends."""
    watchdog_s = WATCHDOG_S * PATIENCE[kind]
    options = {
        "timeout": watchdog_s,
        "timeout_method": "signal",
        "faulthandler_timeout": watchdog_s + 60,
        "faulthandler_exit_on_timeout": "true",
    }
    return [word for name, value in options.items() for word in ("-o", f"{name}={value}")]


def in_environment(guest: Guest, line: str, patience: int, wires: str, *, terminal: bool = False) -> list[str]:
    """The command that runs a line of shell in a guest, with the variables of the tests."""
    variables = {
        "PATH": "/checkout/.venv/bin:$PATH",
        "LANG": "C.UTF-8",
        "TEST_PATIENCE": str(patience),
        "TEST_WIRES": wires,
    }
    command = guest.command("env " + " ".join(f'{name}="{value}"' for name, value in variables.items()) + f" {line}")
    return [command[0], "-t", *command[1:]] if terminal else command


if __name__ == "__main__":
    sys.exit(main())
