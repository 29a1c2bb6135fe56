"""docs/API.md from signatures and docstrings: `page` makes it, ``python tests/docs/test_docs.py`` writes it."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import transport
from transport import config, cooldown, errors, queue, rendezvous, store, testing
from transport.client import trace
from transport.packer import prefetch

HEAD = """# The interface, name by name

Generated from the docstrings; `python tests/docs/test_docs.py` writes it. **Public** is what stands here, what
[ADAPTERS.md](ADAPTERS.md) and [WEIGHTS.md](WEIGHTS.md) import, the commands with their JSON, and the names of metrics
and settings: it changes with a line in the CHANGELOG, and before 1.0 only in a minor version. Whatever begins with an
underscore, or is not here, may change at any time.

What `from transport import …` gives comes first, then what a packer returns, `transport.queue`, `transport.store`,
`transport.rendezvous`, `transport.cooldown`, `transport.testing`, `transport.client.trace`, `transport.config` and the
errors.
"""


_PARTS = {f"transport.ring.{part}" for part in ("life", "reading", "attachment")}  # of SharedRingBuffer


def page() -> str:
    """The whole page."""
    parts = [HEAD, *(_section(title, thing) for title, thing in public()), _errors()]
    return "\n".join(parts).rstrip() + "\n"


def public() -> Iterator[tuple[str, Any]]:
    """What is public: its title on the page, and the thing itself."""
    yield from ((name, getattr(transport, name)) for name in sorted(transport.__all__))
    modules = [(prefetch, ("FetchedBatch", "FetchedItem"))]
    modules += [(module, tuple(module.__all__)) for module in (queue, store, rendezvous, cooldown, testing)]
    for module, names in (*modules, (trace, ("Trace", "merge")), (config, ("load", "configuration"))):
        yield from ((f"{module.__name__}.{name}", getattr(module, name)) for name in names)


def public_calls() -> Iterator[tuple[str, str]]:
    """Title and name of every public call; a class that is made by a call of its own has one named like itself."""
    for title, thing in public():
        if inspect.isclass(thing):
            if "__init__" in vars(thing):
                yield title, title.rpartition(".")[2]
            yield from ((title, name) for name, member in _members(thing) if not isinstance(member, property))
        elif callable(thing):
            yield title, title.rpartition(".")[2]


class _Raw:
    """An annotation that shows as it was written."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _section(title: str, thing: Any) -> str:
    name = title.rpartition(".")[2]
    if not callable(thing):
        entries = [_block(f"{name} = {thing!r}", "")]
    elif not inspect.isclass(thing):
        entries = [_entry(name, thing)]
    else:
        own = inspect.getdoc(thing) if "__doc__" in vars(thing) else ""
        made = _signature(thing) if "__init__" in vars(thing) else ""
        entries = [_block(f"{name}{made}", own or "")]
        entries += [_entry(member, found) for member, found in _members(thing)]
    return f"## {title}\n\n" + "\n".join(entries)


def _members(thing: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties that the class defines, in its order; then those of bases without a section."""
    bases = [base for base in thing.__mro__[1:] if base.__module__ in _PARTS]
    seen: set[str] = set()
    for kind in (thing, *bases):
        for name, member in vars(kind).items():
            public = isinstance(member, FunctionType | classmethod | staticmethod | property)
            if public and not name.startswith("_") and name not in seen:
                seen.add(name)
                yield name, member


def _entry(name: str, member: Any) -> str:
    if isinstance(member, property):
        return _block(name, inspect.getdoc(member) or "")
    function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
    kind = "async " if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function) else ""
    return _block(f"{kind}{name}{_signature(function)}", inspect.getdoc(function) or "")


def _signature(function: Any) -> str:
    signature = inspect.signature(function)
    kept = [
        each.replace(annotation=_raw(each.annotation))
        for name, each in signature.parameters.items()
        if name not in ("self", "cls")
    ]
    shown = str(signature.replace(parameters=kept, return_annotation=_raw(signature.return_annotation)))
    shown = re.sub(r"<(?:built-in )?function (\S+)(?: at \w+)?>", r"\1", shown)  # an address differs from run to run
    return re.sub(r"= Settings\(.*?\)(?=[,)])", "= DEFAULTS", shown).removesuffix(" -> None")


def _raw(annotation: Any) -> Any:
    return _Raw(annotation) if isinstance(annotation, str) else annotation


def _block(signature: str, docstring: str) -> str:
    """A signature and its docstring, whose lists of arguments and errors show as they are written."""
    lines = textwrap.wrap(signature, 112, subsequent_indent="        ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(["```text", *lines, *(["", docstring] if docstring else []), "```", ""])


def _errors() -> str:
    lines = ["## transport.errors\n", "| error | of | try again | what it says |", "|---|---|---|---|"]
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.TransportError):
            says = " ".join((kind.__doc__ or "").split()).partition(". ")[0].rstrip(".")
            base = "" if kind is errors.TransportError else f"`{kind.__mro__[1].__name__}`"
            lines.append(f"| `{kind.__name__}` | {base} | {'yes' if kind.retryable else 'no'} | {says} |")
    return "\n".join(lines) + "\n"
