"""verl's checkpoint engine "payload_transport"; importing this package registers it where verl is installed."""

from transport.adapters.verl.engine import BACKEND, register

__all__ = ["BACKEND", "register"]
