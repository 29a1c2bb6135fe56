"""The plugin that vLLM's processes load by the entry point `vllm.general_plugins`. An error costs vLLM one log line."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)


def register() -> None:
    """Register `transport.adapters.vllm` with this vLLM, if it fits."""
    try:
        from transport.adapters import vllm

        vllm.register()
    except Exception as error:  # of whatever release of vLLM: its process must start
        log.warning("weights by payload_transport are not available in this vLLM: %s: %s", type(error).__name__, error)
