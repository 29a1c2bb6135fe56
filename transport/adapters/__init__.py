"""Adapters to other frameworks, one file for each, imported by name.

    transport.adapters.torch          batches for a torch training loop, with or without worker processes
    transport.adapters.cosmos_rl      a payload transport for cosmos-rl's registry
    transport.adapters.transferqueue  a storage backend for TransferQueue

Ray needs none: a ticket is an object like any other (docs/ADAPTERS.md). verl's are transport.adapters.verl (the
engine) and transport.adapters.verl_manager.
"""
