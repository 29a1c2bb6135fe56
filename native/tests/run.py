#!/usr/bin/env python3
"""Build and run the C++ tests: `run.py [--sanitizers address,thread,none,fuzz] [--build DIR] [--seed N]`.

One build per sanitizer, kept in DIR (default build/native-tests) so that a second run only compiles what
changed. The tests of crashes run everywhere but under the thread sanitizer, which cannot see across processes.
`fuzz` runs each target of libFuzzer for --fuzz-seconds under the address and undefined-behaviour sanitizers, from what
it has learnt before (DIR/corpus). Its build is optimized, for more inputs in that time; that of `address`, which each
change waits for, is not: it compiles in a third of the time, and no access of memory is left out. A sanitizer that the
compiler ($CXX, clang++ or g++) lacks is left out with a word: g++ has no libFuzzer. The tests of the engine need UCX
of the libucx package beside this Python.
Prints a line per step and exits with 1 if one failed.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

NATIVE = Path(__file__).resolve().parent.parent
sys.path.append(str(NATIVE.parent / "tests" / "support"))
from waiting import waiting  # noqa: E402  # a program of its own, without an installed package

TIMEOUT_S = 300  # a watchdog against deadlock, not a bound on speed
BUILD_TIMEOUT_S = 1800

FLAGS = {
    "address": "address,undefined",
    "thread": "thread",
    "none": "",
    "fuzz": "fuzzer-no-link,address,undefined",
}
# Target of libFuzzer and the longest input that says something new to it.
FUZZ = {"frames": 2100, "status": 700, "taken": 1200, "segment": 200, "tree": 400, "note": 600, "serving": 900}
NEEDS_UCX = {"engine_test", "serving"}
TESTS = {
    "address": [
        "slot_word_test",
        "siphash_test",
        "note_test",
        "tree_check_test",
        "block_pool_test",
        "received_test",
        "ring_test",
        "claims_test",
        "ring_fuzz",
        "futex_test",
        "creation_test",
        "crash_test",
        "file_test",
        "finishes_test",
        "engine_test",
    ],
    "thread": [
        "slot_word_test",
        "siphash_test",
        "note_test",
        "tree_check_test",
        "block_pool_test",
        "received_test",
        "ring_test",
        "claims_test",
        "ring_fuzz",
        "engine_test",
    ],
    "none": [
        "slot_word_test",
        "siphash_test",
        "note_test",
        "tree_check_test",
        "block_pool_test",
        "received_test",
        "ring_test",
        "claims_test",
        "futex_test",
        "creation_test",
        "crash_test",
        "file_test",
        "finishes_test",
    ],
}
ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_stack_use_after_return=1:abort_on_error=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": f"halt_on_error=1:second_deadlock_stack=1:suppressions={NATIVE / 'tests' / 'thread.supp'}",
    # Sanitizers have hooks of their own where UCX would place its.
    "UCX_TLS": "tcp",
    "UCX_NET_DEVICES": "lo",
    "UCX_MEM_EVENTS": "n",
    "UCX_MEMTYPE_CACHE": "n",
    "UCX_HANDLE_ERRORS": "none",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    "LSAN_OPTIONS": f"print_suppressions=0:suppressions={NATIVE / 'tests' / 'leak.supp'}",
}


def step(title: str, command: list[str], limit_s: float = TIMEOUT_S) -> bool:
    started = time.monotonic()
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=limit_s,
            env=os.environ | ENVIRONMENT,
        )
        code, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as expired:
        code, output = -1, (expired.stdout or b"").decode(errors="replace") + f"\nno end within {limit_s} s"
    print(f"{'ok  ' if code == 0 else 'FAIL'} {title} ({time.monotonic() - started:.1f} s)", flush=True)
    if code != 0:
        print(output, flush=True)
    return code == 0


def compiler() -> str:
    """$CXX, or clang if there is one: its thread sanitizer knows more of the standard library."""
    names = (os.environ.get("CXX"), "clang++", "clang++-14", "g++", "c++")
    return next((name for name in names if name and shutil.which(name)), "c++")


@functools.cache
def available(sanitizers: str) -> bool:
    """Whether the compiler has these. Says so where it has not."""
    program = 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }\n'
    if not sanitizers.startswith("fuzzer"):
        program += "int main() { return 0; }\n"
    with tempfile.TemporaryDirectory() as folder:
        command = [compiler(), "-x", "c++", "-", f"-fsanitize={sanitizers}", "-o", f"{folder}/program"]
        done = subprocess.run(command, input=program, text=True, stderr=subprocess.PIPE)
    if done.returncode:
        print(
            f"SKIPPED: {compiler()} has no -fsanitize={sanitizers}: apt-get install clang libclang-rt-dev", flush=True
        )
    return done.returncode == 0


def ucx() -> Path | None:
    """The folder of the libucx package, which has UCX's headers and libraries."""
    found = importlib.util.find_spec("libucx")
    return Path(found.origin).parent if found is not None and found.origin else None


