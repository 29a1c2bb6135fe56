"""What every change has to pass, meant to take 20 minutes on two cores: `.ci/run`, as root on a Debian.

A fresh Debian runs README's commands with what README names alone, as a user without privileges and as root; then it
gets the packages that more tests need. No test runs again that has passed in the same run (`--passed`): the second user
runs what the first had to skip, and with the packages runs what both had to. What takes long comes by turns, by the
number of the commit: which Debian, which user is the first, and one of PARTS. Others begin until OTHERS_WITHIN_S have
gone, first the night's tests of the rooms that the last commits touched, then the parts whose files they touched.
docs/developers/TESTING.md has the table.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from debian_root import ROOT
from fresh import Steps

PACKAGES = "clang libclang-rt-dev spin gcc redis-server iproute2 slurm-wlm munge"
TURN_WITHIN_S, OTHERS_WITHIN_S = 50 * 60.0, 12 * 60.0  # a slow machine must not reach CI's limit
LAST_COMMITS = 10


class Part(NamedTuple):
    """Checks that come by turns."""

    name: str
    command: str
    touched: tuple[str, ...] = ()  # where a change calls for it
    suites: tuple[str, ...] = ("bookworm", "trixie")
    within: bool = True  # the fresh Debian; else on this machine


PARTS = (
    Part(
        "adapters",
        "make adapters TRY_AGAIN=1",
        ("transport/adapters/", "tests/adapters/", "constraints-adapters.txt", "tests/support/adapters_environment.py"),
        ("bookworm",),  # the frameworks' versions are for its Python
    ),
    Part("native", "make --keep-going native-full model", ("native/",)),
    Part("nightly, first half", "make nightly-tests SHORT=1 SHARE=1/2 TRY_AGAIN=1"),
    Part(
        "wheel, soak",
        "make --keep-going wheel-test lint-pythons soak SOAK_OPTIONS='--payloads 50000 --kills 50'",
        ("pyproject.toml", "native/CMakeLists.txt"),
    ),
    Part("nightly, second half", "make nightly-tests SHORT=1 SHARE=2/2 TRY_AGAIN=1"),
    Part(
        "verbs",
        "make verbs SHORT=1",
        (
            *("native/ucp/", "transport/wire/", "transport/client/", "transport/server/", "transport/claims/"),
            *("transport/weights/transfer/", "tests/verbs/", "tests/support/verbs/"),
        ),
        within=False,  # it makes a Debian and virtual machines of its own
    ),
)


def git(*words: str) -> str:
    """What git says."""
    return subprocess.run(["git", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout


def night_of(changed: list[str]) -> list[Part]:
    """The night's tests of the rooms that were touched."""
    rooms = {Path(path).parts[1] for path in changed if path.startswith(("transport/", "tests/"))}
    folders = sorted(f"tests/{room}" for room in rooms if any((ROOT / "tests" / room).glob("test_*.py")))
    command = f"make nightly-tests SHORT=1 ROOMS='{' '.join(folders)}' TRY_AGAIN=1"
    return [Part("nightly, touched rooms", command)] if folders else []


def in_order(number: int, suite: str, changed: list[str]) -> list[Part]:
    """The parts for this commit: those that were touched, the one whose turn it is, the next ones."""
    first = number // 2 % len(PARTS)
    parts = [part for part in PARTS[first:] + PARTS[:first] if suite in part.suites]
    return sorted(parts, key=lambda part: not any(path.startswith(part.touched) for path in changed))


def main() -> int:
    """The exit status."""
    begun, number = time.monotonic(), int(git("rev-list", "--count", "HEAD"))
    suite, first, second = ("bookworm", "trixie")[number % 2], *("$#", "#$")[number // 2 % 2]
    changed = git("log", "--format=", "--name-only", f"-{LAST_COMMITS}").split()
    parts = [*night_of(changed), *in_order(number, suite, changed)]
    turn = in_order(number, suite, [])[0]
    print(f"commit number {number}: {suite}, {first} first, then {', '.join(part.name for part in parts)}", flush=True)
    options = "PASSED=build/passed TRY_AGAIN=1"
    steps = Steps(suite)
    steps.run(f"{first} make demo")
    steps.run(f"{first} make test {options}")
    steps.run(f"{second} make demo")
    steps.run(f"{second} make pytest {options}")
    steps.prepare(f"apt-get install -y -qq --no-install-recommends {PACKAGES}", 60)
    steps.run(f"# make pytest {options}")
    for part in parts:
        if time.monotonic() - begun < (TURN_WITHIN_S if part is turn else OTHERS_WITHIN_S):
            steps.run(f"{'#' if part.within else 'machine#'} {part.command}")
    return steps.close()


if __name__ == "__main__":
    sys.exit(main())
