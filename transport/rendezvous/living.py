"""The life of a member in a thread of its own: a step, a wait until the round changes, and so on until it leaves."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable

from transport.errors import ClosedError, RunLostError, StoreError
from transport.rendezvous.member_states import State
from transport.rendezvous.session import Session, View
from transport.store.base import Store

log = logging.getLogger(__name__)


def own_name() -> str:
    """A name that no other member has: host, process, and a random part."""
    return f"{socket.gethostname()[:64]}:{os.getpid()}:{secrets.token_hex(4)}"


class Life:
    """A member's session in a thread of its own, which renews leases, reads the store and acts as host.

    Args:
        publish: called in that thread after every step, and when it has ended.
    """

    def __init__(self, session: Session, store: Store, publish: Callable[[], object]) -> None:
        self.session = session
        self.stopping = threading.Event()  # the member leaves
        self.thread = threading.Thread(target=self._live, name="transport rendezvous", daemon=True)
        self._store = store
        self._publish = publish
        self._failure: Exception | None = None

    @property
    def failed(self) -> bool:
        """Whether an error has ended the thread; `view` raises it."""
        return self._failure is not None

    def view(self) -> View:
        """The member's state. Raises ClosedError after it has left, RunLostError and others as `Rendezvous` says."""
        if self.stopping.is_set():
            raise ClosedError("this member has left its run")
        if self._failure is not None:
            raise self._failure
        view = self.session.view
        if view.state is State.ENDED and view.closing is None:
            raise view.error or RunLostError("the run's end is unknown: neither store nor archive has it")
        return view

    def _live(self) -> None:
        session = self.session
        try:
            while not self.stopping.is_set():
                session.step()
                self._publish()
                if session.ended:
                    self.stopping.wait()
                    break
                try:
                    self._store.watch(session.keys.round, session.version, session.wait_s())
                except StoreError:
                    self.stopping.wait(session.rules.poll_s)  # the next step handles the error
            try:
                session.leave()
            except StoreError as error:
                log.debug("%r left without giving up its leases, which will end: %s", session, error)
        except Exception as error:
            log.debug("%r failed", session, exc_info=True)
            self._failure = error
        finally:
            self._publish()
