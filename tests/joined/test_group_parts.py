"""A pair of samples of one group: both their ranks of the common part are acknowledged with the pair."""

from __future__ import annotations

import pytest

from transport import BlockingClient, Schema, SharedRingBuffer, UpTo
from transport.errors import StaleSlotError
from transport.joined import PARENTS, Parent, read_joined, with_parents

PROMPT = Schema.of(prompt=("text", UpTo(64)))
SAMPLE = Schema.of(score="float32", parents=PARENTS)
PAIR = Schema.of(margin="float32", parents=PARENTS)
SCHEMAS = [PROMPT, SAMPLE, PAIR]


def test_a_payload_that_two_paths_lead_to_by_different_ranks_is_freed() -> None:
    with (
        SharedRingBuffer.create(PROMPT, slots=2) as prompts,
        SharedRingBuffer.create(SAMPLE, slots=4) as samples,
        SharedRingBuffer.create(PAIR, slots=2) as pairs,
        BlockingClient(schemas=SCHEMAS, ack="manual") as client,
    ):
        common = prompts.write({"prompt": "Why?"}, readers=2)
        tickets = [
            samples.write(with_parents({"score": rank}, [Parent(common, rank)]), casting="unsafe") for rank in (0, 1)
        ]
        pair = pairs.write(with_parents({"margin": 1}, tickets), casting="unsafe")
        payload = read_joined(client, pair, fields=("margin", "prompt"))
        assert payload["prompt"] == "Why?"
        payload.ack()
        payload.release()
        assert [ring.statistics().free for ring in (prompts, samples, pairs)] == [2, 4, 2]


def test_an_error_of_the_payload_itself_is_not_its_own_cause() -> None:
    with SharedRingBuffer.create(PROMPT, slots=2) as ring, BlockingClient(schemas=SCHEMAS, ack="manual") as client:
        ticket = ring.write({"prompt": "Why?"})
        ring.discard(ticket)
        with pytest.raises(StaleSlotError) as caught:
            read_joined(client, ticket)
        assert caught.value.__cause__ is not caught.value
