"""verl's manager by the name that configurations have: ``transport.adapters.verl_manager.Manager``."""

from transport.adapters.verl.manager import Manager

__all__ = ["Manager"]
