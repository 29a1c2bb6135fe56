"""Decoding of a field's bytes to its value. Whatever the bytes are, nothing is read outside of them.

Arrays are views of the bytes, read-only where those are; text, bytes and images have memory of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import msgspec
import numpy as np

from transport.errors import MissingDependencyError, PayloadDamagedError
from transport.schema import ALIGNMENT, DTYPES, wrong_shape
from transport.values.forms import HEAD, MAGIC, Form, wrong_tree
from transport.values.images import check_image, image_bytes, make_image

# What the parts of a form that are not what they should be lead to, UnicodeDecodeError among them.
_UNFIT: Final = (msgspec.MsgspecError, TypeError, ValueError, LookupError, OverflowError)


def text_of(memory: np.ndarray, name: str) -> str:
    """Return the text of these bytes. PayloadDamagedError: they are not UTF-8."""
    try:
        return str(memory.data, "utf-8")
    except UnicodeDecodeError as error:
        raise PayloadDamagedError(f"{name}: these {len(memory)} bytes are not UTF-8 text: {error}") from error


def value_of(memory: np.ndarray, name: str) -> Any:
    """Return the value that `pieces_of` made these bytes of (uint8, contiguous). PayloadDamagedError for any others."""
    field = _Field(memory)
    try:
        return field.value()
    except _Wrong as wrong:
        why = str(wrong)
    except _UNFIT as error:
        why = str(error)
    finally:
        field.close()
    raise PayloadDamagedError(f"{name}: these {len(memory)} bytes are not a value: {why}")


class _Wrong(Exception):
    """The fault in a field's bytes."""


class _Field:
    """The bytes of one field, and the arrays they name."""

    def __init__(self, memory: np.ndarray) -> None:
        self._memory = memory
        self._decode: Callable[[Any], Any] = msgspec.msgpack.Decoder(ext_hook=self._extended).decode  # noqa: TID251  # of no type
        self._begin = 0

    def close(self) -> None:
        """Let go of the memory now: the decoder and this refer to each other, and a slot must not wait for gc."""
        del self._decode, self._memory

    def value(self) -> Any:
        memory = self._memory
        size = len(memory)
        if size < HEAD.size or size % ALIGNMENT:
            raise _Wrong("their number is no multiple of 64")
        magic, tree_bytes = HEAD.unpack_from(memory.data)
        end = HEAD.size + tree_bytes
        if magic != MAGIC:
            raise _Wrong(f"they begin with {magic!r}, not with {MAGIC!r}")
        if end > size:
            raise _Wrong(f"{tree_bytes} bytes of a tree are more than there are")
        tree = memory.data[HEAD.size : end]
        # Depth, counts and sizes are checked before anything is made of them.
        wrong = wrong_tree(tree)
        if wrong is not None:
            raise _Wrong(wrong)
        self._begin = self._end = -(-end // ALIGNMENT) * ALIGNMENT
        self._taken = 0
        found = self._decode(tree)
        if -(-self._end // ALIGNMENT) * ALIGNMENT != size:
            raise _Wrong(f"{size - self._end} bytes behind the last array belong to nothing")
        return found

    def _extended(self, code: int, data: memoryview) -> Any:
        return _MADE[code](self, *self._decode(data))  # the codes were checked

    def _piece(self, offset: int, size: int) -> np.ndarray:
        if type(offset) is not int or type(size) is not int or offset < 0 or offset % ALIGNMENT or size < 0:
            raise _Wrong(f"an array at {offset!r:.40} with {size!r:.40} bytes")
        begin = self._begin + offset
        end = begin + size
        if end > len(self._memory):
            raise _Wrong(f"an array ends at {end}, behind their end")
        self._end = max(self._end, end)
        self._taken += size
        if self._taken > len(self._memory):  # they overlap: copies of them could need any amount of memory
            raise _Wrong(f"arrays and texts of {self._taken} bytes in {len(self._memory)}")
        return self._memory[begin:end]

    def _tuple(self, *items: Any) -> tuple[Any, ...]:
        return items

    def _array(self, dtype: str, shape: list[int], offset: int) -> np.ndarray:
        kind = DTYPES[dtype]
        if not all(type(each) is int for each in shape) or wrong_shape(shape, kind) is not None:
            raise _Wrong(f"an array of shape {shape!r:.80}")
        return self._piece(offset, math.prod(shape) * kind.itemsize).view(kind).reshape(shape)

    def _scalar(self, dtype: str, data: bytes) -> Any:
        [scalar] = np.frombuffer(data, DTYPES[dtype])
        return scalar

    def _bytes(self, offset: int, size: int) -> bytes:
        return self._piece(offset, size).tobytes()

    def _integer(self, data: bytes) -> int:
        return int.from_bytes(data, "little", signed=True)

    def _complex(self, real: float, imaginary: float) -> complex:
        return complex(real, imaginary)

    def _image(
        self,
        mode: str,
        width: int,
        height: int,
        offset: int,
        size: int,
        palette_mode: str | None,
        palette: bytes,
        info: list[Any],
    ) -> Any:
        if type(width) is not int or type(height) is not int or width < 0 or height < 0:
            raise _Wrong(f"an image of {width!r:.40} × {height!r:.40}")
        if image_bytes(mode, width, height) != size:
            raise _Wrong(f"an image of {width} × {height} in mode {mode!r:.40} with {size!r:.40} bytes")
        pixels = self._piece(offset, size)
        said = self._mapping(*info)
        try:
            check_image(mode, (width, height), palette_mode, palette, said)
            image = make_image(mode, (width, height), pixels.data, palette_mode, palette)
        except MissingDependencyError:
            raise
        except Exception as error:  # whatever Pillow raises for parts that are wrong
            raise _Wrong(f"an image whose parts do not fit: {error}") from error
        image.info = said
        return image

    def _mapping(self, *flat: Any) -> dict[Any, Any]:
        return dict(zip(flat[::2], flat[1::2], strict=True))


_MADE: Final[Mapping[int, Callable[..., Any]]] = {
    Form.TUPLE: _Field._tuple,
    Form.ARRAY: _Field._array,
    Form.SCALAR: _Field._scalar,
    Form.BYTES: _Field._bytes,
    Form.INTEGER: _Field._integer,
    Form.COMPLEX: _Field._complex,
    Form.IMAGE: _Field._image,
    Form.MAPPING: _Field._mapping,
}


def field_value(kind: str, memory: np.ndarray, name: str) -> Any:
    """Return what a field of this kind has: "text", "bytes" or "value". PayloadDamagedError."""
    if kind == "text":
        return text_of(memory, name)
    return memory.tobytes() if kind == "bytes" else value_of(memory, name)


class DecodedFields(Mapping[str, Any]):
    """The fields of a payload by name: arrays as they are, others decoded when they are first looked at.

    Args:
        arrays: of every field; those of text, bytes and values are their bytes (uint8). None: it is absent.
        kinds: of the fields that are no arrays.
    """

    __slots__ = ("_arrays", "_found", "_kinds")

    def __init__(self, arrays: dict[str, np.ndarray | None], kinds: Mapping[str, str]) -> None:
        self._arrays = arrays
        self._kinds = kinds
        self._found: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        kind = self._kinds.get(name)
        array = self._arrays[name]
        if kind is None or array is None:
            return array
        if name not in self._found:
            self._found[name] = field_value(kind, array, name)
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __repr__(self) -> str:
        return f"<DecodedFields {', '.join(self._arrays)}>"
