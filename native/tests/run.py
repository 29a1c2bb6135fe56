#!/usr/bin/env python3
"""Build and run the C++ tests: `run.py [--sanitizers address,thread,none] [--build DIR] [--seed N]`.

One build per sanitizer, kept in DIR (default build/native-tests) so that a second run only compiles what
changed. The tests of crashes run everywhere but under the thread sanitizer, which cannot see across processes.
Prints a line per step and exits with 1 if one failed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

NATIVE = Path(__file__).resolve().parent.parent
sys.path.append(str(NATIVE.parent / "tests" / "support"))
from waiting import waiting  # noqa: E402  # a program of its own, without an installed package

TIMEOUT_S = 300  # a watchdog against deadlock, not a bound on speed

FLAGS = {"address": "address,undefined", "thread": "thread", "none": ""}
TESTS = {
    "address": [
        "slot_word_test",
        "siphash_test",
        "note_test",
        "block_pool_test",
        "received_test",
        "ring_test",
        "claims_test",
        "ring_fuzz",
        "futex_test",
        "creation_test",
        "crash_test",
        "finishes_test",
    ],
    "thread": [
        "slot_word_test",
        "siphash_test",
        "note_test",
        "block_pool_test",
        "received_test",
        "ring_test",
        "claims_test",
        "ring_fuzz",
    ],
    "none": [
        "slot_word_test",
        "siphash_test",
        "note_test",
        "block_pool_test",
        "received_test",
        "ring_test",
        "claims_test",
        "futex_test",
        "creation_test",
        "crash_test",
        "finishes_test",
    ],
}
ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_stack_use_after_return=1:abort_on_error=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
}


def step(title: str, command: list[str]) -> bool:
    started = time.monotonic()
    try:
        with waiting(title, 60 if title.endswith("build") else 10):
            done = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=TIMEOUT_S,
                env=os.environ | ENVIRONMENT,
            )
        code, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as expired:
        code, output = -1, (expired.stdout or b"").decode(errors="replace") + f"\nno end within {TIMEOUT_S} s"
    print(f"{'ok  ' if code == 0 else 'FAIL'} {title} ({time.monotonic() - started:.1f} s)", flush=True)
    if code != 0:
        print(output, flush=True)
    return code == 0


def compiler() -> list[str]:
    """clang if there is one: its thread sanitizer knows more of the standard library."""
    for name in (os.environ.get("CXX"), "clang++", "clang++-14"):
        if name and shutil.which(name):
            return [f"-DCMAKE_CXX_COMPILER={name}"]
    return []


def run(sanitizer: str, build: Path, seed: int) -> bool:
    tree = build / sanitizer
    cmake = shutil.which("cmake") or str(Path(sys.executable).parent / "cmake")
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    configure = [cmake, "-S", str(NATIVE), "-B", str(tree), *generator, *compiler()]
    configure += [
        "-DTRANSPORT_NATIVE_TESTS=ON",
        "-DTRANSPORT_FAULT_POINTS=ON",
        f"-DTRANSPORT_SANITIZE={FLAGS[sanitizer]}",
    ]
    if not step(f"{sanitizer}: configure", configure):
        return False
    if not step(f"{sanitizer}: build", [cmake, "--build", str(tree), "--parallel", "2"]):
        return False
    arguments = {"ring_fuzz": ["3", str(seed)]}
    passed = [
        step(f"{sanitizer}: {test}", [str(tree / "tests" / test), *arguments.get(test, [])])
        for test in TESTS[sanitizer]
    ]
    return all(passed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sanitizers", default="address,thread,none", help="which builds, comma separated")
    parser.add_argument("--build", type=Path, default=NATIVE.parent / "build" / "native-tests")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    chosen = [name for name in options.sanitizers.split(",") if name]
    unknown = set(chosen) - set(FLAGS)
    if unknown or not chosen:
        parser.error(f"--sanitizers takes {', '.join(FLAGS)}")
    failed = [name for name in chosen if not run(name, options.build, options.seed)]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
