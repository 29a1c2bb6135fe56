"""What verl loads in every process, by the entry-point group ``verl.plugins``: nothing until TransferQueue is imported.

Then, and at once where it has been imported, transport.adapters.transferqueue registers the backend. A process that
does not use TransferQueue imports neither torch nor Ray for it. An error does not stop the import of TransferQueue: it
is logged, and TransferQueue says that it knows no such backend.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import logging
import sys
import threading
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

FRAMEWORK = "transfer_queue"

log = logging.getLogger(__name__)


def _register() -> None:
    try:
        importlib.import_module("transport.adapters.transferqueue")
    except Exception as error:  # of any package it imports: TransferQueue's own import must succeed
        log.warning("TransferQueue's backend PayloadTransport is not available: %s", error)


class _Then(importlib.abc.Loader):
    """The loader of TransferQueue's package, which registers the backend when the package is there."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Watch)]
        _register()


class _Watch(importlib.abc.MetaPathFinder):
    """Finds nothing itself: it asks the others for TransferQueue's package, until that has been imported."""

    def __init__(self) -> None:
        self._asking = threading.local()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != FRAMEWORK or getattr(self._asking, "now", False):
            return None
        self._asking.now = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking.now = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader)
        return spec


def install() -> None:
    """Register the backend as soon as TransferQueue is imported in this process."""
    if FRAMEWORK in sys.modules:
        _register()
    elif not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


install()
