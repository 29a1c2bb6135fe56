"""Check the models with Spin: every configuration, and every planted fault.

    python3 native/model/check.py [--quick | --deep] [--model NAME] [--json PATH] [--only NAME] [--trace FAULT]
                                  [--time-limit SECONDS]

Every search is exhaustive for its configuration: no bitstate, no hash compaction, no partial order
reduction. Exit status: 0 all hold and every fault is found, 1 otherwise, 3 Spin or gcc is missing.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

MODELS = ("slot", "acks", "claim", "keepers", "futex", "decision", "weights")
MEMORY_LIMIT_MB = 3500  # per search; two run at once
TIME_LIMIT_S = 600  # of each search
TIME_LIMIT_DEEP_S = 7200  # of those of --deep, which take minutes on an idle machine
EVERYTHING = "OVERWRITE=1 DISCARD=1"


@dataclass(frozen=True)
class Case:
    name: str
    defines: str
    expect: str = ""  # the property that must be violated; none: all must hold
    ltl: bool = False
    size: int = 0  # 0 is part of --quick, 2 only of --deep
    model: str = "slot"

    @property
    def path(self) -> Path:
        """The model's file."""
        return Path(__file__).with_name(f"{self.model}.pml")


# Two writers, listeners, ranks and generations unless said otherwise; longest first, so that two cores end together.
CONFIGURATIONS = (
    Case("2 slots, overwrite and discard", f"SLOTS=2 {EVERYTHING}", size=2),
    Case("2 slots", "SLOTS=2", size=1),
    Case("3 slots, 1 writer, 1 generation", "SLOTS=3 WRITERS=1 MAXGEN=1", size=2),
    Case("3 slots, 1 writer, readers=1", "SLOTS=3 WRITERS=1 READERS=1", size=1),
    Case("3 slots, readers=1, 1 generation", "SLOTS=3 READERS=1 MAXGEN=1", size=1),
    Case("2 slots, readers=1, 3 generations", f"SLOTS=2 READERS=1 MAXGEN=3 {EVERYTHING}", size=1),
    Case("2 slots, readers=1, comes to rest", "SLOTS=2 READERS=1", ltl=True, size=1),
    Case("2 slots, readers=1, 2 reclaimers", "SLOTS=2 READERS=1 JANITORS=2", size=1),
    Case("2 slots, readers=1, readers gone", "SLOTS=2 READERS=1 READERS_GONE", size=1),
    Case("1 slot, 2 attempts each", f"SLOTS=1 ATTEMPTS=2 MAXGEN=3 {EVERYTHING}", size=1),
    Case("2 slots, 1 listener, 2 attempts", "SLOTS=2 LISTENERS=1 ATTEMPTS=2", size=1),
    Case("1 slot, 3 generations", f"SLOTS=1 MAXGEN=3 {EVERYTHING}"),
    Case("1 slot, comes to rest", f"SLOTS=1 {EVERYTHING}", ltl=True),
    Case("1 slot, readers gone, rests", f"SLOTS=1 READERS_GONE {EVERYTHING}", ltl=True),
    Case("1 slot, readers gone", f"SLOTS=1 READERS_GONE {EVERYTHING}"),
    Case("1 slot, 2 reclaimers", f"SLOTS=1 JANITORS=2 {EVERYTHING}"),
    Case("1 slot, newcomers clear alone", f"SLOTS=1 JANITORS=0 {EVERYTHING}"),
    Case("1 slot, readers differ", f"SLOTS=1 MIXED MAXGEN=3 {EVERYTHING}"),
)

