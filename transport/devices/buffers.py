"""Pooled receive buffers: memory whose pages are already mapped and that returns to its pool automatically.

    block = pool.take(1 << 20)              # writable bytes, exactly as many
    array = np.frombuffer(block, np.uint8)  # or memoryview(block), or whatever else takes a buffer

A block returns to the pool when the last reference to it and the last view of its memory are gone; there is no explicit
return. So an array that a trainer still holds is never overwritten by the next payload. Idle memory is bounded. Usable
from any thread; a forked child has its own copies of the blocks.

The pool is native code (native/common/block_pool.hpp), since a block is taken for every payload that is read.
"""

from __future__ import annotations

from transport._ring import Block, BufferPool, size_class

__all__ = ["Block", "BufferPool", "is_short_of_memory", "size_class"]


def is_short_of_memory(error: Exception) -> bool:
    """Return whether an allocation failed for want of memory; CuPy, torch and CUDA have own classes for that."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"MemoryError", "OutOfMemoryError"}) or "cudaErrorMemoryAllocation" in str(error)
