"""Every public call after the end, ended twice and twice at once, from another thread, another loop and a forked child.

It answers, or an error of this package says why not; and the payload that was written before is there once.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import logging
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from misuse import call, give_back, quiet, verdict
from misuse_records import ENDS, LOOPS, SCENES
from misuse_scenes import Scene
from redis_server import needs_redis

from transport.errors import TransportError

pytestmark = pytest.mark.ucx
PATIENCE_S = 20.0  # a watchdog


def cases(titles: Iterable[str]) -> list[Any]:
    """Those of Redis only where there is a server."""
    return [pytest.param(title, marks=needs_redis if "Redis" in title else ()) for title in titles]


WITH_END = cases(SCENES)
GIVES_UP = {"SharedRingBuffer"}  # closing it discards what was not read: its documentation says so


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Files that are made by name are this test's."""
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.CRITICAL)
    yield


def prepared(scene: Scene) -> dict[str, dict[str, Any]]:
    """Valid arguments of every call, made now."""
    made = {}
    for name in scene.calls:
        with contextlib.suppress(TransportError):
            made[name] = scene.calls[name]()
    return made


def faults_of(scene: Scene, made: dict[str, dict[str, Any]]) -> list[str]:
    found = []
    for name, arguments in made.items():
        try:
            call(scene, name, arguments)
        except Exception as error:
            if fault := verdict(error):
                found.append(f"{name}: {fault} at {traceback.extract_tb(error.__traceback__)[-1]}")
    return found


def end(scene: Scene) -> Any:
    return call(scene, scene.close, scene.calls[scene.close]())


@pytest.mark.parametrize("title", WITH_END)
def test_calls_after_the_end(title: str) -> None:
    with quiet(), SCENES[title]() as scene:
        made = prepared(scene)
        end(scene)
        assert faults_of(scene, made) == []
        if title not in GIVES_UP:
            scene.intact()
        for arguments in made.values():
            give_back(list(arguments.values()))


@pytest.mark.parametrize("title", WITH_END)
def test_two_ends_at_once(title: str) -> None:
    with quiet(), SCENES[title]() as scene:
        if scene.wait is None:
            together = threading.Barrier(2)

            def ended() -> None:
                together.wait(PATIENCE_S)
                end(scene)

            with ThreadPoolExecutor(2) as threads:
                for each in [threads.submit(ended) for _ in range(2)]:
                    each.result(PATIENCE_S)
        else:

            async def both() -> None:
                await asyncio.gather(*(getattr(scene.thing, scene.close)() for _ in range(2)))

            scene.wait(both())
        end(scene)
        if title not in GIVES_UP:
            scene.intact()


@pytest.mark.parametrize("title", cases(title for title in SCENES if title not in LOOPS))
def test_calls_from_another_thread(title: str) -> None:
    with quiet(), SCENES[title]() as scene:
        made = {name: arguments for name, arguments in prepared(scene).items() if name not in ENDS}
        made.pop("run", None)  # its coroutine is of this thread's making
        with ThreadPoolExecutor(1) as thread:
            assert thread.submit(faults_of, scene, made).result(PATIENCE_S) == []
        scene.intact()


@pytest.mark.parametrize("title", ["UCXXClient", "transport.rendezvous.Rendezvous"])
def test_calls_from_another_loop(title: str) -> None:
    """What belongs to a loop refuses another one, and works on in its own."""
    with quiet(), SCENES[title]() as scene:
        made = {name: arguments for name, arguments in prepared(scene).items() if name not in ENDS}

        def there() -> list[str]:
            with asyncio.Runner() as runner:

                async def waiting(awaitable: Any) -> Any:
                    async with asyncio.timeout(PATIENCE_S):
                        return await awaitable

                return faults_of(scene._replace(wait=lambda awaitable: runner.run(waiting(awaitable))), made)

        with ThreadPoolExecutor(1) as thread:
            assert thread.submit(there).result() == []
        assert (
            faults_of(scene, {name: arguments for name, arguments in prepared(scene).items() if name not in ENDS}) == []
        )
        scene.intact()


def in_a_child(action: Callable[[], list[str]]) -> list[str]:
    """What ``action`` returns in a forked child, which ends without a word to anybody."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(PATIENCE_S))
        try:
            text = json.dumps(action())
        except BaseException as error:
            text = json.dumps([f"the child: {error!r} {traceback.format_exc()[-800:]}"])
        os.write(writing, text.encode()[:60_000])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    status = os.waitpid(pid, 0)[1]
    return [] if status == 0 and said == b"[]" else [f"status {status}", *json.loads(said or b"[]")]


@pytest.mark.parametrize("title", WITH_END)
def test_calls_in_a_forked_child(title: str) -> None:
    with quiet(), SCENES[title]() as scene:
        made = prepared(scene)
        assert in_a_child(lambda: faults_of(scene, made)) == []
        scene.intact()
        for arguments in made.values():
            give_back(list(arguments.values()))
        if not inspect.isclass(scene.thing):
            again = {name: arguments for name, arguments in prepared(scene).items() if name not in ENDS}
            assert faults_of(scene, again) == []