# One client, its ledger and two listeners; one queue, two trainers, the writer and its successors.
CONFIGURATIONS += (
    Case("acks: 2 slots, 2 generations", "SLOTS=2 NUMBERS=2", size=1, model="acks"),
    Case("acks: 1 slot, 3 generations", "MAXGEN=3", size=1, model="acks"),
    Case("acks: 2 slots, longer connections", "SLOTS=2 NUMBERS=3", size=2, model="acks"),
    Case("acks: 1 slot, 2 generations", "", model="acks"),
    Case("acks: one listener goes for good", "ONE_GOES", model="acks"),
    Case("claim: 2 ranks, silent, 1 connection", "RANKS=2 LEASE CONNECTIONS=1", size=1, model="claim"),
    Case("claim: 2 generations, silent", "MAXGEN=2 LEASE", size=1, model="claim"),
    Case("claim: silent, discarded", "LEASE DISCARD", size=1, model="claim"),
    Case("claim: 2 ranks", "RANKS=2", size=1, model="claim"),
    Case("claim: 2 generations, 3 attempts", "MAXGEN=2 MAXATTEMPTS=3", size=1, model="claim"),
    Case("claim: mapped, 2 ranks, everything", "NO_NETWORK RANKS=2 LEASE DISCARD ENDS", model="claim"),
    Case("claim: mapped, everything", "NO_NETWORK LEASE DISCARD ENDS MAXGEN=2 MAXATTEMPTS=3", model="claim"),
    Case("claim: network, everything", "NO_MAPPED LEASE DISCARD MAXGEN=2 MAXATTEMPTS=3", model="claim"),
    Case("claim: network, asked to come again", "NO_MAPPED AGAIN LEASE MAXGEN=2", model="claim"),
    Case("claim: both, nobody silent", "AGAIN", model="claim"),
    Case("claim: 2 ranks, silent", "RANKS=2 LEASE", size=2, model="claim"),
    Case("keepers: a writer and its successor", "", model="keepers"),
    Case("keepers: one writer", "WRITERS=1", model="keepers"),
    Case("futex: 2 sleepers, 3 wakers", "WAKERS=3", size=2, model="futex"),
    Case("futex: 2 sleepers, 2 wakers twice", "EVENTS=2", size=1, model="futex"),
    Case("futex: 3 sleepers, 2 wakers", "SLEEPERS=3", size=1, model="futex"),
    Case("futex: 2 sleepers, 2 wakers", "", model="futex"),
    Case("futex: expected, 2 wakers twice", "EXPECTED EVENTS=2", model="futex"),
    Case("decision: 2 deciders", "", model="decision"),
    Case("decision: 3 deciders", "DECIDERS=3", model="decision"),
    Case("decision: 2 deciders, 4 values before", "OPEN=4", model="decision"),
    Case("decision: 3 deciders, 3 values before", "DECIDERS=3 OPEN=3", model="decision"),
    Case("weights: a manager", "", model="weights"),
    Case("weights: records in a store", "TOGETHER", model="weights"),
    Case("weights: a manager, 4 versions", "UPDATES=4", size=2, model="weights"),
    Case("weights: records, 4 versions", "TOGETHER UPDATES=4", size=1, model="weights"),
)