def compiler_of(tree: Path) -> str | None:
    """The compiler that a tree was configured with; None: there is no tree."""
    cache = tree / "CMakeCache.txt"
    found = re.search(r"^CMAKE_CXX_COMPILER:\w+=(.+)$", cache.read_text(), re.MULTILINE) if cache.exists() else None
    return None if found is None else found[1]


def build_tree(sanitizer: str, tree: Path) -> bool:
    if (made_by := compiler_of(tree)) is not None and shutil.which(made_by) != shutil.which(compiler()):
        shutil.rmtree(tree)  # cmake forgets what it is told beside another compiler
    cmake = shutil.which("cmake") or str(Path(sys.executable).parent / "cmake")
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    configure = [cmake, "-S", str(NATIVE), "-B", str(tree), *generator]
    configure += [f"-DCMAKE_CXX_COMPILER={compiler()}"]
    configure += [
        "-DTRANSPORT_NATIVE_TESTS=ON",
        "-DTRANSPORT_FAULT_POINTS=ON",
        f"-DTRANSPORT_SANITIZE={FLAGS[sanitizer]}",
        f"-DTRANSPORT_OPTIMIZE={0 if sanitizer == 'address' else 1}",
    ]
    if (folder := ucx()) is not None and (sanitizer == "fuzz" or "engine_test" in TESTS[sanitizer]):
        configure += [f"-DTRANSPORT_UCX_INCLUDE={folder / 'include'}", f"-DTRANSPORT_UCX_LIBRARIES={folder / 'lib'}"]
    build = [cmake, "--build", str(tree), "--parallel", "2", "--", *(["-k", "0"] if generator else ["-k"])]
    with waiting(f"{sanitizer}: build", 40):
        return step(f"{sanitizer}: configure", configure) and step(f"{sanitizer}: build", build, BUILD_TIMEOUT_S)


def possible(name: str) -> bool:
    if name in NEEDS_UCX and ucx() is None:
        print(f"SKIPPED: {name} needs UCX: pip install libucx-cu12", flush=True)
        return False
    return True


def run(sanitizer: str, build: Path, seed: int) -> bool:
    tree = build / sanitizer
    if FLAGS[sanitizer] and not available(FLAGS[sanitizer]):
        return True
    if not build_tree(sanitizer, tree):
        return False
    arguments = {"ring_fuzz": ["3", str(seed)]}
    tests = [test for test in TESTS[sanitizer] if possible(test)]

    def passes(test: str) -> bool:
        return step(f"{sanitizer}: {test}", [str(tree / "tests" / test), *arguments.get(test, [])])

    with waiting(f"{sanitizer}: {len(tests)} tests", 20), ThreadPoolExecutor(2) as two:
        return all(list(two.map(passes, tests)))


def fuzzed(target: str, tree: Path, seconds: int) -> bool:
    """One target in its time. What it has found stays in the tree, beside what it has learnt."""
    corpus, found = tree.parent / "corpus" / target, tree.parent / "found"
    corpus.mkdir(parents=True, exist_ok=True)
    found.mkdir(exist_ok=True)
    done = subprocess.run(
        [
            str(tree / "tests" / f"fuzz_{target}"), f"-max_total_time={seconds}", f"-max_len={FUZZ[target]}",
            "-print_final_stats=1", "-timeout=60", "-rss_limit_mb=4096", f"-artifact_prefix={found}/{target}-",
            str(corpus),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=os.environ | ENVIRONMENT,
    )  # fmt: skip
    counted = re.search(r"number_of_executed_units: (\d+)", done.stdout)
    executed = int(counted[1]) if counted else 0
    good = done.returncode == 0 and executed > 0
    print(f"{'ok  ' if good else 'FAIL'} fuzz: {target}, {executed} inputs in {seconds} s", flush=True)
    if not good:
        print(done.stdout[-20_000:], flush=True)
    return good


def fuzz(build: Path, seconds: int) -> bool:
    tree = build / "fuzz"
    if not available("fuzzer"):
        return True
    if not build_tree("fuzz", tree):
        return False
    targets = [target for target in FUZZ if possible(target)]
    with waiting(f"{len(targets)} fuzz targets", len(targets) * seconds / 2), ThreadPoolExecutor(2) as two:
        return all(list(two.map(lambda target: fuzzed(target, tree, seconds), targets)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sanitizers", default="address,thread,none,fuzz", help="which builds, comma separated")
    parser.add_argument("--build", type=Path, default=NATIVE.parent / "build" / "native-tests")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fuzz-seconds", type=int, default=10, help="of each fuzz target")
    options = parser.parse_args()
    chosen = [name for name in options.sanitizers.split(",") if name]
    if set(chosen) - set(FLAGS) or not chosen:
        parser.error(f"--sanitizers takes {', '.join(FLAGS)}")
    passed = [
        fuzz(options.build, options.fuzz_seconds) if name == "fuzz" else run(name, options.build, options.seed)
        for name in chosen
    ]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
