"""Tensors, TensorDicts and arrays of objects inside of nested values: taken apart into what travels, and put together.

    apart = Apart()
    fields = {name: apart.of(value, name) for name, value in given.items()}   # numbers, text, arrays, lists, dicts
    together(fields["batch"], apart.marks, "batch")                           # what was given

A *mark* says what stood at a path: ``[kind, step, step, …]``. Nothing is made by a name that came with the bytes: kinds
are those of this file, and of the classes that the reader passes.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from transport.adapters.torch import tensors as _says_what_to_do_without_torch
from transport.devices.host_tensors import as_tensor
from transport.errors import BufferUnsuitableError, PayloadDamagedError, SchemaError
from transport.values.forms import MAX_DEPTH, MAX_VALUES

import torch  # isort: skip

__all__ = ["Apart", "Mark", "together"]
assert _says_what_to_do_without_torch

Mark = list[Any]
Models = Mapping[str, type]
_NONE: Final[Models] = MappingProxyType({})
_PLAIN: Final = frozenset((type(None), bool, int, float, str, bytes))
_TEXTS: Final = "US"  # kinds of numpy's dtypes: arrays of text, of bytes
_TIMES: Final = "mM"
_MOST_TEXT: Final = 256 << 20  # bytes of an array of text or bytes, whose items all take as much as its dtype says


class Apart:
    """One value, or the fields of one payload, on their way.

    Args:
        models: pydantic's classes whose objects are taken apart, by the names that stand for them.

    Attributes:
        marks: what stood where.
    """

    def __init__(self, models: Models = _NONE) -> None:
        self.marks: list[Mark] = []
        self._names = {kind: name for name, kind in models.items()}
        self._above: set[int] = set()
        self._count = 0

    def of(self, value: Any, *path: Any) -> Any:
        """Return what travels in the place of a value that stands at this path. Tensors are not copied.

        SchemaError names a value that has no form; what cannot travel for other reasons is refused as it is written.
        """
        self._count += 1
        if self._count > MAX_VALUES:
            raise SchemaError(f"{_dotted(path):.200}: there are more than {MAX_VALUES} values")
        if len(path) > 4 * MAX_DEPTH:  # the writer allows MAX_DEPTH, in a form that has some levels more
            raise SchemaError(f"{_dotted(path[:8]):.200}: values are nested more than {MAX_DEPTH} deep")
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind in (list, tuple, dict):
            if id(value) in self._above:
                return value  # it contains itself, for which the writer has an error
            self._above.add(id(value))
            try:
                if kind is dict:
                    return self._items(value, path)
                return kind([self.of(each, *path, at) for at, each in enumerate(value)])
            finally:
                self._above.discard(id(value))
        if kind in (set, frozenset):
            return self._marked(kind.__name__, path, [self.of(each, *path, at) for at, each in enumerate(value)])
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, np.ndarray) and value.dtype.kind in f"O{_TEXTS}{_TIMES}":
            return self._array(value, path)
        if kind is Counter:
            return self._marked("Counter", path, self._items(value, path))
        if kind is torch.Size:
            return self._marked("Size", path, list(value))
        if kind is bytearray:
            return self._marked("bytearray", path, bytes(value))
        if kind is np.str_:
            return self._marked("str_", path, str(value))
        if kind is np.bytes_:
            return self._marked("bytes_", path, bytes(value))
        if kind in self._names:
            return self._model(value, path)
        of_torch = _of_tensordict(kind)
        return value if of_torch is None else of_torch(self, value, path)

    def _items(self, value: Mapping[Any, Any], path: Sequence[Any]) -> dict[Any, Any]:
        """Take the values of a mapping apart. A mark names its path by keys, which are looked up where it arrives."""
        found = {}
        for key, each in value.items():
            marks = len(self.marks)
            found[key] = self.of(each, *path, key)
            if len(self.marks) > marks and not _equals_itself(key):
                raise SchemaError(f"{_dotted(path):.200}: NaN cannot be a key above a tensor: no reader could find it")
        return found

    def _marked(self, kind: str, path: Sequence[Any], form: Any) -> Any:
        self.marks.append([kind, *path])
        return form

    def _tensor(self, value: Any, path: Sequence[Any]) -> Any:
        if not value.is_nested:
            return self._marked("tensor", path, value)
        if value.layout != torch.jagged:
            return self._marked("nested", path, list(value.unbind()))
        if getattr(value, "_ragged_idx", 1) != 1:
            raise SchemaError(
                f"{_dotted(path)}: a nested tensor whose dimension 1 is not the ragged one cannot be sent"
            )
        parts = {"values": value.values(), "offsets": value.offsets(), "lengths": value.lengths()}
        return self._marked("jagged", path, parts)

    def _array(self, value: np.ndarray, path: Sequence[Any]) -> Any:
        if value.dtype.kind == "O":
            self.marks.append(["array", *path])
            flat = [self.of(each, *path, "items", at) for at, each in enumerate(value.reshape(-1).tolist())]
            return {"dtype": "object", "shape": list(value.shape), "items": flat}
        if value.dtype.kind in _TEXTS and value.dtype.itemsize * max(1, value.size) > _MOST_TEXT:
            raise SchemaError(
                f"{_dotted(path):.200}: an array of {value.size} times {value.dtype} has more than "
                f"{_MOST_TEXT >> 20} MiB: give it as a list, or with dtype=object"
            )
        items = value.view(np.int64) if value.dtype.kind in _TIMES else value.reshape(-1).tolist()
        return self._marked("array", path, {"dtype": value.dtype.str, "shape": list(value.shape), "items": items})

    def _model(self, value: Any, path: Sequence[Any]) -> Any:
        self.marks.append([self._names[type(value)], *path])
        given = value.model_fields_set
        fields = {
            name: self.of(each, *path, "fields", name)
            for name, each in value.__dict__.items()
            if name in given or each is not type(value).model_fields[name].default
        }
        return {"fields": fields, "given": [name for name in fields if name in given]}

    # --- tensordict's -----------------------------------------------------------------------------------
    def _tensordict(self, value: Any, path: Sequence[Any]) -> Any:
        self.marks.append(["TensorDict", *path])
        return {**shape_of(value), "items": {key: self.of(each, *path, "items", key) for key, each in value.items()}}

    def _data(self, value: Any, path: Sequence[Any]) -> Any:
        self.marks.append(["NonTensorData", *path])
        return {"batch_size": list(value.batch_size), "data": self.of(value.data, *path, "data")}

    def _stack(self, value: Any, path: Sequence[Any]) -> Any:
        parts = value.tensordicts
        plain = all(_of_tensordict(type(each)) is Apart._data and not each.batch_size for each in parts)
        self.marks.append(["NonTensorStack" if plain else "stack", *path])
        items = [self.of(each.data if plain else each, *path, "items", at) for at, each in enumerate(parts)]
        return {"dimension": value.stack_dim, "items": items}

    def _refused(self, value: Any, path: Sequence[Any]) -> Any:
        raise SchemaError(
            f"{_dotted(path)}: a {type(value).__name__} cannot be sent, since it would come back as a TensorDict; give "
            "its contiguous(), to_tensordict() or to_dict()"
        )


def _of_tensordict(kind: type) -> Callable[[Apart, Any, Sequence[Any]], Any] | None:
    """Return how objects of a class of the package tensordict are taken apart; None: it is none of them."""
    if not any(each.__module__.startswith("tensordict.") for each in kind.__mro__):
        return None
    from tensordict import NonTensorData, NonTensorStack, TensorDict

    known = {TensorDict: Apart._tensordict, NonTensorData: Apart._data, NonTensorStack: Apart._stack}
    found: Callable[[Apart, Any, Sequence[Any]], Any] = known.get(kind, Apart._refused)
    return found


def shape_of(value: Any) -> dict[str, Any]:
    """Return what a TensorDict is beside its items. What was on a device comes back on the host."""
    names = list(value.names)
    return {
        "batch_size": list(value.batch_size),
        "device": None if value.device is None else "cpu",
        "names": names if any(name is not None for name in names) else None,
    }


def tensordict_of(shape: Mapping[str, Any], items: Mapping[Any, Any], *, copy: bool = False) -> Any:
    """Return the TensorDict of this shape (of `shape_of`) and these items. Arrays, which stages add, are tensors."""
    from tensordict import TensorDict

    made = TensorDict({}, batch_size=shape["batch_size"], device=shape["device"], names=shape["names"])
    for key, each in items.items():
        made.set(key, as_tensor(each, copy=copy) if isinstance(each, np.ndarray) else each)
    return made


def _equals_itself(key: object) -> bool:
    """Return False for NaN, and for tuples with NaN; a copy of such a key differs from it."""
    return all(map(_equals_itself, key)) if isinstance(key, tuple) else bool(key == key)


# --- together -------------------------------------------------------------------------------------------
class _Node:
    """The values at a step of a path, and below it."""

    __slots__ = ("below", "kind")

    def __init__(self) -> None:
        self.kind: str | None = None
        self.below: dict[Any, _Node] = {}


class Together:
    """The values of one payload, put together again.

    Args:
        marks: as `Apart` has them, of all fields.
        copy: give tensors and arrays memory of their own, that may be written to; otherwise they are views.
        models: as for `Apart`.
        offsets: of nested tensors, which are of one shape when they share these; filled here. None: of these values.
    """

    def __init__(
        self,
        marks: Iterable[Mark],
        *,
        copy: bool,
        models: Models = _NONE,
        offsets: dict[bytes, Any] | None = None,
    ) -> None:
        self._copy = copy
        self._models = models
        self._offsets = {} if offsets is None else offsets
        self._root = _Node()
        with _damage("its marks"):
            for kind, *path in marks:
                node = self._root
                for step in path:
                    node = node.below.setdefault(step, _Node())
                node.kind = kind

    def field(self, name: str, value: Any) -> Any:
        """Return what was given as the field of this name. PayloadDamagedError: its marks do not fit what came."""
        with _damage(name):
            return self._put(value, self._root.below.get(name))

    def _put(self, value: Any, node: _Node | None) -> Any:
        kind = type(value)
        if (node is not None and node.below) or (self._copy and kind in (list, tuple, dict)):
            below = {} if node is None else node.below
            if kind is dict:
                if not below.keys() <= value.keys():
                    raise ValueError("a mark of what did not come")
                value = {key: self._put(each, below.get(key)) for key, each in value.items()}
            elif kind in (list, tuple):
                if any(type(at) is not int or not 0 <= at < len(value) for at in below):
                    raise ValueError("a mark of what did not come")
                value = kind([self._put(each, below.get(at)) for at, each in enumerate(value)])
            else:
                raise TypeError(f"marks below a {kind.__name__}")
        if node is None or node.kind is None:
            return np.array(value) if self._copy and isinstance(value, np.ndarray) else value
        if node.kind in self._models:
            return self._model(self._models[node.kind], value)
        return _MADE[node.kind](self, value)

    def _tensor(self, value: Any) -> Any:
        if not hasattr(value, "dtype") or (isinstance(value, np.ndarray) and value.dtype.kind in "OSU"):
            raise TypeError(f"a {type(value).__name__}, which was no tensor")
        return as_tensor(value, copy=self._copy)

    def _nested(self, parts: list[Any]) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that torch's strided layout is a prototype
            return torch.nested.as_nested_tensor([self._tensor(each) for each in parts])

    def _jagged(self, parts: dict[str, Any]) -> Any:
        offsets = self._tensor(parts["offsets"])
        if offsets.ndim != 1 or not len(offsets) or offsets.dtype not in (torch.int32, torch.int64):
            raise ValueError("offsets that are none")
        values = self._tensor(parts["values"])
        ends = offsets.tolist()
        if ends[0] < 0 or ends != sorted(ends) or ends[-1] > len(values):
            raise ValueError("offsets outside of the values")
        offsets = self._offsets.setdefault(repr(ends).encode(), offsets)
        lengths = parts["lengths"]
        if lengths is None:
            return torch.nested.nested_tensor_from_jagged(values, offsets)
        lengths = self._tensor(lengths)
        if lengths.shape != (len(ends) - 1,) or not all(
            0 <= count <= len(values) - begin for begin, count in zip(ends, lengths.tolist(), strict=False)
        ):
            raise ValueError("lengths outside of the values")
        return torch.nested.nested_tensor_from_jagged(values, offsets, lengths)

    def _array(self, parts: dict[str, Any]) -> np.ndarray:
        shape, items = parts["shape"], parts["items"]
        kind = np.dtype(parts["dtype"])
        if kind.kind == "O":
            made = np.empty(len(items), object)
            for at, each in enumerate(items):  # an assignment of all would look into lists
                made[at] = each
            return made.reshape(shape)
        if kind.kind in _TIMES and isinstance(items, np.ndarray):
            return np.asarray(items.view(kind).reshape(shape))
        if kind.kind not in _TEXTS or kind.itemsize * max(1, len(items)) > _MOST_TEXT:
            raise ValueError(f"an array of {kind}")
        made = np.array(items, kind)
        return made.reshape(shape)

    def _model(self, kind: Any, parts: dict[str, Any]) -> Any:
        fields = parts["fields"]
        return kind.model_construct(set(parts["given"]) & fields.keys(), **fields)

    def _tensordict(self, parts: dict[str, Any]) -> Any:
        return tensordict_of(parts, parts["items"])

    def _data(self, parts: dict[str, Any]) -> Any:
        from tensordict import NonTensorData

        return NonTensorData(parts["data"], batch_size=parts["batch_size"])

    def _of_data(self, parts: dict[str, Any]) -> Any:
        from tensordict import NonTensorData

        return self._stack({**parts, "items": [NonTensorData(each) for each in parts["items"]]})

    def _stack(self, parts: dict[str, Any]) -> Any:
        from tensordict import NonTensorStack

        return NonTensorStack(*parts["items"], stack_dim=parts["dimension"])


_MADE: Final[Mapping[str, Callable[[Together, Any], Any]]] = {
    "tensor": Together._tensor,
    "nested": Together._nested,
    "jagged": Together._jagged,
    "array": Together._array,
    "Counter": lambda _, value: Counter(value),
    "Size": lambda _, value: torch.Size(value),
    "bytearray": lambda _, value: bytearray(value),
    "str_": lambda _, value: np.str_(value),
    "bytes_": lambda _, value: np.bytes_(value),
    "set": lambda _, items: set(items),
    "frozenset": lambda _, items: frozenset(items),
    "TensorDict": Together._tensordict,
    "NonTensorData": Together._data,
    "NonTensorStack": Together._of_data,
    "stack": Together._stack,
}


def together(value: Any, marks: Iterable[Mark], name: str, *, copy: bool = True, models: Models = _NONE) -> Any:
    """One field of a payload as it was given. PayloadDamagedError: its marks do not fit what came."""
    return Together(marks, copy=copy, models=models).field(name, value)


@contextmanager
def _damage(what: str) -> Iterator[None]:
    """Errors of parts that are not what they should be, as one of this package."""
    try:
        yield
    except BufferUnsuitableError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, OverflowError) as error:
        raise PayloadDamagedError(f"{what}: this is not what it was taken apart into: {error}") from error


def _dotted(path: Sequence[Any]) -> str:
    return ".".join(map(str, path))
