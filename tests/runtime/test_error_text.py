import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.errors import StoreError
from transport.runtime.error_text import MOST_TEXT, error_text, reportable


@given(st.text(st.characters(exclude_categories=()), max_size=40), st.integers(1, 30))
def test_reportable_text_is_encodable_and_bounded(text: str, most: int) -> None:
    found = reportable(text, most)
    found.encode()
    assert len(found) <= most
    assert reportable(found, most) == found
    if len(text) <= most and not any("\ud800" <= each <= "\udfff" for each in text):
        assert found == text


def test_an_error_has_its_type_and_message() -> None:
    assert error_text(StoreError("no space")) == "StoreError: no space"
    assert error_text(AssertionError()) == "AssertionError"


def test_half_of_a_surrogate_pair_is_a_question_mark() -> None:
    assert error_text(OSError("/data/\udcff")) == "OSError: /data/?"


def test_a_long_message_is_cut() -> None:
    found = error_text(MemoryError("x" * (40 << 20)))
    assert len(found) == MOST_TEXT and found.startswith("MemoryError: xxx")


def test_a_message_that_raises_is_replaced() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise self

    assert error_text(Broken()).startswith("Broken: ")


def test_an_interrupt_is_no_defect_of_the_message() -> None:
    class Interrupted(Exception):
        def __str__(self) -> str:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        error_text(Interrupted())
