"""Where rings are looked for: what that costs the store that all trainers of a run share."""

from __future__ import annotations

import threading
import time

import pytest
from packers import Worker

from transport import FoundRings, Schema
from transport.claims.places import InDirectory
from transport.errors import RingFullError, StoreUnavailableError
from transport.packer.options import ServerOptions
from transport.store.directory import Directory, Serving
from transport.store.memory import MemoryStore


@pytest.mark.parametrize(("rings", "looks", "a_second"), [(10, 40, 10), (2000, 3, 10), (20_000, 1, 1)])
def test_the_more_rings_there_are_the_more_seldom_all_of_them_are_read(
    rings: int, looks: int, a_second: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 20 s, looked at so many times a second."""
    now, read, reading = 0.0, 0, set[threading.Thread]()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    serving = [
        Serving(ring=f"{at:032x}", host="elsewhere", addresses=("10.0.0.1",), ports=(7001,)) for at in range(rings)
    ]

    def every(_: Directory) -> list[Serving]:
        nonlocal read
        read += 1
        reading.add(threading.current_thread())
        return serving

    monkeypatch.setattr(Directory, "all", every)
    places = InDirectory(Directory(MemoryStore()))
    for step in range(20 * a_second):
        now = step / a_second
        assert len(places.served(())) == rings
        while reading:
            reading.pop().join()  # a read is as short as this clock says
    assert read == looks


def test_while_nothing_has_changed_the_places_are_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer asks four times a second, and the directory of many rings is read every few seconds."""
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    directory = Directory(MemoryStore())
    first = Serving(ring="1" * 32, host="elsewhere", addresses=("10.0.0.1",), ports=(7001,))
    directory.publish(first)
    places = InDirectory(directory)
    found = places.served(())
    assert places.served(()) is found
    assert set(places.served({first.ring})) == set()
    assert set(places.served(())) == {first.ring}
    now = 60.0
    directory.publish(Serving(ring="2" * 32, host="elsewhere", addresses=("10.0.0.2",), ports=(7001,)))
    places.served(())  # as before, while the directory is read
    assert places._reading is not None
    places._reading.join()
    assert set(places.served(())) == {"1" * 32, "2" * 32}


def test_rings_that_were_found_are_used_while_the_store_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    now, away, asked = 0.0, False, 0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    serving = [Serving(ring="a" * 32, host="elsewhere", addresses=("10.0.0.1",), ports=(7001,))]

    def every(_: Directory) -> list[Serving]:
        nonlocal asked
        asked += 1
        if away:
            raise StoreUnavailableError("the store is away")
        return serving

    monkeypatch.setattr(Directory, "all", every)
    places = InDirectory(Directory(MemoryStore()))
    found = places.served(())
    assert list(found) == ["a" * 32]
    away = True
    for _ in range(20):
        now += 1.0
        assert places.served(()) == found
        assert places.segments() == []
    assert asked <= 4  # each may wait for as long as the store is given
    away = False
    serving.clear()
    now += 60.0
    places.served(())  # what was found before, while the store is read
    assert places._reading is not None
    places._reading.join()
    assert places.served(()) == {}


def test_an_end_that_was_read_stays_until_its_ring_is_published_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    store = MemoryStore()
    directory, ring = Directory(store), "1" * 32
    places = InDirectory(directory)

    def ended() -> set[str]:
        nonlocal now
        now += 60.0
        places.served(())
        assert places._reading is not None
        places._reading.join()
        return set(places.ended())

    directory.end(ring, bytes(16))
    assert ended() == {ring}
    store.delete(f"ended/{ring}")  # as its lease ends
    assert ended() == {ring}
    directory.publish(Serving(ring=ring, host="elsewhere", addresses=("10.0.0.1",), ports=(7001,)))
    assert ended() == set()


def test_a_store_that_is_away_when_rings_are_first_looked_for_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def every(_: Directory) -> list[Serving]:
        raise StoreUnavailableError("the store is away")

    monkeypatch.setattr(Directory, "all", every)
    places = InDirectory(Directory(MemoryStore()))
    for _ in range(2):
        with pytest.raises(StoreUnavailableError):
            places.segments()


@pytest.mark.nightly
@pytest.mark.ucx
def test_a_writer_whose_ring_is_full_does_not_need_the_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker()
    with FoundRings(InDirectory(Directory(MemoryStore()))) as queue:
        worker.setup_ucxx(
            Schema.of(number=("int64",)), slots=2, rings=queue, server=ServerOptions(addresses=("127.0.0.1",))
        )
        try:

            def away(*_: object) -> list[Serving]:
                raise StoreUnavailableError("the store is away")

            monkeypatch.setattr(Directory, "all", away)
            for number in range(2):
                worker.write_to_buffer({"number": number})
            with pytest.raises(RingFullError):
                worker.write_to_buffer({"number": 2}, timeout_s=0.1)
        finally:
            worker.cleanup_ucxx()
