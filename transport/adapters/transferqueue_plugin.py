"""The plugin that verl loads in every process (entry-point group ``verl.plugins``): inert without TransferQueue.

Then, and at once where it has been imported, transport.adapters.transferqueue registers the backend. A process that
does not use TransferQueue imports neither torch nor Ray for it. An error does not stop the import of TransferQueue: it
is logged, and TransferQueue says that it knows no such backend.
"""

from __future__ import annotations

import importlib
import logging

from transport.runtime.imports import after_import

FRAMEWORK = "transfer_queue"

log = logging.getLogger(__name__)


def _register() -> None:
    try:
        importlib.import_module("transport.adapters.transferqueue")
    except Exception as error:  # of any package it imports: TransferQueue's own import must succeed
        log.warning("TransferQueue's backend PayloadTransport is not available: %s", error)


def install() -> None:
    """Register the backend as soon as TransferQueue is imported in this process."""
    after_import(FRAMEWORK, _register)


install()
