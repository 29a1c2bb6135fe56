"""A payload transport for cosmos-rl, under a name of its own or in the place of cosmos-rl's "ucxx"."""

from transport.adapters.cosmos_rl.registry import (
    NAME,
    PREFIX,
    TicketProducer,
    TicketStrategy,
    TicketTransport,
    payload_context,
    register,
    replace_ucxx,
    ring_schema,
)

__all__ = [
    "NAME",
    "PREFIX",
    "TicketProducer",
    "TicketStrategy",
    "TicketTransport",
    "payload_context",
    "register",
    "replace_ucxx",
    "ring_schema",
]
