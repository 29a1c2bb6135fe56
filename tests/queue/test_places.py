"""Where rings are looked for: what that costs the store that all trainers of a run share."""

from __future__ import annotations

import time

import pytest

from transport.queue.places import InDirectory
from transport.store.directory import Directory, Serving
from transport.store.memory import MemoryStore


@pytest.mark.parametrize(("rings", "looks", "a_second"), [(10, 40, 10), (2000, 3, 10), (20_000, 1, 1)])
def test_the_more_rings_there_are_the_more_seldom_all_of_them_are_read(
    rings: int, looks: int, a_second: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 20 s, looked at so many times a second."""
    now, read = 0.0, 0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    serving = [
        Serving(ring=f"{at:032x}", host="elsewhere", addresses=("10.0.0.1",), ports=(7001,), epoch=1)
        for at in range(rings)
    ]

    def every(_: Directory) -> list[Serving]:
        nonlocal read
        read += 1
        return serving

    monkeypatch.setattr(Directory, "all", every)
    places = InDirectory(Directory(MemoryStore()))
    for step in range(20 * a_second):
        now = step / a_second
        assert len(places.served(())) == rings
    assert read == looks


def test_while_nothing_has_changed_the_places_are_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer asks four times a second, and the directory of many rings is read every few seconds."""
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    directory = Directory(MemoryStore())
    first = Serving(ring="1" * 32, host="elsewhere", addresses=("10.0.0.1",), ports=(7001,), epoch=1)
    directory.publish(first)
    places = InDirectory(directory)
    found = places.served(())
    assert places.served(()) is found
    assert set(places.served({first.ring})) == set()
    assert set(places.served(())) == {first.ring}
    now = 60.0
    directory.publish(Serving(ring="2" * 32, host="elsewhere", addresses=("10.0.0.2",), ports=(7001,), epoch=2))
    assert set(places.served(())) == {"1" * 32, "2" * 32}
