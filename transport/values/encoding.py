"""Encoding of a nested value as the pieces of its field: the tree, and the arrays it names, not copied here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any, Final

import msgspec
import numpy as np

from transport.errors import SchemaError
from transport.schema import ALIGNMENT, DTYPES, wrong_shape
from transport.values.arrays import NAMES, Array, comes_back_as_another, found_array
from transport.values.forms import (
    HEAD,
    MAGIC,
    MAX_DEPTH,
    MAX_INTEGER_BYTES,
    MAX_VALUES,
    OWN_PIECE_BYTES,
    Form,
    wrong_tree,
)
from transport.values.images import image_class, image_parts

_PLAIN: Final = frozenset((NoneType, bool, float, str))  # what MessagePack has, in any range
_TEXT: Final = frozenset((str,))
_NUMBERS: Final = frozenset((bool, int))
_LARGEST: Final = f"a field has at most {MAX_VALUES}; make arrays of long lists of numbers"
_encode = msgspec.msgpack.Encoder().encode
_Ext = msgspec.msgpack.Ext


class Pieces:
    """A value as it is to lie in its field.

    Attributes:
        parts: offset in the field and array, one behind the other; what lies between is to be zero.
        shape: of the field, its bytes.
    """

    __slots__ = ("parts", "shape")

    def __init__(self, parts: list[tuple[int, Array]], size: int) -> None:
        self.parts = parts
        self.shape = (size,)


class _Stuck(Exception):
    """A value that cannot travel, and where it stands: the steps of the path to it, the last first."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what
        self.steps: list[str] = []


def text_bytes(value: object, name: str) -> np.ndarray:
    """Return the UTF-8 of a str. SchemaError for another type, and for half of a surrogate pair, which UTF-8 lacks."""
    if type(value) is not str:
        instead = "; give str(…) of it" if isinstance(value, str) else ""
        raise SchemaError(f"{name}: expected a str for text, got {_a(type(value).__name__)}{instead}")
    try:
        return np.asarray(memoryview(value.encode()))
    except UnicodeEncodeError as error:
        raise SchemaError(f"{name}: {_no_text(error)}") from error


def own_bytes(value: object, name: str) -> np.ndarray:
    """Return the bytes of a bytes, bytearray or contiguous memoryview, without a copy. SchemaError."""
    if not isinstance(value, bytes | bytearray | memoryview):
        raise SchemaError(f"{name}: expected bytes, got {_a(type(value).__name__)}")
    try:
        return np.asarray(memoryview(value).cast("B") if memoryview(value).nbytes else memoryview(b""))
    except TypeError as error:
        raise SchemaError(f"{name}: this memoryview is not contiguous: {error}") from error


def pieces_of(value: object, name: str) -> Pieces:
    """Return the value as pieces of its field. SchemaError, naming the path to it, for what cannot travel."""
    tree = _Tree()
    try:
        encoded = tree.encoded(value)
    except _Stuck as stuck:
        raise SchemaError(f"{name}{''.join(reversed(stuck.steps))}: {stuck.what}") from stuck.__cause__
    except RecursionError as error:
        raise SchemaError(f"{name}: the call stack has no room for its nesting") from error
    head = np.frombuffer(HEAD.pack(MAGIC, len(encoded)) + encoded, np.uint8)
    begin = _aligned(len(head))
    parts: list[tuple[int, Array]] = [(0, head), *((begin + offset, piece) for offset, piece in tree.pieces)]
    last, piece = parts[-1]
    end = last + piece.nbytes
    size = _aligned(end)
    if end != size:  # so that one value behind the other in a batch keeps its arrays aligned
        parts.append((end, np.zeros(size - end, np.uint8)))
    return Pieces(parts, size)


