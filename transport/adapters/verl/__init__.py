"""verl's checkpoint engine "payload_transport"; importing this package registers it where verl is installed."""

from transport.adapters.verl.engine import BACKEND, engine_class, register

__all__ = ["BACKEND", "engine_class", "register"]
