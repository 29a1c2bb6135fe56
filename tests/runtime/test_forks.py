"""A fork in another thread waits until what must not be forked in the middle is over."""

from __future__ import annotations

import os
import threading

import pytest

from transport.runtime.forks import unforked


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_fork_in_another_thread_waits_and_the_child_may_hold_the_lock_itself() -> None:
    over, begins = threading.Event(), threading.Event()
    status: list[int] = []

    def fork() -> None:
        begins.set()
        child = os.fork()
        if child == 0:
            with unforked:
                os._exit(0 if over.is_set() else 1)
        status.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    thread = threading.Thread(target=fork)
    with unforked:
        thread.start()
        begins.wait()
        over.set()
    thread.join()
    assert status == [0]