class _Tree:
    """One value on its way: what MessagePack takes in its place, and the arrays beside it."""

    def __init__(self) -> None:
        self.pieces: list[tuple[int, Array]] = []
        self.end = 0
        self._entries = 0  # of the containers
        self._above: list[int] = []  # ids of the containers that the present one is in

    def encoded(self, value: object) -> bytes:
        """Return the bytes of the tree."""
        tree = self._walk(value)
        try:
            encoded = _encode(tree)
        except UnicodeEncodeError:
            _find_text(value)
            raise
        except (OverflowError, TypeError, RuntimeError, ValueError) as error:
            raise _Stuck(f"it was changed while it was written ({error})") from error
        wrong = wrong_tree(encoded)
        if wrong is not None:
            raise _Stuck(f"{wrong}; {_LARGEST}")
        return encoded

    def _walk(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        how = _HOW.get(kind)
        return how(self, value) if how is not None else self._other(value)

    # --- containers -----------------------------------------------------------------------------------
    def _enter(self, value: Any) -> None:
        self._entries += len(value)
        if self._entries > MAX_VALUES:  # the tree cannot have fewer values, and would be made first
            raise _Stuck(f"it has too many values; {_LARGEST}")
        if id(value) in self._above:
            raise _Stuck(f"this {type(value).__name__} contains itself")
        if len(self._above) >= MAX_DEPTH:
            raise _Stuck(f"it is nested more than {MAX_DEPTH} deep")
        self._above.append(id(value))

    def _items(self, value: list[Any] | tuple[Any, ...]) -> Any:
        """Return the items as MessagePack takes them; the value itself where it takes that."""
        kinds = set(map(type, value))
        if kinds <= _PLAIN:
            return value
        if kinds <= _NUMBERS and min(value) >= -(1 << 63) and max(value) < 1 << 64:
            return value
        found = []
        at = -1
        try:
            for at, each in enumerate(value):  # noqa: B007  # told where it ends
                found.append(self._walk(each))
        except _Stuck as stuck:
            stuck.steps.append(f"[{at}]")
            raise
        return found

    def _list(self, value: list[Any]) -> Any:
        self._enter(value)
        found = self._items(value)
        self._above.pop()
        return found

    def _tuple(self, value: tuple[Any, ...]) -> Any:
        self._enter(value)
        found = self._items(value)
        self._above.pop()
        return self._extended(Form.TUPLE, found, value)

    def _dict(self, value: dict[Any, Any]) -> Any:
        self._enter(value)
        found: Any = {}
        only_text = set(map(type, value)) <= _TEXT
        key: Any = None
        try:
            if only_text:
                for key, each in value.items():
                    found[key] = self._walk(each)
            else:
                found = []
                for key, each in value.items():
                    self._key(key)
                    found += (self._walk(key), self._walk(each))
        except _Stuck as stuck:
            stuck.steps.append(_step(key))
            raise
        except RuntimeError as error:
            raise _Stuck(f"it was changed while it was written ({error})") from error
        self._above.pop()
        return found if only_text else self._extended(Form.MAPPING, found, value)

    def _key(self, key: Any) -> None:
        plain = key is None or isinstance(key, bool | int | float | str | bytes | complex | np.generic)
        if not plain and type(key) is not tuple:
            raise _Stuck(f"{_a(type(key).__name__)} cannot be sent as a key; use text, numbers or tuples of them")

    def _extended(self, form: int, body: Any, value: object) -> Any:
        try:
            return _Ext(form, _encode(body))
        except UnicodeEncodeError:
            _find_text(value)
            raise

    # --- leaves ---------------------------------------------------------------------------------------
    def _int(self, value: int) -> Any:
        if -(1 << 63) <= value < 1 << 64:
            return value
        size = value.bit_length() // 8 + 1
        if size > MAX_INTEGER_BYTES:
            raise _Stuck(f"an int of {size} bytes cannot be sent; the limit is {MAX_INTEGER_BYTES}")
        return _Ext(Form.INTEGER, _encode([value.to_bytes(size, "little", signed=True)]))

    def _bytes(self, value: bytes) -> Any:
        if len(value) < OWN_PIECE_BYTES:
            return value
        return _Ext(Form.BYTES, _encode([self._place(np.frombuffer(value, np.uint8)), len(value)]))

    def _complex(self, value: complex) -> Any:
        return _Ext(Form.COMPLEX, _encode([value.real, value.imag]))

    def _array(self, array: Array) -> Any:
        dtype = array.dtype
        wrong = wrong_shape(array.shape, dtype)
        if wrong is not None:
            raise _Stuck(f"this array cannot be sent: {wrong}")
        name = NAMES.get(dtype) or dtype.name
        if isinstance(array, np.ndarray) and dtype not in NAMES:
            array = array.astype(DTYPES[name])  # of the other byte order
        return _Ext(Form.ARRAY, _encode([name, list(array.shape), self._place(array)]))

    def _scalar(self, value: np.generic) -> Any:
        name = NAMES.get(value.dtype)
        if name is None or type(value) is not DTYPES[name].type:
            raise _Stuck(f"{_a(type(value).__name__)} cannot be sent; use one of {', '.join(DTYPES)}")
        return _Ext(Form.SCALAR, _encode([name, value.tobytes()]))

    def _image(self, value: Any) -> Any:
        try:
            pixels, palette_mode, palette = image_parts(value)
        except Exception as error:  # decoders of broken files raise errors of any class, SyntaxError too
            raise _Stuck(f"this image cannot be sent: {error}") from error
        flat: list[Any] = []
        key: Any = None
        self._enter(value.info)
        try:
            for key, each in value.info.items():
                self._key(key)
                flat += (self._walk(key), self._walk(each))
        except _Stuck as stuck:
            stuck.steps += (_step(key), ".info")
            raise
        self._above.pop()
        place = self._place(pixels)
        body = [value.mode, *value.size, place, pixels.nbytes, palette_mode, palette, flat]
        return self._extended(Form.IMAGE, body, value)

    def _place(self, array: Array) -> int:
        at = self.end
        if array.nbytes:
            self.pieces.append((at, array))
        self.end = _aligned(at + array.nbytes)
        return at

    def _other(self, value: Any) -> Any:
        if isinstance(value, np.generic) and not isinstance(value, str | bytes):
            return self._scalar(value)
        image = image_class()
        if image is not None and isinstance(value, image):
            return self._image(value)
        kind = type(value)
        close = next((each for each in _CLOSE if isinstance(value, each)), None)
        if close is not None and not isinstance(value, np.ndarray):
            raise _Stuck(
                f"{_a(kind.__qualname__)} cannot be sent, since it would come back as {_a(close.__name__)}; "
                f"give {close.__name__}(…) of it"
            )
        if isinstance(value, Mapping):
            raise _Stuck(f"{_a(kind.__qualname__)} cannot be sent; give dict(…) of it")
        if isinstance(value, bytearray | memoryview):
            raise _Stuck(
                f"{_a(kind.__name__)} cannot be sent; give bytes(…) of it, or numpy.frombuffer(…) without a copy"
            )
        if comes_back_as_another(value):
            raise _Stuck(f"{_a(kind.__name__)} cannot be sent; give numpy.asarray(…) of it")
        try:
            array = found_array(value, "")
        except SchemaError as error:
            raise _Stuck(str(error).removeprefix(": ")) from error
        if array is None:
            raise _Stuck(f"{_a(kind.__qualname__)} cannot be sent")
        return self._array(array)


_HOW: Final[Mapping[type, Callable[[_Tree, Any], Any]]] = {
    int: _Tree._int,
    bytes: _Tree._bytes,
    complex: _Tree._complex,
    list: _Tree._list,
    tuple: _Tree._tuple,
    dict: _Tree._dict,
}
_CLOSE: Final = (bool, int, float, complex, str, bytes, list, tuple, dict)  # a subclass of these would come back as one


def _step(key: Any) -> str:
    if type(key) is str and key.isidentifier():
        return f".{key}"
    try:
        text = repr(key)
    except Exception:  # of a foreign class
        text = f"a {type(key).__name__}"
    return f"[{text if len(text) <= 40 else f'{text[:39]}…'}]"


def _find_text(value: Any) -> None:
    """Raise `_Stuck` with the path to the text that is not UTF-8, after MessagePack has met it."""
    if type(value) is str:
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise _Stuck(_no_text(error)) from error
        return
    if type(value) in (list, tuple):
        steps: Any = ((f"[{at}]", (each,)) for at, each in enumerate(value))
    elif type(value) is dict:
        steps = ((_step(key), (key, each)) for key, each in value.items())
    elif image_class() is not None and isinstance(value, image_class() or ()):
        steps = [(".info", (getattr(value, "info", None),))]
    else:
        return
    for step, found in steps:
        try:
            for each in found:
                _find_text(each)
        except _Stuck as stuck:
            stuck.steps.append(step)
            raise


def _no_text(error: UnicodeEncodeError) -> str:
    found = error.object[error.start]
    return (
        f"this text is not UTF-8: it has half of a surrogate pair (U+{ord(found):04X}) at {error.start}; "
        'text.encode("utf-8", "replace").decode() takes it out'
    )


def _a(noun: str) -> str:
    return f"an {noun}" if noun[:1].lower() in "aeiou" else f"a {noun}"


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
