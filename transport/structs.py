"""Record types made ready for threads."""

from __future__ import annotations

import msgspec


def ready(*kinds: type[msgspec.Struct]) -> None:
    """Have msgspec examine record types now, for modules to call at their import, which one thread does.

    It examines a type at its first use, and remembers it before it has examined the types of its fields. A second
    thread that decodes meanwhile finds it half done, and the process crashes (msgspec 0.22).
    """
    for kind in kinds:
        msgspec.json.Decoder(kind)
