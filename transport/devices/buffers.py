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

__all__ = ["Block", "BufferPool", "size_class"]
