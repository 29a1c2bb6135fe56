"""Turns: whatever comes back, whoever stops waiting, the line is served in its order and nothing stays unused."""

from __future__ import annotations

import asyncio
import random

import pytest
from helpers import asynchronous

from transport.runtime.turns import Turns


class Seats:
    """Of which there are a few; who has one holds it for some turns of the loop."""

    def __init__(self, count: int) -> None:
        self.free = count
        self.turns = Turns()
        self.served: list[int] = []

    def take(self) -> bool | None:
        if not self.free:
            return None
        self.free -= 1
        return True

    async def use(self, number: int, for_turns: int) -> None:
        await self.turns.wait(self.take)
        self.served.append(number)
        try:
            for _ in range(for_turns):
                await asyncio.sleep(0)
        finally:
            self.free += 1
            self.turns.look()


@pytest.mark.parametrize("seed", range(20))
@asynchronous
async def test_all_are_served_in_their_order_whoever_stops_waiting(seed: int) -> None:
    chance = random.Random(seed)
    seats = Seats(chance.randint(1, 4))
    users: list[asyncio.Task[None]] = []
    for number in range(200):
        users.append(asyncio.create_task(seats.use(number, chance.randint(0, 3))))
        for _ in range(chance.randint(0, 2)):
            await asyncio.sleep(0)
        if chance.random() < 0.3:
            chance.choice(users).cancel()
    await asyncio.gather(*users, return_exceptions=True)
    assert seats.served == sorted(seats.served)
    assert {number for number, user in enumerate(users) if not user.cancelled()} <= set(seats.served)
    assert seats.turns.waiting == 0


@asynchronous
async def test_an_error_of_who_tries_is_its_own_and_the_next_one_tries() -> None:
    closed = False

    def take() -> None:
        if closed:
            raise LookupError

    turns = Turns()
    waiting = [asyncio.create_task(turns.wait(take)) for _ in range(3)]
    await asyncio.sleep(0)
    assert turns.waiting == 3
    closed = True
    turns.look()
    assert [type(each) for each in await asyncio.gather(*waiting, return_exceptions=True)] == [LookupError] * 3