REWRITTEN = "P2_rewritten_under_a_live_pin"
FAULTS = (
    Case("PIN_NO_GENERATION", "", "P1_bytes_of_another_generation"),
    Case("PIN_IGNORES_DONE", "", "P7_read_again_after_consume"),
    Case("FREE_ON_SEND", "", "P5_payload_lost"),
    Case("FIRST_FINISH_FREES", "", REWRITTEN),
    Case("RECLAIM_WITHOUT_LOCK", "", REWRITTEN),
    Case("LOCK_SHARED_BY_THREADS", "JANITORS=2 WRITERS=1", REWRITTEN),
    Case("REUSE_BEFORE_CLEARING", "", "P6_stuck"),
    Case("WRITING_NOT_RECLAIMED", "", "comes_to_rest", ltl=True),
    Case("OVERWRITE_IGNORES_PINS", "OVERWRITE=1", REWRITTEN),
    Case("CONSUME_NO_GENERATION", "", "P5_payload_lost"),
    Case("CONSUME_IGNORES_DONE", "", "P4_consumed_twice"),
    Case("CONSUME_IGNORES_PINS", "", REWRITTEN),
    Case("DISCARD_IGNORES_PINS", "DISCARD=1", REWRITTEN),
    Case("UNPIN_FORGETS_DONE", "", "P6_stuck"),
    Case("LATE_UNPIN", "", REWRITTEN),
    Case("UNPIN_WHILE_SENDING", "", REWRITTEN),
    Case("REFUSED_MARK_KEEPS_PIN", "", "P6_stuck"),
    Case("COUNT_WITHOUT_MUTEX", "ATTEMPTS=2 WRITERS=1 LISTENERS=1", REWRITTEN),
    Case("PUBLISH_NO_GENERATION", "", "P1_bytes_of_another_generation"),
    Case("ABORT_UNCHECKED", "", "P3_freed_exactly_once"),
    Case("READERS_BEFORE_WORD", "MIXED MAXGEN=3", "P5_payload_lost"),
    Case("TICKET_WITHOUT_GENERATION", "", "D1_bytes_of_another_generation", model="acks"),
    Case("NO_RECORD_OF_DUPLICATES", "", "D2_consumed_twice", model="acks"),
    Case("FREE_ON_SEND", "", "D3_freed_before_it_was_consumed", model="acks"),
    Case("ACK_WITHOUT_GENERATION", "", "D3_freed_before_it_was_consumed", model="acks"),
    Case("ACK_NOT_SENT_AGAIN", "", "D4_stuck", model="acks"),
    Case("ACK_ONLY_WHERE_IT_CAME_FROM", "ONE_GOES", "D4_stuck", model="acks"),
    Case("CONFIRMED_WITHOUT_AN_ANSWER", "", "D4_stuck", model="acks"),
    Case("CONFIRMED_BY_AN_EARLIER_ANSWER", "", "D4_stuck", model="acks"),
    Case("FINISH_IGNORES_DONE", "DISCARD", "T1_consumed_twice", model="claim"),
    Case("FINISH_NOT_FENCED", "LEASE", "T6_trained_on_anothers_claim", model="claim"),
    Case("CLAIM_BY_STORE", "", "T2_claimed_by_two", model="claim"),
    Case("CLAIM_BEFORE_PIN", "", "T4_stuck", model="claim"),
    Case("WORD_DROPPED_AFTER_THE_PIN", "", "T4_stuck", model="claim"),
    Case("RECLAIM_FORGETS_CLAIMS", "", "T4_stuck", model="claim"),
    Case("RECLAIM_CLEARS_THE_BIT_FIRST", "", "T4_stuck", model="claim"),
    Case("PUBLISH_KEEPS_CLAIMS", "MAXGEN=2", "T4_stuck", model="claim"),
    Case("REFUSED_FINISH_KEEPS_PIN", "LEASE", "T4_stuck", model="claim"),
    Case("FREED_BESIDE_A_PIN", "DISCARD MAXGEN=2", "T5_rewritten_under_a_claim", model="claim"),
    Case("LOOKERS_LEASE", "LEASE", "T7_taken_from_a_holder_that_was_heard", model="claim"),
    Case("SILENCE_BEFORE_THE_WORD", "LEASE", "T7_taken_from_a_holder_that_was_heard", model="claim"),
    Case("CLAIMED_BEFORE_HEARD", "LEASE", "T7_taken_from_a_holder_that_was_heard", model="claim"),
    Case("NOBODY_LOOKS", "LEASE", "T4_stuck", model="claim"),
    Case("TAKEN_BACK_WHILE_IT_ENDS", "LEASE", "T6_trained_on_anothers_claim", model="claim"),
    Case("ACCEPTED_BEFORE_IT_IS_CONSUMED", "DISCARD", "V2_told_yes_and_not_consumed", model="claim"),
    Case("ENDED_WITHOUT_THE_MARK", "LEASE ENDS", "T6_trained_on_anothers_claim", model="claim"),
    Case("ASKS_THE_FIRST_ENTRY", "AGAIN", "V1_told_no_and_consumed", model="claim"),
    Case("IN_QUESTION_IS_NO", "", "V1_told_no_and_consumed", model="claim"),
    Case("LOST_ANSWER_IS_NO", "", "V1_told_no_and_consumed", model="claim"),
    Case("ASKED_WITHOUT_REVOKING", "", "V1_told_no_and_consumed", model="claim"),
    Case("LOOKS_BEFORE_IT_NOTES", "", "V1_told_no_and_consumed", model="claim"),
    Case("NOT_NOTED_BEFORE", "", "V1_told_no_and_consumed", model="claim"),
    Case("UNPINNED_BEFORE_DECIDED", "", "V1_told_no_and_consumed", model="claim"),
    Case("CLEARED_BEFORE_DECIDED", "", "V1_told_no_and_consumed", model="claim"),
    Case("LISTENER_NOT_ADOPTED", "", "S1_port_served_twice", model="keepers"),
    Case("STOPS_WITH_ITS_WRITER", "", "S5_ended_untold", model="keepers"),
    Case("REMOVED_UNREAD", "", "S2_unlinked_with_payloads_in_time", model="keepers"),
    Case("UNLINKED_WHILE_KEPT", "", "S2_unlinked_with_payloads_in_time", model="keepers"),
    Case("ORPHANS_STAY", "", "S3_stuck", model="keepers"),
    Case("NOBODY_LOOKS", "", "S3_stuck", model="keepers"),
    Case("TAKE_OVER_STARTS_ANEW", "", "S4_generation_begun_anew", model="keepers"),
    Case("DEAD_IS_GONE", "", "S5_ended_untold", model="keepers"),
    Case("LOST_IS_OVER", "", "S5_ended_untold", model="keepers"),
    Case("STOPPED_IS_OVER", "", "S5_ended_untold", model="keepers"),
    Case("RESTING_ARE_NOT_CALLED", "", "S3_stuck", model="keepers"),
    Case("REMOVES_WITHOUT_THE_LOCK", "", "S6_kept_without_a_name", model="keepers"),
    Case("NAME_NOT_LOOKED_AT_AGAIN", "", "S6_kept_without_a_name", model="keepers"),
    Case("REMOVER_LOCKS_ALONE", "", "S7_refused_by_a_remover", model="keepers"),
    Case("LOWERED_AFTER_ADVANCING", "", "F1_asleep_on_an_old_count", model="futex"),
    Case("NOT_LOOKED_AT_AGAIN", "", "F1_asleep_on_an_old_count", model="futex"),
    Case("FLAG_NOT_RAISED", "", "F1_asleep_on_an_old_count", model="futex"),
    Case("RAISED_BEFORE_SEEN", "EXPECTED", "F2_asleep_with_something_to_take", model="futex"),
    Case("RAISED_AFTER_LOOK", "EXPECTED", "F2_asleep_with_something_to_take", model="futex"),
    Case("WRITES_WITHOUT_COMPARING", "", "W5_written_after_its_end", model="decision"),
    Case("COMPARES_VALUES", "OPEN=3", "W4_made_of_an_older_value", model="decision"),
    Case("LOST_ANSWER_IS_NO", "", "W1_two_decisions", model="decision"),
    Case("LOST_ANSWER_IS_YES", "", "W1_two_decisions", model="decision"),
    Case("REFUSED_IS_THE_END", "", "W3_stuck", model="decision"),
    Case("COMMITS_BEFORE_ALL_HAVE_PROVEN", "", "C1_loaded_before_all_had_proven", model="weights"),
    Case("REFUSED_IS_KEPT", "", "C2_loaded_after_it_was_refused", model="weights"),
    Case("REFUSED_IS_KEPT", "TOGETHER", "C2_loaded_after_it_was_refused", model="weights"),
    Case("LOADS_SIDE_BY_SIDE", "", "C3_changed_while_it_serves", model="weights"),
    Case("RECORD_SET_AGAIN", "TOGETHER", "C5_committed_and_refused", model="weights"),
    Case("RETURNS_ALONE", "TOGETHER", "C5_committed_and_refused", model="weights"),
    Case("KEPT_IS_FORGOTTEN", "TOGETHER", "C5_committed_and_refused", model="weights"),
    # A limit of the table, not a fault: what a rank has and has not acknowledged may be overwritten.
    Case("OVERWRITE_AFTER_DELIVERY", "OVERWRITE=1", "LIMIT_overwritten_after_delivery"),
)


