"""The engine's options as YAML has them: other values where sets and bytes are meant."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from transport.config import Configuration
from transport.decoders import convert
from transport.errors import ConfigurationError
from transport.weights.options import EngineOptions

_OF_THE_ENGINE = {"name", "delta", "specs", "address", "device", "progress"}
_SECRETS = {"secret", "secret_file"}
_OF_YAML = frozenset(EngineOptions.__struct_fields__) - _SECRETS
KNOWN = sorted({*_OF_THE_ENGINE, *_OF_YAML, *_SECRETS, "tensors"})


def ring_arguments(engine_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `WeightsEngine`, of flat options.

    Fields of `EngineOptions` stand beside the engine's own arguments. ``wires`` may be a list or a comma-separated
    text, numbers may be texts (YAML reads 1e9 as one), ``secret`` may be a text; ``secret_file`` is read.

    Raises ConfigurationError, which names the option.
    """
    unknown = sorted(set(engine_kwargs) - set(KNOWN))
    if unknown:
        raise ConfigurationError(f"engine_kwargs: no option {', '.join(unknown)}; there are {', '.join(KNOWN)}")
    arguments = {name: value for name, value in engine_kwargs.items() if name in _OF_THE_ENGINE}
    further = {name: _plain(name, value) for name, value in engine_kwargs.items() if name in _OF_YAML}
    try:
        options = convert(further, EngineOptions, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"engine_kwargs: {error}") from None
    return {**arguments, "options": msgspec.structs.replace(options, secret=_secret(engine_kwargs))}


def _plain(name: str, value: Any) -> Any:
    if name == "wires" and isinstance(value, str):
        return [each.strip() for each in value.split(",") if each.strip()]
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return list(value)  # omegaconf's lists are none of Python's
    return value


def _secret(engine_kwargs: Mapping[str, Any]) -> bytes | None:
    secret, file = engine_kwargs.get("secret"), engine_kwargs.get("secret_file")
    if secret is not None and file is not None:
        raise ConfigurationError("engine_kwargs: give either secret or secret_file, not both")
    if file is not None:
        return Configuration(secret_file=str(file)).secret()
    if isinstance(secret, str):
        return secret.encode()
    if secret is not None and not isinstance(secret, bytes):  # its value is not shown
        raise ConfigurationError(f"engine_kwargs: secret is a {type(secret).__name__}; give a text, or a secret_file")
    return secret
