"""TransferQueue's storage backend "PayloadTransport"; importing this package registers it."""

from transport.adapters.transferqueue.manager import (
    BACKEND,
    Loader,
    PayloadTransportStorageManager,
    options_of,
    provide,
    register,
)

__all__ = ["BACKEND", "Loader", "PayloadTransportStorageManager", "options_of", "provide", "register"]
