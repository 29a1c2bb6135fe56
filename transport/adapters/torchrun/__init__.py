"""The backend ``transport`` of torchrun, which torch finds by the entry-point group ``torchrun.handlers``."""

from transport.adapters.torchrun.entry import create_handler, get_handler

__all__ = ["create_handler", "get_handler"]
