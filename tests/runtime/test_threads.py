"""Starting a thread: an interrupt of it is raised as it is."""

from __future__ import annotations

import sys
import threading

import pytest

from transport.runtime import threads


class Interrupt(BaseException):
    """What a signal's handler raises."""


def test_an_interrupt_of_the_wait_inside_is_raised_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        monkeypatch.undo()
        raise Interrupt

    ran = threading.Event()
    thread = threading.Thread(target=ran.set)
    monkeypatch.setattr(threading.Condition, "_acquire_restore", interrupted)
    monkeypatch.setattr(thread._started, "is_set", lambda: False)  # type: ignore[attr-defined]  # the wait is entered
    switching = sys.getswitchinterval()
    sys.setswitchinterval(10.0)  # the thread begins when this one waits
    try:
        with pytest.raises(Interrupt):
            threads.start(thread)
    finally:
        sys.setswitchinterval(switching)
    assert ran.wait(15.0)
    thread.join()


def test_a_thread_that_cannot_be_started_is_that_error_also_where_another_one_is_handled() -> None:
    thread = threading.Thread(target=int)
    threads.start(thread)
    thread.join()
    with pytest.raises(RuntimeError, match="once"):
        threads.start(thread)
    try:
        raise KeyError
    except KeyError:
        with pytest.raises(RuntimeError, match="once"):
            threads.start(thread)
