"""SGLang's custom weight loader: --custom-weight-loader transport.adapters.sglang.load

    def call(phase):                                               # on the trainer that makes SGLang's calls
        named = [("payload_transport", torch.from_numpy(address(barrier, "my_job:shards", version, phase)))]
        engine.begin_weight_update()
        engine.update_weights_from_tensor(named, "transport.adapters.sglang.load", flush_cache=phase == "commit")
        engine.end_weight_update()

    barrier.stage(member, version, lambda: call("stage"))          # on its other ranks without the call
    barrier.commit(member, version, lambda: call("commit"))

One small tensor carries our address instead of weights. In every worker SGLang calls `load`: "stage" begins to receive
the worker's slices beside its weights and returns, so that it generates meanwhile; "commit" copies them into its own
parameters, and calls the model's `post_load_weights`. What a worker wants says a function of yours, called with the
model: it returns `RankShards`. SGLang runs the calls between two of its steps, after `pause_generation` in the mode of
your choice, or once no request is running.
"""

from __future__ import annotations

import logging
import operator
from functools import partial
from typing import Any, Literal

import msgspec
import numpy as np

from transport.decoders import json_decoder
from transport.devices.arrays import to_host
from transport.errors import ProtocolError, UsageError
from transport.runtime.releases import require_fitting
from transport.weights.barrier import UpdateBarrier
from transport.weights.barrier_rank import BarrierRank
from transport.weights.rank_shards import RankShards, copied_into, described

log = logging.getLogger(__name__)

Phase = Literal["stage", "commit"]


class _Address(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    barrier: UpdateBarrier
    shards: str
    version: int
    phase: Phase
    options: dict[str, Any] = {}


_members: dict[str, tuple[Any, BarrierRank]] = {}  # by function: a worker process has one model that takes part


def address(barrier: UpdateBarrier, shards: str, version: int, phase: Phase, **options: Any) -> np.ndarray[Any, Any]:
    """Return a uint8 array for `update_weights_from_tensor` (torch.from_numpy makes a tensor of it).

    Args:
        shards: "module:function" that exists in SGLang's workers.
        options: of `WeightsEngine` there.
    """
    version = operator.index(version)
    try:
        found = _Address(barrier=barrier, shards=shards, version=version, phase=phase, options=options)
        return np.frombuffer(msgspec.json.encode(found), np.uint8).copy()
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"address(): {error}: give what JSON can hold") from error


def load(model: Any, named_tensors: list[tuple[str, Any]]) -> None:
    """Load a version; SGLang calls this. An error is logged, and the trainer's `UpdateBarrier` raises it.

    SGLang ends its server for an error of a loader, so it gets one only where the weights are a mixture: a load failed,
    and the version before could not be loaded again.
    """
    member: BarrierRank | None = None
    try:
        found = _found(named_tensors)
        if found.shards not in _members:
            rank = described(found.shards, model)
            made = BarrierRank(rank, sends=False, load=partial(_loaded, model, rank), **found.options)
            _members[found.shards] = model, made
        owner, member = _members[found.shards]
        if owner is not model:
            log.warning("a second model of this process, a draft, gets no weights by %s", found.shards)
        elif found.phase == "stage":
            found.barrier.begin(member, found.version)
        else:
            found.barrier.commit(member, found.version)
    except Exception as error:  # SGLang ends its server on what a loader raises: only a mixture is worth that
        if member is not None and member.mixed:
            raise
        log.error("the weights are as before: %s: %s", type(error).__name__, error)


def _found(named_tensors: list[tuple[str, Any]]) -> _Address:
    require_fitting("sglang")
    if len(named_tensors) != 1:
        raise ProtocolError(f"{len(named_tensors)} tensors; give one, from transport.adapters.sglang.address")
    value = named_tensors[0][1]
    data = value if isinstance(value, np.ndarray) else to_host(value)
    try:
        return json_decoder(_Address)(data.tobytes())
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise ProtocolError(f"{named_tensors[0][0]} is not an address of transport.adapters.sglang: {error}") from error


def _loaded(model: Any, rank: RankShards, arrays: dict[str, Any]) -> None:
    if not callable(rank.tensors):
        copied_into(rank.tensors, arrays)
    if hasattr(model, "post_load_weights"):  # what the model derives from its parameters (DeepSeek's w_kc, w_vc)
        model.post_load_weights()


def close() -> None:
    """Release what `load` has opened in this process. Idempotent."""
    while _members:
        _members.popitem()[1][1].close()
