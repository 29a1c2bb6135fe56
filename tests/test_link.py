"""The client's side of a connection, against an endpoint that says what the test wants."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from scripted_endpoint import ScriptedEndpoint, ScriptedWorker, scenario

from transport import errors, link, wire
from transport.authentication import proof
from transport.errors import (
    AuthenticationError,
    BusyError,
    ClosedError,
    ConnectionLostError,
    InternalError,
    LengthMismatchError,
    LinkError,
    ProtocolError,
    RankError,
    ReadTimeoutError,
    RefusedError,
    StaleSlotError,
    TransportError,
    UnreachableError,
    VersionMismatchError,
    WrongKeyError,
    WrongRingError,
)
from transport.link import Link, Want, new_tag_base, refusal
from transport.settings import Settings
from transport.ticket import Ticket
from transport.wire import Answer, Challenge, Hello, Kind, Proof, Record, Welcome

RING = "1f" * 16
OURS, THEIRS = 0x11111111, 0x22222222
INLINE = 100  # the largest payload that rides in the answer
LISTENER_NONCE = bytes(range(16))


def ticket(size: int, slot: int = 3) -> Ticket:
    return Ticket(
        ring=RING, host="host", addresses=(), ports=(), slot=slot, generation=7, key=99, size=size, created=0.0
    )


def want(size: int, slot: int = 3, rank: int = 0) -> Want:
    return Want(ticket(size, slot), rank, memoryview(bytearray(size)))


def welcome(**changes: Any) -> Welcome:
    return Welcome(
        **{"version": 1, "ring": RING, "tag_base": THEIRS, "ports": (5, 6), "inline_limit": INLINE, **changes}
    )


def ack(slot: int = 1) -> Record:
    return Record(Kind.ACK, slot=slot, generation=2, rank=0, key=3)


def our_tag(number: int, part: int = 0) -> int:
    return wire.tag(OURS, number, part)


def opening(endpoint: ScriptedEndpoint, **options: Any) -> Any:
    settings = Settings(**options.pop("settings", {}))
    arguments: dict[str, Any] = {"ring": RING, "tag_base": OURS, "secret": None, "settings": settings, **options}
    return Link.open(ScriptedWorker(endpoint), "host", 5, **arguments)  # type: ignore[arg-type]


async def opened(endpoint: ScriptedEndpoint, **options: Any) -> Link:
    endpoint.say(welcome())
    made: Link = await opening(endpoint, **options)
    endpoint.log.clear()
    return made


class Listening:
    """The other side: answers each message by a script."""

    def __init__(self, endpoint: ScriptedEndpoint, *answers: Any, payloads: dict[int, bytes] | None = None) -> None:
        self.endpoint = endpoint
        self.answers = answers
        self.payloads = payloads or {}
        self.number: int | None = None  # of the answer; None: that of the message
        self.messages: list[tuple[int, list[Record]]] = []
        endpoint.on_send = self._asked

    def _asked(self, tag: int, data: Any) -> None:
        number, records = wire.decode_control(data)
        assert tag == wire.tag(THEIRS, number)
        self.messages.append((number, records))
        if not self.answers:
            return
        answered = number if self.number is None else self.number
        self.endpoint.deliver(our_tag(number), wire.encode_status(answered, list(self.answers)))
        for index, data in self.payloads.items():
            self.endpoint.deliver(our_tag(number, 1 + index), data)


def inline(index: int, data: bytes, checksum: int | None = 5) -> Answer:
    return Answer(0, index, len(data), checksum, 0, memoryview(data))


# --- handshake -------------------------------------------------------------------------------------
@scenario
async def test_opening_says_hello_and_takes_what_the_listener_says() -> None:
    endpoint = ScriptedEndpoint("host:5")
    task = asyncio.ensure_future(opening(endpoint))
    hello = await endpoint.heard(Hello)
    assert (hello.oldest, hello.newest, hello.ring, hello.tag_base) == (1, 1, RING, OURS)
    assert len(hello.nonce) == 16
    endpoint.say(welcome())
    made = await task
    assert (made.ring, made.ports, made.wire, made.next_number) == (RING, (5, 6), "tcp", 0)
    assert made.usable
    assert made.transports() == [("tcp", "lo")]
    assert [made.is_inline(size) for size in (0, INLINE, INLINE + 1)] == [True, True, False]
    assert "host:5" in repr(made)
    assert not endpoint.aborted


@scenario
async def test_each_hello_has_a_nonce_of_its_own() -> None:
    nonces = set()
    for _ in range(3):
        endpoint = ScriptedEndpoint()
        await opened(endpoint)
        nonces.add((await endpoint.heard(Hello)).nonce)
    assert len(nonces) == 3


@scenario
async def test_a_handshake_that_comes_in_pieces_is_understood() -> None:
    endpoint = ScriptedEndpoint()
    task = asyncio.ensure_future(opening(endpoint))
    await endpoint.heard(Hello)
    for byte in wire.encode_handshake(welcome()):
        endpoint.feed(bytes((byte,)))
        await asyncio.sleep(0)
    assert (await task).ring == RING


async def challenged(endpoint: ScriptedEndpoint, secret: bytes | None, listeners: bytes) -> tuple[Any, bytes]:
    """A link being opened, and the nonce of its hello; the listener has sent its challenge."""
    task = asyncio.ensure_future(opening(endpoint, secret=secret))
    nonce = (await endpoint.heard(Hello)).nonce
    endpoint.say(Challenge(LISTENER_NONCE, proof(listeners, "listener", nonce, LISTENER_NONCE)))
    return task, nonce


@scenario
async def test_both_sides_prove_the_secret() -> None:
    endpoint = ScriptedEndpoint()
    task, nonce = await challenged(endpoint, b"secret", b"secret")
    answer = await endpoint.heard(Proof)
    assert answer.proof == proof(b"secret", "client", nonce, LISTENER_NONCE)
    endpoint.say(welcome())
    assert (await task).ring == RING


@scenario
async def test_a_client_without_the_secret_is_told_so() -> None:
    endpoint = ScriptedEndpoint()
    task, _ = await challenged(endpoint, None, b"secret")
    with pytest.raises(AuthenticationError, match="given none"):
        await task
    assert endpoint.aborted


@scenario
async def test_a_listener_with_another_secret_is_refused_and_learns_nothing() -> None:
    endpoint = ScriptedEndpoint()
    task, _ = await challenged(endpoint, b"secret", b"other")
    with pytest.raises(AuthenticationError, match="does not have the shared secret"):
        await task
    assert endpoint.aborted
    assert endpoint.log.count(("send_stream",)) == 1  # the hello, no proof


@scenario
async def test_a_listener_that_mirrors_the_clients_side_is_refused() -> None:
    endpoint = ScriptedEndpoint()
    task = asyncio.ensure_future(opening(endpoint, secret=b"secret"))
    nonce = (await endpoint.heard(Hello)).nonce
    # what another client, asked with these nonces, would have answered
    endpoint.say(Challenge(LISTENER_NONCE, proof(b"secret", "client", nonce, LISTENER_NONCE)))
    with pytest.raises(AuthenticationError):
        await task
    assert endpoint.aborted


@scenario
async def test_a_proof_for_another_hello_is_refused() -> None:
    endpoint = ScriptedEndpoint()
    task = asyncio.ensure_future(opening(endpoint, secret=b"secret"))
    await endpoint.heard(Hello)
    endpoint.say(Challenge(LISTENER_NONCE, proof(b"secret", "listener", bytes(16), LISTENER_NONCE)))
    with pytest.raises(AuthenticationError):
        await task


@scenario
async def test_a_listener_that_does_not_prove_is_refused() -> None:
    endpoint = ScriptedEndpoint()
    endpoint.say(welcome())
    with pytest.raises(AuthenticationError, match="did not prove"):
        await opening(endpoint, secret=b"secret")
    assert endpoint.aborted


@scenario
async def test_a_listener_that_refuses_need_not_prove() -> None:
    endpoint = ScriptedEndpoint()
    endpoint.say(welcome(code=8, reason="full"))
    with pytest.raises(BusyError, match="full"):
        await opening(endpoint, secret=b"secret")


CODES: dict[int, type[TransportError]] = {
    1: StaleSlotError,
    2: WrongKeyError,
    3: WrongRingError,
    4: VersionMismatchError,
    5: AuthenticationError,
    6: RankError,
    7: LengthMismatchError,
    8: BusyError,
    9: ProtocolError,
}


@pytest.mark.parametrize("code", [*CODES, 77, -1])
@scenario
async def test_a_refusal_in_the_handshake_has_its_class_and_reason(code: int) -> None:
    endpoint = ScriptedEndpoint("host:5")
    endpoint.say(welcome(code=code, reason="because of this"))
    with pytest.raises(TransportError, match="host:5: because of this") as caught:
        await opening(endpoint)
    assert type(caught.value) is CODES.get(code, RefusedError)
    assert endpoint.aborted


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (wire.encode_handshake(Proof(b"p")), ProtocolError),
        (wire.encode_handshake(Hello(1, 1, RING, 1, b"")), ProtocolError),
        (b"\x02" + wire.encode_handshake(welcome())[1:], VersionMismatchError),
        (b"\x01\x04\0\0\x02\0\0\0\xff\xff", ProtocolError),
        (b"\x01\x04\0\0\0\0\0\0", ProtocolError),
        (b"\x01\x04\0\0\xff\xff\xff\xff", ProtocolError),
        (b"GET / HTTP/1.1\r\n", VersionMismatchError),
    ],
    ids=["proof", "hello", "other version", "garbage body", "empty body", "too long", "another protocol"],
)
@scenario
async def test_a_handshake_that_makes_no_sense_is_refused(answer: bytes, error: type[TransportError]) -> None:
    endpoint = ScriptedEndpoint()
    endpoint.feed(answer)
    with pytest.raises(error):
        await opening(endpoint)
    assert endpoint.aborted


@scenario
async def test_a_second_challenge_is_refused() -> None:
    endpoint = ScriptedEndpoint()
    task, nonce = await challenged(endpoint, b"secret", b"secret")
    await endpoint.heard(Proof)
    endpoint.say(Challenge(LISTENER_NONCE, proof(b"secret", "listener", nonce, LISTENER_NONCE)))
    with pytest.raises(ProtocolError, match="CHALLENGE"):
        await task
    assert endpoint.aborted


@scenario
async def test_a_listener_that_says_nothing_is_given_up_and_the_endpoint_aborted() -> None:
    endpoint = ScriptedEndpoint()
    with pytest.raises(ReadTimeoutError, match="host:5"):
        await opening(endpoint, settings={"connect_timeout_s": 0.01, "handshake_timeout_s": 0.01})
    assert endpoint.aborted


@scenario
async def test_opening_that_is_cancelled_aborts_the_endpoint() -> None:
    endpoint = ScriptedEndpoint()
    task = asyncio.ensure_future(opening(endpoint))
    await endpoint.heard(Hello)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert endpoint.aborted


@scenario
async def test_a_connection_that_breaks_in_the_handshake_is_lost() -> None:
    endpoint = ScriptedEndpoint()
    task = asyncio.ensure_future(opening(endpoint))
    await endpoint.heard(Hello)
    endpoint.lose()
    with pytest.raises(ConnectionLostError):
        await task
    assert endpoint.aborted


@scenario
async def test_nobody_there_is_what_the_worker_says() -> None:
    class Nowhere:
        async def connect(self, host: str, port: int) -> Any:
            raise UnreachableError("no route")

    with pytest.raises(UnreachableError, match="no route"):
        await Link.open(
            Nowhere(),  # type: ignore[arg-type]
            "host",
            5,
            ring=RING,
            tag_base=OURS,
            secret=None,
            settings=Settings(),
        )


# --- reading ---------------------------------------------------------------------------------------
@scenario
async def test_receives_are_posted_before_the_request_is_sent() -> None:
    endpoint = ScriptedEndpoint()
    made = await opened(endpoint)
    Listening(endpoint, inline(1, b"a" * 10), Answer(0, 2, 101), payloads={2: b"b" * 101})
    await made.read([want(10), want(101)], [ack()])
    assert endpoint.log == [("receive", our_tag(0)), ("receive", our_tag(0, 3)), ("send", wire.tag(THEIRS, 0))]


@scenario
async def test_payloads_go_straight_into_their_destinations() -> None:
    endpoint = ScriptedEndpoint()
    made = await opened(endpoint)
    wants = [want(INLINE), want(INLINE + 1), want(0), want(5)]
    listening = Listening(
        endpoint,
        inline(0, b"a" * INLINE),
        Answer(0, 1, INLINE + 1, 6),
        inline(2, b"", None),
        inline(3, b"dddde"),
        payloads={1: b"b" * (INLINE + 1)},
    )
    number, results = await made.read(wants, [])
    assert number == 0
    assert [bytes(each.destination) for each in wants] == [b"a" * INLINE, b"b" * (INLINE + 1), b"", b"dddde"]
    assert [result.checksum for result in results if isinstance(result, Answer)] == [5, 6, None, 5]
    assert not endpoint.posted
    assert listening.messages == [
        (0, [Record(Kind.READ, 3, 7, 0, 99, size) for size in (INLINE, INLINE + 1, 0, 5)]),
    ]


@scenario
async def test_acknowledgements_ride_in_front_and_shift_the_parts() -> None:
    endpoint = ScriptedEndpoint()
    made = await opened(endpoint)
    large = want(200, slot=9, rank=4)
    listening = Listening(endpoint, Answer(0, 2, 200), payloads={2: b"x" * 200})
    await made.read([large], [ack(1), ack(2)])
    assert listening.messages == [(0, [ack(1), ack(2), Record(Kind.READ, 9, 7, 4, 99, 200)])]
    assert large.destination == b"x" * 200


@scenario
async def test_message_numbers_count_and_no_tag_comes_twice() -> None:
    endpoint = ScriptedEndpoint()  # fails a tag that is used twice
    made = await opened(endpoint)
    listening = Listening(endpoint, inline(0, b"a"))
    assert [(await made.read([want(1)], []))[0] for _ in range(3)] == [0, 1, 2]
    listening.answers = ()
    assert made.tell([ack()]) == 3
    listening.answers = (Answer(0, 0),)
    assert (await made.ask(Record(Kind.STATE)))[0] == 4
    assert [number for number, _ in listening.messages] == [0, 1, 2, 3, 4]
    assert made.next_number == 5


@scenario
async def test_a_payload_that_comes_after_its_status_is_waited_for() -> None:
    endpoint = ScriptedEndpoint()
    made = await opened(endpoint)
    Listening(endpoint, Answer(0, 0, 200))
    large = want(200)
    task = asyncio.ensure_future(made.read([large], []))
    await endpoint.arrival(wire.tag(THEIRS, 0))
    await asyncio.sleep(0)
    assert not task.done()
    endpoint.deliver(our_tag(0, 1), b"y" * 200)
    await task
    assert large.destination == b"y" * 200


@pytest.mark.parametrize("code", [*CODES, 77])
@scenario
async def test_a_refused_payload_has_its_class_and_the_others_arrive(code: int) -> None:
    endpoint = ScriptedEndpoint()
    made = await opened(endpoint)
    Listening(endpoint, inline(0, b"a"), Answer(code, 1), Answer(code, 2), Answer(0, 3, 200), payloads={3: b"z" * 200})
    wants = [want(1), want(300), want(2), want(200)]
    _, results = await made.read(wants, [])
    assert [type(result) for result in results] == [Answer, *[CODES.get(code, ProtocolError)] * 2, Answer]
    assert wants[1].ticket.name in str(results[1])
    assert endpoint.withdrawn == [our_tag(0, 2)]  # the refused payload that would have come by itself
    assert wants[3].destination == b"z" * 200
    assert not endpoint.posted
    assert made.usable


def test_every_error_that_travels_has_a_code_of_its_own_and_comes_back_as_itself() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, TransportError)]
    travelling = {kind.status: kind for kind in kinds if kind.status}
    assert len(travelling) == sum(1 for kind in kinds if kind.status)
    assert travelling == CODES
    for code, kind in travelling.items():
        error = refusal(code, "payload x")
        assert type(error) is kind
        assert str(error).startswith("payload x: ")


def test_an_unknown_code_is_named() -> None:
    error = refusal(77, "payload x")
    assert type(error) is ProtocolError
    assert "77" in str(error)


# --- a listener that does not keep to the protocol -----------------------------------------------------
async def refused_read(answers: list[Answer], wants: list[Want], error: type[TransportError], **options: Any) -> None:
    endpoint = ScriptedEndpoint()
    made = await opened(endpoint)
    listening = Listening(endpoint, *answers)
    listening.number = options.get("number")
    with pytest.raises(error):
        await made.read(wants, [])
    # The destinations go back to their owner now: nothing may be received into them any more.
    assert endpoint.aborted
    assert not endpoint.posted
    assert not made.usable


@scenario
async def test_an_answer_to_another_message_is_refused() -> None:
    await refused_read([inline(0, b"a"), Answer(0, 1, 200)], [want(1), want(200)], ProtocolError, number=1)


@pytest.mark.parametrize("count", [1, 3])
@scenario
async def test_too_few_or_too_many_answers_are_refused(count: int) -> None:
    await refused_read([Answer(1, index) for index in range(count)], [want(100), want(200)], TransportError)


@pytest.mark.parametrize(
    "answer",
    [inline(0, b"abcd"), inline(0, b""), Answer(0, 0, 3), Answer(0, 0, 3, None, 0, None)],
    ids=["too long", "too short", "not inline", "nothing"],
)
@scenario
async def test_an_inline_payload_of_another_length_is_refused(answer: Answer) -> None:
    small = want(3)
    # the other want makes the buffer large enough for what is too long
    await refused_read([answer, inline(1, b"x")], [small, want(50)], LengthMismatchError)
    assert bytes(small.destination) == bytes(3)


@pytest.mark.parametrize(
    "answer",
    [Answer(0, 1, 199), Answer(0, 1, 201), inline(1, b"b" * 50)],
    ids=["shorter", "longer", "inline"],
)
@scenario
async def test_a_separate_payload_of_another_length_is_refused(answer: Answer) -> None:
    await refused_read([inline(0, b"a" * 60), answer], [want(60), want(200)], TransportError)


@pytest.mark.parametrize("status", [b"", b"garbage that is no status message", b"\x01\x11\xff\xff" + bytes(12)])
@scenario
async def test_a_status_that_is_garbage_is_refused(status: bytes) -> None:
    endpoint = ScriptedEndpoint()
    made = await opened(endpoint)
    endpoint.on_send = lambda tag, data: endpoint.deliver(our_tag(0), status)
    with pytest.raises(ProtocolError):
        await made.read([want(1), want(200)], [])
    assert endpoint.aborted
    assert not endpoint.posted


@scenario
async def test_a_status_larger_than_due_is_refused() -> None:
    await refused_read([inline(0, b"a" * 50)], [want(1)], TransportError)


# --- when it breaks --------------------------------------------------------------------------------------
@scenario
async def test_a_connection_that_breaks_fails_the_read() -> None:
    endpoint = ScriptedEndpoint()
    made = await opened(endpoint)
    task = asyncio.ensure_future(made.read([want(200)], []))
    await endpoint.arrival(wire.tag(THEIRS, 0))
    endpoint.lose()
    with pytest.raises(ConnectionLostError):
        await task
    assert not made.usable


@scenario
async def test_a_connection_that_breaks_after_the_status_fails_the_read() -> None:
    endpoint = ScriptedEndpoint()
    made = await opened(endpoint)
    Listening(endpoint, Answer(0, 0, 200), Answer(0, 1, 300), payloads={0: b"a" * 200})
    task = asyncio.ensure_future(made.read([want(200), want(300)], []))
    await endpoint.arrival(wire.tag(THEIRS, 0))
    endpoint.lose()
    with pytest.raises(LinkError):
        await task


@scenario
async def test_a_read_that_is_cancelled_leaves_no_receive_into_the_destination() -> None:
    endpoint = ScriptedEndpoint()
    made = await opened(endpoint)
    task = asyncio.ensure_future(made.read([want(200)], []))
    await endpoint.arrival(wire.tag(THEIRS, 0))
    assert endpoint.posted == {our_tag(0), our_tag(0, 1)}
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert endpoint.aborted
    assert not endpoint.posted
    assert not made.usable


@scenario
async def test_a_link_that_was_aborted_starts_nothing() -> None:
    endpoint = ScriptedEndpoint()
    made = await opened(endpoint)
    made.abort()
    made.abort()
    assert endpoint.log == [("abort",)]
    assert not made.usable
    with pytest.raises(ClosedError):
        await made.read([want(1)], [])
    with pytest.raises(ClosedError):
        made.tell([ack()])


@scenario
async def test_a_failed_send_shows_at_the_answer_only() -> None:
    endpoint = ScriptedEndpoint()
    made = await opened(endpoint)
    endpoint.hold = lambda tag: True
    made.tell([ack()])
    endpoint.lose()  # an exception that nobody retrieves would be logged, and a warning fails the test
    assert not made.usable


# --- the rest ----------------------------------------------------------------------------------------------
@scenario
async def test_telling_waits_for_nothing() -> None:
    endpoint = ScriptedEndpoint()
    made = await opened(endpoint)
    listening = Listening(endpoint)
    endpoint.hold = lambda tag: True
    records = [ack(1), Record(Kind.DISCARD, 4, 5, 0, 6)]
    assert made.tell(records) == 0
    assert listening.messages == [(0, records)]
    assert endpoint.log == [("send", wire.tag(THEIRS, 0))]  # and nothing is received for it
    endpoint.release()


@scenario
async def test_asking_returns_the_answer_and_carries_acknowledgements() -> None:
    endpoint = ScriptedEndpoint()
    made = await opened(endpoint)
    listening = Listening(endpoint, Answer(0, 1, value=2))
    number, answer = await made.ask(Record(Kind.STATE, 1, 2, 3, 4), [ack()])
    assert (number, answer.value) == (0, 2)
    assert listening.messages == [(0, [ack(), Record(Kind.STATE, 1, 2, 3, 4)])]
    assert endpoint.log[0] == ("receive", our_tag(0))


@scenario
async def test_asking_refuses_an_answer_to_another_message() -> None:
    endpoint = ScriptedEndpoint()
    made = await opened(endpoint)
    listening = Listening(endpoint, Answer(0, 0))
    listening.number = 9
    with pytest.raises(ProtocolError, match="due were 0, 1"):
        await made.ask(Record(Kind.BYE))
    assert endpoint.aborted


@scenario
async def test_a_link_is_retired_before_its_numbers_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MESSAGE_NUMBERS", 3)
    made = await opened(ScriptedEndpoint())
    assert made.usable
    made.tell([ack()])
    assert made.usable
    made.tell([ack()])
    assert not made.usable  # one number is left, for the farewell
    made.tell([ack()])
    with pytest.raises(InternalError, match="no message numbers left"):
        made.tell([ack()])


def test_a_tag_base_is_none_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    random = iter([5, 5, 6, 7])
    monkeypatch.setattr(link.secrets, "randbits", lambda bits: next(random))
    assert new_tag_base({5, 6}) == 7
    monkeypatch.undo()
    assert 0 <= new_tag_base(set()) < 1 << 32