@dataclass(frozen=True)
class Outcome:
    name: str
    defines: str
    expect: str
    found: str  # the violated property
    states: int
    depth: int
    seconds: float
    memory_mb: float
    trouble: str  # why the search does not count

    @property
    def good(self) -> bool:
        return not self.trouble and self.found == self.expect


def defines_of(case: Case) -> list[str]:
    words = case.defines.split()
    if case.expect:
        words += [("SHOW_" if case.expect.startswith("LIMIT") else "MUT_") + case.name, "MUTANT"]
        words += ["SLOTS=1"] * (case.model == "slot")
    return [f"-D{word}" for word in words + ["LIVENESS"] * case.ltl]


def search(case: Case, folder: str, time_limit_s: float) -> Outcome:
    """Generate, compile and run one verifier; a fault breadth first, for a shortest counterexample."""
    kind = [] if case.ltl else ["-DSAFETY", "-DBFS"] if case.expect else ["-DSAFETY"]
    options = ["-w25" if case.size else "-w22", "-m2000000", "-n", *(["-a"] if case.ltl else [])]
    commands = (
        ["spin", "-a", *defines_of(case), str(case.path)],
        [
            "gcc",
            "-O2" if case.size else "-O0",
            "-w",
            "-DNOREDUCE",
            f"-DMEMLIM={MEMORY_LIMIT_MB}",
            *kind,
            "-o",
            "pan",
            "pan.c",
        ],
        ["./pan", *options],
    )
    text, trouble = "", ""
    for command in commands:
        start = time.monotonic()
        try:
            ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=time_limit_s)
        except subprocess.TimeoutExpired:
            trouble = f"{command[0]}: not finished in {time_limit_s:.0f} s"
            break
        text = ran.stdout + ran.stderr
        if command[0] != "./pan" and (ran.returncode or "Error" in text):
            trouble = f"{command[0]}: {text.strip()[-200:]}"
            break
    seconds = time.monotonic() - start

    def number(pattern: str) -> float:
        match = re.search(pattern, text)
        return float(match.group(1)) if match else 0

    named = re.search(r"assertion violated .*?\b((?:[CDFPQSTVW]\d|LIMIT)_\w+)", text)
    found = named.group(1) if named else "comes_to_rest" if "acceptance cycle" in text else ""
    errors = re.search(r"errors: (\d+)", text)
    if not trouble and errors is None:
        trouble = f"pan: {text.strip()[-200:]}"
    elif not trouble and bool(int(errors.group(1))) != bool(found):
        trouble = "pan: " + next((line for line in text.splitlines() if line.startswith("pan:1")), "unnamed error")
    elif not trouble and not found and re.search(r"not completed|too small|out of memory|reached -DMEMLIM", text):
        trouble = "pan: the search is not exhaustive"
    states, depth = int(number(r"(\d+) states, stored")), int(number(r"depth reached (\d+)"))
    memory = number(r"([\d.]+)\s+total actual memory usage")
    return Outcome(case.name, case.defines, case.expect, found, states, depth, seconds, memory, trouble)


