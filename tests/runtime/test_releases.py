"""Which releases of a framework fit: the first, the last, and what is said of the others."""

from __future__ import annotations

from importlib import metadata

import pytest

from transport.errors import MissingDependencyError
from transport.runtime.releases import FITS, require_fitting


@pytest.mark.parametrize("framework", ["verl", "cosmos-rl"])
@pytest.mark.parametrize("at", ["before the first", "the first", "the last", "beyond"])
def test_a_release_that_does_not_fit_is_named_with_those_that_do(
    framework: str, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, beyond = FITS[framework]
    found = {
        "before the first": (*first[:-1], first[-1] - 1, 7),
        "the first": (*first, 0),
        "the last": (*beyond[:-1], beyond[-1] - 1, 99),
        "beyond": (*beyond, 0),
    }[at]
    text = ".".join(map(str, found))
    monkeypatch.setattr(metadata, "version", {framework: text}.__getitem__)
    if at.startswith("the "):
        require_fitting(framework)
        return
    with pytest.raises(MissingDependencyError) as caught:
        require_fitting(framework)
    first_text, beyond_text = (".".join(map(str, each)) for each in (first, beyond))
    assert str(caught.value) == (
        f"{framework} {text} does not fit this adapter: it needs {first_text} or newer, below {beyond_text}: "
        f"pip install '{framework}>={first_text},<{beyond_text}'"
    )
