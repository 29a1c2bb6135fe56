"""cosmos-rl's RLPayload, Rollout, RolloutResult and messages as payloads and back, equal with types."""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("cosmos_rl") is None or importlib.util.find_spec("torch") is None:
    pytest.skip("cosmos-rl is not installed: pip install cosmos-rl", allow_module_level=True)

with warnings.catch_warnings():  # of what cosmos-rl imports
    warnings.simplefilter("ignore")
    import sameness
    import torch
    from cosmos_rl.dispatcher.data.schema import ChatMessage, RLPayload, Rollout
    from cosmos_rl.rollout.schema import RolloutResult

from transport import BlockingClient, SharedRingBuffer
from transport.adapters.cosmos_rl.structures import payload_of, structure_of
from transport.errors import PayloadDamagedError, SchemaError, UsageError

pytestmark = pytest.mark.ucx

TALK = [
    ChatMessage(role="user", content="Was ist 2 + 2?"),
    ChatMessage(role="assistant", content=[{"type": "text", "text": "4"}, {"type": "image", "url": "x"}]),
]
STRUCTURES = [
    RLPayload(
        prompt=TALK[:1],
        prompt_idx=7,
        conversation=TALK[:1],
        completions=["4", "vier"],
        completed_conversations=[TALK, TALK],
        rewards=[1.0, 0.5],
        completion_logprobs=[[[-0.5], [-1.25]], [[-2.0]]],
        completion_token_ids=[[[1], [2]], [[3]]],
        completion_drop_reasons=[None, "too long"],
        completion_sequences=[4, 5],
        extra_info={"tools": ("sum", None), "grid": np.arange(6, dtype=np.int16).reshape(2, 3)},
    ),
    RLPayload(),
    RLPayload(prompt=None, valid=None),
    RLPayload(prompt={"any": "thing"}, completions=[{"text": "a", "tokens": [1, 2]}]),
    Rollout(prompt="p", completion="c", completed_conversation=TALK, reward=0.5, advantage=-1.0, is_end=True),
    RolloutResult(prompt=TALK, completions=["a"], cumulative_logprob=[-3.5], extra_info={}),
    TALK[0],
    TALK[1],
]


def parts(value: Any) -> Any:
    """Of pydantic's models."""
    if not hasattr(value, "model_fields_set"):
        return None
    return [sorted(value.model_fields_set), dict(sorted(value.__dict__.items()))]


def same(one: Any, other: Any) -> None:
    """Fail unless both are equal, with the same fields set, of the same types."""
    sameness.same(one, other, parts)


@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda each: type(each).__name__)
def test_structures_come_back_equal_with_types(ring: SharedRingBuffer, client: BlockingClient, structure: Any) -> None:
    with client.read(ring.write(payload_of(structure))) as payload:
        back = structure_of(payload)
    same(back, structure)


def test_tensors_in_them_come_back_as_tensors(ring: SharedRingBuffer, client: BlockingClient) -> None:
    result = RolloutResult(
        completions=torch.ones(2, 3, dtype=torch.bfloat16), extra_info={"video": [torch.zeros(4, 1)]}
    )
    with client.read(ring.write(payload_of(result))) as payload:
        back = structure_of(payload)
    same(back, result)
    back.completions += 1  # its memory is its own


def test_some_fields_are_the_structure_with_defaults(ring: SharedRingBuffer, client: BlockingClient) -> None:
    ticket = ring.write(payload_of(STRUCTURES[0]))
    with client.read(ticket, fields=("rewards", "completions", "structure")) as payload:
        back = structure_of(payload)
    same(back, RLPayload(completions=["4", "vier"], rewards=[1.0, 0.5]))


def test_a_message_that_was_changed_without_validation_comes_back(
    ring: SharedRingBuffer, client: BlockingClient
) -> None:
    changed = RLPayload()
    changed.rewards = [2.0]
    changed.training_rejected_slots.append(3)  # a default that was changed in place
    with client.read(ring.write(payload_of(changed))) as payload:
        same(structure_of(payload), changed)


class Derived(RLPayload):
    """A class of the job's own."""


def test_what_cannot_travel_is_named(ring: SharedRingBuffer) -> None:
    for wrong in ({"prompt": 1}, Derived(), "text"):
        with pytest.raises(SchemaError, match="expected one of ChatMessage, RLPayload"):
            payload_of(wrong)
    with pytest.raises(SchemaError, match=r"prompt\[1\]: a Derived cannot be sent"):
        ring.write(payload_of(RLPayload(prompt=[1, Derived()])))
    assert ring.statistics().free == 8


def test_other_and_hostile_payloads_are_refused() -> None:
    for wrong in ({"x": 1}, {"structure": {"is": "DataProto", "marks": []}}, {"structure": 3}):
        with pytest.raises(UsageError, match="none of cosmos-rl's structures"):
            structure_of(wrong)
    for marks in ([["os", "prompt"]], [["ChatMessage", "prompt"]], [["RLPayload", "prompt", "x"]]):
        hostile = {"prompt": "a", "structure": {"is": "RLPayload", "marks": marks, "given": ["prompt"]}}
        with pytest.raises(PayloadDamagedError):
            structure_of(hostile)