def check(case: Case, time_limit_s: float) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="slot-model-") as folder:
        outcome = search(case, folder, time_limit_s)
    row = f"{case.name:<36}{outcome.states:>10}{outcome.depth:>8}{outcome.seconds:>8.1f} "
    print("ok  " if outcome.good else "FAIL", row, outcome.trouble or outcome.found or "holds", flush=True)
    return outcome


def trace(case: Case) -> str:
    """The shortest run into the fault, one line per operation."""
    with tempfile.TemporaryDirectory(prefix="slot-model-") as folder:
        search(case, folder, TIME_LIMIT_S)
        command = ["spin", "-k", f"{case.path.name}.trail", "-T", *defines_of(case), str(case.path)]
        told = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return told.stdout.split("spin: trail ends")[0].rstrip()


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the models of the protocol with Spin.")
    parser.add_argument("--deep", action="store_true", help="add the configurations that take minutes")
    parser.add_argument("--quick", action="store_true", help="leave out the large configurations")
    parser.add_argument("--model", choices=MODELS, help="only this one")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--time-limit", type=float, help="of each search, in seconds")
    parser.add_argument("--trace", metavar="FAULT", help="print the shortest run into one planted fault")
    options = parser.parse_args()
    for tool in ("spin", "gcc"):
        if shutil.which(tool) is None:
            print(f"{tool} is missing: apt-get install {tool}", file=sys.stderr)
            return 3
    if options.trace:
        print(*(trace(case) for case in FAULTS if case.name == options.trace and options.model in (None, case.model)))
        return 0
    size = 0 if options.quick else 2 if options.deep else 1
    time_limit_s = options.time_limit or (TIME_LIMIT_DEEP_S if options.deep else TIME_LIMIT_S)
    cases = [c for c in CONFIGURATIONS + FAULTS if options.only in c.name and c.size <= size]
    cases = [case for case in cases if options.model in (None, case.model)]
    print(f"{len(cases)} searches, a line for each; about {'an hour' if options.deep else '3 minutes'} on 2 cores")
    print(f"     {'configuration or planted fault':<36}{'states':>10}{'depth':>8}{'seconds':>8}  result")
    begun = time.monotonic()
    with ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        outcomes = list(pool.map(lambda case: check(case, time_limit_s), cases))
    bad = [o.name for o in outcomes if not o.good]
    verdict = f"FAILED: {bad}" if bad else "all as expected"
    print(f"{len(outcomes)} searches in {time.monotonic() - begun:.0f} s; {verdict}")
    if options.json:
        options.json.write_text(json.dumps([asdict(o) | {"good": o.good} for o in outcomes], indent=1) + "\n")
    return 1 if bad or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
