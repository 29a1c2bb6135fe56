"""Adapters to other frameworks, a folder for each, imported by name (docs/ADAPTERS.md).

torch          batches for a torch training loop, with or without worker processes; checkpoints
torchrun       the rendezvous backend ``transport``, which torch finds by its name
ray            rings find each other within a Ray cluster; tickets are objects like any other and need nothing
torchft        a checkpoint transport: a replica heals from the memory of another one
areal          a backend for AReaL's tensors between workers
cosmos_rl      a payload transport for cosmos-rl's registry
verl           the engine in verl's registry of checkpoint engines; its manager is ``verl.manager.Manager``
transferqueue  a storage backend for TransferQueue, which verl finds by ``transferqueue_plugin``
"""
