"""AReaL's tensors through rings in every process of a job. In the file sitecustomize.py of a folder on PYTHONPATH:

from transport.adapters.areal_plugin import install

install()

AReaL gives its workers the controller's path, and Python imports that file when it starts. Nothing else happens in a
process that does not import AReaL.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

from transport.runtime.imports import after_import


def install(**options: Any) -> None:
    """Call `transport.adapters.areal.use` with these options as soon as this process imports AReaL's tensors."""
    after_import("areal.infra.rpc.rtensor", partial(_use, options))


def _use(options: dict[str, Any]) -> None:
    importlib.import_module("transport.adapters.areal").use(**options)
