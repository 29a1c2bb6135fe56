"""Pooled receive buffers: memory that is warm (its pages exist) and goes back by itself.

    block = pool.take(1 << 20)              # writable bytes, exactly as many
    array = np.frombuffer(block, np.uint8)  # or memoryview(block), or whatever else takes a buffer

A block returns to the pool when the last reference to it and the last view of its memory are gone, not when somebody
says so: an array a trainer still holds can never be overwritten by the next payload. Idle memory is bounded. Any
thread; a forked child's blocks are copies of its own.

The pool is native code (native/common/block_pool.hpp), since a block is taken for every payload that is read.
"""

from __future__ import annotations

from transport._ring import Block, BufferPool, size_class

__all__ = ["Block", "BufferPool", "size_class"]
