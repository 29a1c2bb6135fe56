"""Form of a value in the bytes of its field: the layout, its names and limits.

0        magic, then the bytes of the tree (u32)
8        the tree, MessagePack: None, bool, int, float, str, bytes, lists and dicts of text to values are themselves,
         all else is an extension whose body is an array of what `Form` says
n·64     what the tree names, one behind the other, each at a multiple of 64 from here; gaps and the end, up to a
         multiple of 64, are zeros
"""

from __future__ import annotations

import struct
from typing import Final

from transport import _ring

MAGIC: Final = b"val1"
HEAD: Final = struct.Struct("<4sI")

MAX_DEPTH: Final = 64
"""Lists in dicts in tuples …, counted together."""

MAX_VALUES: Final = 1 << 22
"""Values of one field as MessagePack has them: containers, keys and the parts of a form included."""

OWN_PIECE_BYTES: Final = 1024  # bytes objects from here on lie beside the tree, and are copied once only
MAX_INTEGER_BYTES: Final = 4096


class Form:
    """Codes of the extensions, plain ints for MessagePack."""

    TUPLE: Final = 1  # its items
    ARRAY: Final = 2  # dtype, [dimensions], offset
    SCALAR: Final = 3  # dtype, bytes: a numpy scalar
    BYTES: Final = 4  # offset, size
    INTEGER: Final = 5  # bytes, little-endian, signed: beyond 64 bits
    COMPLEX: Final = 6  # real, imaginary
    IMAGE: Final = (
        7  # mode, width, height, offset, size, palette's mode or nil, palette's bytes, info as flat keys and values
    )
    MAPPING: Final = 8  # key, value, key, value …: a dict with keys other than text


def wrong_tree(tree: bytes | memoryview) -> str | None:
    """Say why these bytes are no tree whose depth and number of values are within the limits; None: they are."""
    return _ring.check_tree(tree, 2 * MAX_DEPTH + 4, MAX_VALUES)  # a form may be two containers, as an image is
