"""A ring's absence from the directory counts from its beginning, not from an earlier one that ended."""

from __future__ import annotations

import pytest

from transport.errors import PayloadLostError
from transport.store.directory import Whereabouts
from transport.testing import a_ticket


def test_absences_that_were_seen_far_apart_are_not_one() -> None:
    ticket, places = a_ticket(), Whereabouts(grace_s=20.0, lease_s=30.0)
    assert places.found(ticket, None, 100.0) is None
    # Others read the ring meanwhile. This reader cannot know: it asks again when the ring is away a second time.
    assert places.found(ticket, None, 1000.0) is None
    with pytest.raises(PayloadLostError):
        places.found(ticket, None, 1020.0)


def test_a_read_that_takes_longer_than_a_lease_does_not_begin_the_absence_anew() -> None:
    ticket, places = a_ticket(), Whereabouts(grace_s=20.0, lease_s=30.0)
    assert places.found(ticket, None, 100.0) is None
    with pytest.raises(PayloadLostError):
        places.found(ticket, None, 160.0, begun=104.0)  # no port of the ring answered all the time


def test_a_read_that_succeeds_ends_an_absence() -> None:
    ticket, places = a_ticket(), Whereabouts(grace_s=20.0, lease_s=30.0)
    assert places.found(ticket, None, 100.0) is None
    places.reached(ticket.ring)  # the server lives: it was away for a moment, and its ports answer again
    assert places.found(ticket, None, 1000.0) is None
    with pytest.raises(PayloadLostError):
        places.found(ticket, None, 1020.0)
