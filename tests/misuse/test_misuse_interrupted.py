"""Every public call without a loop, interrupted in the place of its lines one after the other, as Ctrl-C does it.

What it was made on works afterwards, the payload that was written before is there once, and `leak_check` finds nothing.
The suite interrupts each call at some of its lines; `make misuse` at all of them.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from interrupted_lines import interrupted, lines_of
from misuse import call, give_back, quiet, verdict
from misuse_records import ENDS, LOOPS, SCENES
from misuse_scenes import Arguments, Scene

from transport import BlockingClient
from transport.errors import TransportError
from transport.queue import Claim

MOST = int(os.environ.get("MISUSE_LINES", "6"))  # of each call; make misuse: all
pytestmark = [
    pytest.mark.ucx,
    *(
        pytest.mark.filterwarnings(f"ignore::{warning}")  # of coroutines that had not begun, and of dropped leases
        for warning in ("RuntimeWarning", "ResourceWarning", "pytest.PytestUnraisableExceptionWarning")
    ),
]


def interrupted_calls(scene: Scene, name: str) -> tuple[int, list[str]]:
    given: list[Arguments] = []
    kept: list[Any] = []  # what was returned; its end is not interrupted
    count, faults = 0, list[str]()

    def action() -> None:
        call(scene, name, given[-1], kept)

    scene.room()
    given.append(scene.calls[name]())
    lines = lines_of(action)
    give_back(kept)
    for at in range(1, lines + 1, max(1, -(-lines // MOST))):
        scene.room()
        given.append(scene.calls[name]())
        try:
            count += interrupted(at, action)
        except Exception as error:
            if fault := verdict(error):
                faults.append(f"{name} at line {at}: {fault}")
        arguments = given.pop().values()
        for claim in (each for value in arguments for each in (value if isinstance(value, list) else [value])):
            retry = getattr(scene.thing, "retry", None)
            if retry is not None and isinstance(claim, Claim):  # which the call was to end
                with contextlib.suppress(TransportError):
                    retry(claim, 0.0, "interrupted")
        give_back([*kept, *(each for each in arguments if not isinstance(each, BlockingClient))])
        kept.clear()
    try:
        call(scene, name, scene.calls[name]())
    except TransportError as error:
        faults.append(f"{name} after its interrupts: {error!r}")
    return count, faults


@pytest.mark.parametrize("title", [title for title in SCENES if title not in LOOPS])  # which are cancelled
def test_calls_that_are_interrupted(
    title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.CRITICAL)
    with quiet(), SCENES[title]() as scene:
        names = [name for name in scene.calls if name not in ENDS and name not in ("start", "restore")]
        results = [interrupted_calls(scene, name) for name in names]
        assert [fault for _, faults in results for fault in faults] == []
        scene.intact()
    print(f"{title}: {sum(count for count, _ in results)} interrupts")
