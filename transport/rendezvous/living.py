"""The life of a member in a thread of its own: a step, a wait until the round changes, and so on until it leaves."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable

from transport.errors import StoreError
from transport.rendezvous.session import Session
from transport.store.base import Store

log = logging.getLogger(__name__)


def own_name() -> str:
    """A name that no other member has: host, process, and a random part."""
    return f"{socket.gethostname()[:64]}:{os.getpid()}:{secrets.token_hex(4)}"


def live(session: Session, store: Store, stopping: threading.Event, publish: Callable[[], object]) -> None:
    """Step until ``stopping``, then leave; ``publish`` is called after every step. Raises what a step cannot handle."""
    try:
        while not stopping.is_set():
            session.step()
            publish()
            if session.ended:
                stopping.wait()
                break
            try:
                store.watch(session.keys.round, session.version, session.wait_s())
            except StoreError:
                stopping.wait(session.rules.poll_s)  # the next step handles the error
        try:
            session.leave()
        except StoreError as error:
            log.debug("%r left without giving up its leases, which will end: %s", session, error)
    except Exception:
        log.debug("%r failed", session, exc_info=True)
        raise
