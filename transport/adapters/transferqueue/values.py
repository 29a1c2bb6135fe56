"""Values that are not tensors as MessagePack that gives the same value back, types included. Nothing is pickled.

    encode([{"role": "user", "turn": (1, 2)}, np.int64(3)])  ⇄  decode(bytes)

Tuples, sets, large integers, complex numbers, dicts with other keys than text, and arrays inside of values are
extension types of MessagePack. What has no such form is refused, by its path: "values[3].image: a socket cannot be
sent".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec
import numpy as np
import torch

from transport.errors import SchemaError, TicketError

_MOST_DEEP: Final = 100
_PLAIN: Final = (type(None), bool, str, bytes, float)
_TUPLE, _PAIRS, _ARRAY, _TENSOR, _SCALAR, _INT, _SET, _FROZENSET, _COMPLEX, _BYTEARRAY = range(1, 11)

_pack = msgspec.msgpack.Encoder().encode


def encode(values: Any, name: str = "values") -> bytes:
    """SchemaError names the first value that cannot be sent, as a part of ``name``."""
    return _pack(_form(values, name, 0))


def _form(value: Any, path: str, depth: int) -> Any:
    kind = type(value)
    if kind in _PLAIN or (kind is int and -(1 << 63) <= value < 1 << 64):
        return value
    if depth > _MOST_DEEP:
        raise SchemaError(f"{path:.200}: nested more than {_MOST_DEEP} levels deep; it cannot be sent")
    if kind is list:
        return [_form(each, f"{path}[{at}]", depth + 1) for at, each in enumerate(value)]
    if kind is dict:
        if all(type(key) is str for key in value):
            return {key: _form(each, f"{path}.{key}", depth + 1) for key, each in value.items()}
        pairs = [
            [_form(key, f"a key of {path}", depth + 1), _form(each, f"{path}[{key!r}]", depth + 1)]
            for key, each in value.items()
        ]
        return msgspec.msgpack.Ext(_PAIRS, _pack(pairs))
    if kind in (tuple, set, frozenset):
        code = _TUPLE if kind is tuple else _SET if kind is set else _FROZENSET
        return msgspec.msgpack.Ext(code, _pack([_form(each, f"{path}[…]", depth + 1) for each in value]))
    if kind is int:
        return msgspec.msgpack.Ext(_INT, str(value).encode())
    if kind is complex:
        return msgspec.msgpack.Ext(_COMPLEX, _pack([value.real, value.imag]))
    if kind is bytearray:
        return msgspec.msgpack.Ext(_BYTEARRAY, bytes(value))
    if isinstance(value, np.generic | np.ndarray) and value.dtype.kind in "biufcSU":
        array = np.ascontiguousarray(value)
        code = _ARRAY if kind is np.ndarray else _SCALAR
        return msgspec.msgpack.Ext(code, _pack([array.dtype.str, list(np.shape(value)), array.tobytes()]))
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_quantized:
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return msgspec.msgpack.Ext(_TENSOR, _pack([str(value.dtype).removeprefix("torch."), list(value.shape), flat]))
    raise SchemaError(
        f"{path:.200}: a {kind.__module__}.{kind.__qualname__} cannot be sent: give text, bytes, numbers, arrays, "
        "tensors, and lists, tuples, sets and dicts of them"
    )


def decode(data: bytes | memoryview) -> Any:
    """What `encode` was given. TicketError for other bytes."""
    try:
        return _unpack(data)
    except (msgspec.MsgspecError, ValueError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
        raise TicketError(f"these bytes are no values of TransferQueue: {error}") from error


def _unpack(data: Any) -> Any:
    return _decoder.decode(data)


def _array(data: Any) -> np.ndarray:
    dtype, shape, content = _unpack(data)
    kind = np.dtype(str(dtype))
    if kind.hasobject:
        raise ValueError("an array of Python objects")
    return np.frombuffer(content, kind).reshape(shape).copy()


def _tensor(data: Any) -> torch.Tensor:
    name, shape, content = _unpack(data)
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} is no dtype")
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=dtype).reshape(shape)


_FORMS: Final[dict[int, Callable[[Any], Any]]] = {
    _TUPLE: lambda data: tuple(_unpack(data)),
    _PAIRS: lambda data: {key: value for key, value in _unpack(data)},  # noqa: C416  # two of each, or an error
    _ARRAY: _array,
    _TENSOR: _tensor,
    _SCALAR: lambda data: _array(data)[()],
    _INT: lambda data: int(bytes(data)),
    _SET: lambda data: set(_unpack(data)),
    _FROZENSET: lambda data: frozenset(_unpack(data)),
    _COMPLEX: lambda data: complex(*_unpack(data)),
    _BYTEARRAY: bytearray,
}


def _made(code: int, data: memoryview) -> Any:
    if code not in _FORMS:
        raise ValueError(f"extension type {code}")
    return _FORMS[code](data)


_decoder: Final = msgspec.msgpack.Decoder(ext_hook=_made)
