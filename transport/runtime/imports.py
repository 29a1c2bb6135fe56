"""Calls for the import of a package that this process may never import: nothing of it is imported here."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


def after_import(name: str, act: Callable[[], object]) -> None:
    """Call ``act`` once, when this module has been imported: at once where it has been. The import raises its errors.

    A second call for the same module changes nothing, until it has been imported.
    """
    if name in sys.modules:
        act()
    elif not any(isinstance(finder, _Watch) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch(name, act))


class _Watch(importlib.abc.MetaPathFinder):
    """Finder that asks the others for the module, until that has been imported."""

    def __init__(self, name: str, act: Callable[[], object]) -> None:
        self.name = name
        self.act = act
        self._asking = threading.local()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.name or getattr(self._asking, "now", False):
            return None
        self._asking.now = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking.now = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader, self)
        return spec


class _Then(importlib.abc.Loader):
    """The module's loader, and what comes after it."""

    def __init__(self, loader: importlib.abc.Loader, watch: _Watch) -> None:
        self._loader = loader
        self._watch = watch

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._watch.act()  # first: where it fails, so does the import, and the next one tries again
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self._watch]
