"""`transport.adapters.verl.engine` for tests: what verl imports warns, which is an error here."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transport.adapters.verl import engine as verl

__all__ = ["verl"]
