"""Views of a slot: they pin it until the last one is gone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from native_rings import ZEROS, write

from transport import _ring
from transport._ring import Ring


@pytest.fixture
def ring(name: str) -> Iterator[Ring]:
    made = Ring.create(name, 4, 1000, ZEROS)
    yield made
    made.close()


class Owner:
    """What keeps an attachment; the last view closes it."""

    closed = 0

    def close(self) -> None:
        self.closed += 1


def wanted(ring: Ring, slot: int, generation: int, length: int) -> tuple[int, int, int, int, int]:
    return slot, generation, _ring.slot_key(ring.secret, slot, generation), length, 0


def test_views_are_counted_and_pin_until_they_go(ring: Ring) -> None:
    views, owner = _ring.Views(ring, 2), Owner()
    held = [views.read(owner, *wanted(ring, *write(ring, b"12345"), 5), True) for _ in range(2)]
    assert len(views) == 2
    third = write(ring, b"123")
    assert views.read(owner, *wanted(ring, *third, 3), True) is None
    assert ring.state_counts() == (1, 0, 1, 2)
    assert [bytes(view) for view in held] == [b"12345"] * 2
    assert ring.counters()["bytes_mapped"] == 10
    held[0].hold.abandon()
    del held[0]
    assert len(views) == 1
    assert ring.state_counts() == (1, 0, 2, 1)
    held.clear()
    assert ring.state_counts() == (2, 0, 2, 0)
    assert views.read(owner, *wanted(ring, *third, 4), True) == _ring.READ_OTHER_LENGTH
    assert owner.closed == 0


def test_one_view_may_be_out_where_none_were_allowed(ring: Ring) -> None:
    views, owner = _ring.Views(ring, 0), Owner()
    view = views.read(owner, *wanted(ring, *write(ring), 7), False)
    assert views.read(owner, *wanted(ring, *write(ring), 7), False) is None
    assert len(view) == 7


def test_the_last_view_after_close_closes_the_owner_once(ring: Ring) -> None:
    views, owner = _ring.Views(ring, 2), Owner()
    assert views.close()
    held = [views.read(owner, *wanted(ring, *write(ring), 7), consume) for consume in (True, False)]
    assert not views.close()
    assert ring.counters()["consumes"] == 1  # what was delivered
    held.pop()
    assert owner.closed == 0
    held.pop()
    assert owner.closed == 1
    assert ring.state_counts() == (3, 0, 1, 0)


def test_views_that_are_let_go_hold_nothing_and_keep_their_memory(ring: Ring) -> None:
    views, owner = _ring.Views(ring, 2), Owner()
    held = [views.read(owner, *wanted(ring, *write(ring), 7), consume) for consume in (True, False)]
    views.unpin_all()
    assert len(views) == 0
    assert ring.state_counts() == (3, 0, 1, 0)
    assert bytes(held[0]) == b"payload"
    views.close()
    held.clear()
    assert owner.closed == 0


def test_an_owner_that_cannot_be_closed_disturbs_nobody(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: told.append(unraisable.exc_type))
    views = _ring.Views(ring, 2)
    view = views.read(object(), *wanted(ring, *write(ring), 7), True)
    views.close()
    del view
    assert told == [AttributeError]
    assert ring.state_counts() == (4, 0, 0, 0)


def test_views_are_of_rings_only(ring: Ring) -> None:
    for wrong in (None, 1, object()):
        with pytest.raises(TypeError):
            _ring.Views(wrong, 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        _ring.Views.read(ring, None, 0, 0, 0, 0, 0, True)  # type: ignore[arg-type]
