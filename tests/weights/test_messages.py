"""Frames of the feed as bytes, and a link's pace."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.errors import ProtocolError, UsageError
from transport.weights.transfer import messages
from transport.weights.transfer.bucket_sender import Pace
from transport.weights.transfer.messages import Alive, FeedFailed, FeedHello, FeedWelcome, Frame, Placed, Slices, Start
from transport.weights.versions.delta import RAW, DeltaRecord

FRAMES: list[Frame] = [
    FeedHello("token", "replica 0"),
    FeedWelcome(),
    Alive(),
    Start(7),
    Start(7, (("a.weight", "bfloat16", (3, 4)), ("b", "float32", ()))),
    Slices(3, 1, 4, b"TK", (DeltaRecord(0, 64, 2, RAW), DeltaRecord(64, 64, 4, 1)), 2**64 - 1),
    Placed(0, b"TK", 1),
    FeedFailed("LinkError: why"),
]


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: type(frame).__name__)
def test_a_frame_comes_back_from_its_bytes(frame: Frame) -> None:
    data = messages.encode(frame)
    assert messages.length_of(data[:4]) == len(data) - 4
    assert messages.decode(data[4:]) == frame


@given(body=st.binary(max_size=64))
def test_bytes_that_are_no_frame_are_refused_by_name(body: bytes) -> None:
    try:
        frame = messages.decode(body)
    except ProtocolError:
        return
    assert messages.decode(messages.encode(frame)[4:]) == frame


@pytest.mark.parametrize("numbers", [(-8, 128, 4, 1), (0, -8, 4, 1), (0, 128, 0, 1), (0, 128, 4, -2)], ids=str)
def test_numbers_that_no_record_of_changes_has_are_refused(numbers: tuple[int, int, int, int]) -> None:
    with pytest.raises(ProtocolError, match="not a frame"):
        messages.decode(messages.encode(Slices(0, 0, 0, b"TK", (DeltaRecord(*numbers),)))[4:])


def test_a_length_that_no_frame_has_is_refused_before_anything_is_read() -> None:
    with pytest.raises(ProtocolError, match="4294967295 bytes"):
        messages.length_of(b"\xff\xff\xff\xff")
    with pytest.raises(ProtocolError, match="at most"):
        messages.encode(FeedFailed("y" * messages.MAX_FRAME_BYTES))


def test_a_pace_keeps_the_rate_and_saves_nothing_up() -> None:
    pace = Pace(100.0)
    assert pace.take(50, now=10.0) == pytest.approx(0.5)
    assert pace.take(50, now=10.0) == pytest.approx(1.0)
    assert pace.take(50, now=10.75) == pytest.approx(0.75)
    assert pace.take(50, now=1000.0) == pytest.approx(0.5)
    with pytest.raises(UsageError):
        Pace(0)
