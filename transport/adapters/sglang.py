"""SGLang's custom weight loader: --custom-weight-loader transport.adapters.sglang.load

    named = [("payload_transport", address(meeting, "my_job:shards", version))]       # on the trainer
    engine.update_weights_from_tensor(named, load_format="transport.adapters.sglang.load")

One small tensor carries our address instead of weights. In every worker SGLang calls `load`, which receives the
worker's slices into its own parameters, while the trainer's ranks run `Meeting.update`. What a worker wants says a
function of yours, called with the model: it returns `RankShards`. Written from SGLang 0.5.23's signatures and tested
with a model of them.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from transport.devices.arrays import to_host
from transport.errors import ProtocolError, UsageError
from transport.runtime.arguments import expect, whole
from transport.weights.meeting import Meeting, Member, described


class _Address(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    meeting: Meeting
    shards: str
    version: int
    options: dict[str, Any] = {}


_members: dict[str, Member] = {}  # by function: a worker process has one model


def address(meeting: Meeting, shards: str, version: int, **options: Any) -> np.ndarray[Any, Any]:
    """A uint8 array for `update_weights_from_tensor` (torch.from_numpy makes a tensor of it).

    shards: "module:function" that exists in SGLang's workers. options: of `ShardEngine` there.
    """
    expect(meeting, Meeting, "meeting of address()", "a Meeting")
    expect(shards, str, "shards of address()", "module:function, as text")
    version = whole(version, "version of address()")
    try:
        text = msgspec.json.encode(_Address(meeting=meeting, shards=shards, version=version, options=options))
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"address(): {error}: give what JSON can hold") from error
    return np.frombuffer(text, np.uint8).copy()


def load(model: Any, named_tensors: list[tuple[str, Any]]) -> None:
    """What SGLang calls. Raises ProtocolError for what is not our address, and what `Meeting.update` raises."""
    if len(named_tensors) != 1:
        raise ProtocolError(f"{len(named_tensors)} tensors; give one, from transport.adapters.sglang.address")
    value = named_tensors[0][1]
    data = value if isinstance(value, np.ndarray) else to_host(value)
    try:
        found = msgspec.json.decode(data.tobytes(), type=_Address)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise ProtocolError(f"{named_tensors[0][0]} is not an address of transport.adapters.sglang: {error}") from error
    member = _members.get(found.shards)
    if member is None:
        member = _members[found.shards] = Member(described(found.shards, model), sends=False, **found.options)
    found.meeting.update(member, found.version)


def close() -> None:
    """Release what `load` has opened in this process. Idempotent."""
    while _members:
        _members.popitem()[1].close()
