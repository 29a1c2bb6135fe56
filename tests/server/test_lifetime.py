"""How long a ring without its writer is served, as a table."""

from __future__ import annotations

import pytest

from transport.server.lifetime import Lifetime, ServingPhase, Watchdog

SERVING, LINGERING, STOP = ServingPhase.SERVING, ServingPhase.LINGERING, ServingPhase.STOP
HERE, GONE = True, False

# linger_s is 10; each step is (now, writer alive, unread payloads, phase that follows)
STORIES: dict[str, list[tuple[float, bool, int, ServingPhase]]] = {
    "a living writer is served, with and without payloads": [
        (0, HERE, 0, SERVING),
        (100, HERE, 5, SERVING),
        (10_000, HERE, 0, SERVING),
    ],
    "a writer that goes and leaves nothing ends it at once": [(0, HERE, 3, SERVING), (1, GONE, 0, STOP)],
    "nothing was ever there": [(0, GONE, 0, STOP)],
    "what it left is served until everything is consumed": [
        (0, HERE, 3, SERVING),
        (1, GONE, 3, LINGERING),
        (5, GONE, 1, LINGERING),
        (6, GONE, 0, STOP),
    ],
    "what it left is served until linger_s is over": [
        (0, HERE, 1, SERVING),
        (1, GONE, 1, LINGERING),
        (10.99, GONE, 1, LINGERING),
        (11, GONE, 1, STOP),
    ],
    "linger_s counts from the first look without the writer": [
        (0, HERE, 1, SERVING),
        (100, GONE, 1, LINGERING),
        (109, GONE, 1, LINGERING),
        (110, GONE, 1, STOP),
    ],
    "an orphan that starts without a writer lingers too": [(50, GONE, 1, LINGERING), (60, GONE, 1, STOP)],
    "a writer that is back ends the lingering": [
        (0, GONE, 1, LINGERING),
        (5, HERE, 1, SERVING),
        (50, HERE, 1, SERVING),
    ],
    "a second going has linger_s of its own": [
        (0, GONE, 1, LINGERING),
        (9, HERE, 1, SERVING),
        (9.5, GONE, 1, LINGERING),
        (19, GONE, 1, LINGERING),
        (19.5, GONE, 1, STOP),
    ],
    "STOP is final, whoever comes back": [
        (0, GONE, 0, STOP),
        (1, HERE, 5, STOP),
        (2, GONE, 5, STOP),
        (3, HERE, 0, STOP),
    ],
    "a look after a long pause ends it": [(0, GONE, 1, LINGERING), (1e9, GONE, 1, STOP)],
}


@pytest.mark.parametrize("story", STORIES)
def test_lifetime(story: str) -> None:
    lifetime = Lifetime(linger_s=10)
    assert lifetime.phase is SERVING
    for now, alive, unread, expected in STORIES[story]:
        assert lifetime.tick(now, writer_alive=alive, pending=unread, sequence=3) is expected, f"at {now}"
        assert lifetime.phase is expected


def test_without_lingering_unread_payloads_hold_nothing_up() -> None:
    assert Lifetime(linger_s=0).tick(5, writer_alive=False, pending=9, sequence=9) is STOP


def test_a_writer_that_came_and_went_between_two_looks_has_linger_s_of_its_own() -> None:
    lifetime = Lifetime(linger_s=10)
    assert lifetime.tick(0, writer_alive=GONE, pending=3, sequence=3) is LINGERING
    assert lifetime.tick(15, writer_alive=GONE, pending=4, sequence=5) is LINGERING  # it took the ring over, and wrote
    assert lifetime.gives_up_to == 0
    assert lifetime.tick(25, writer_alive=GONE, pending=4, sequence=5) is STOP
    assert lifetime.gives_up_to == 5


# --- watchdog ------------------------------------------------------------------------------------
def test_silence_beyond_the_limit_is_a_stop() -> None:
    dog = Watchdog(limit_s=3.0, look_s=1.0)
    dog.look(100.0)
    assert not dog.stopped(3.0)
    assert dog.stopped(3.1)


def test_a_watcher_that_slept_itself_counts_silence_from_its_waking() -> None:
    dog = Watchdog(limit_s=3.0, look_s=1.0)
    dog.look(100.0)
    dog.look(160.0)  # it was stopped for a minute, and so, perhaps, was everybody
    assert not dog.stopped(60.0)
    for now in (161.0, 162.0, 163.0):
        dog.look(now)
        assert not dog.stopped(60.0 + now - 160.0)
    dog.look(163.5)
    assert dog.stopped(63.5)
    assert not dog.stopped(0.2)
