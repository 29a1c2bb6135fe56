"""The backend ``transport`` of torchrun: ``torchrun --rdzv-backend=transport --rdzv-endpoint='redis://host:6379/0' …``.

torch finds it by the entry-point group ``torchrun.handlers``, and imports this module in every program that imports
``torch.distributed.elastic``. So nothing else is imported before a handler is made, and nothing here can fail.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters


def get_handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return the function for torch to register, the one that makes a handler of torchrun's arguments."""
    return create_handler


def create_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    """Return a handler for one agent.

    A mistake in the arguments ends the program with one line that says what to do.
    """
    from transport.adapters.torchrun.options import exit_with
    from transport.errors import TransportError
    from transport.runtime.releases import require_fitting

    try:
        require_fitting("torchrun")

        from transport.adapters.torchrun.handler import make

        return make(parameters)
    except TransportError as error:
        exit_with(1, str(error))
