"""Which releases of a framework fit: the first, the last, and what is said of the others."""

from __future__ import annotations

from importlib import metadata

import pytest

from transport.errors import MissingDependencyError
from transport.runtime.installing import install
from transport.runtime.releases import bounds, require_fitting


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(".")]


@pytest.mark.parametrize(
    "what", ["verl", "cosmos-rl", "TransferQueue", "vllm", "sglang", "ray", "torch", "torchrun", "tensordict"]
)
@pytest.mark.parametrize("at", ["before the first", "the first", "the last", "beyond"])
def test_a_release_that_does_not_fit_is_named_with_those_that_do(
    what: str, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, first, beyond = bounds(what)
    *before, last = numbers(first)
    *under, end = numbers(beyond or "1000")
    found = {
        "before the first": (*before, last - 1, 7),
        "the first": (*before, last, 0),
        "the last": (*under, end - 1, 99),
        "beyond": (*under, end, 0),
    }[at]
    text = ".".join(map(str, found))
    monkeypatch.setattr(metadata, "version", {name: text}.__getitem__)
    if at.startswith("the ") or (at == "beyond" and not beyond):
        require_fitting(what)
        return
    with pytest.raises(MissingDependencyError) as caught:
        require_fitting(what)
    said = str(caught.value)
    assert f"{name} {text}" in said
    assert install(what) in said
