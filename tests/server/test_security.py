"""What docs/SECURITY.md promises: nothing is unpickled, secrets stay at home, shared memory is not believed."""

from __future__ import annotations

import ast
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import NETWORK, Child, asynchronous, eventually, proven, segment_file
from loopback import LOOPBACK
from scripted_peer import Peer, Stage

import transport
from transport import SharedRingBuffer, UCXXClient, UCXXServer
from transport.client.connections.connection import Link
from transport.errors import AuthenticationError, ProtocolError, WrongRingError
from transport.server.ending import is_listener, send
from transport.server.starting import ListenerConfig
from transport.server.supervisor import SupervisorConfig
from transport.settings import DEFAULTS, Settings
from transport.wire import frames

PACKAGE = Path(transport.__file__).parent
# It changes places in a file of TransferQueue's controller, which TransferQueue unpickles next.
UNPICKLES = PACKAGE / "adapters/transferqueue/checkpoints.py"
SOURCES = sorted({*PACKAGE.rglob("*.py")} - {UNPICKLES})
SECRET = b"a-secret-that-is-easy-to-find"

# --- nothing that is received is ever executed -------------------------------------------------------
FORBIDDEN_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml", "jsonpickle"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
LOADS_CODE = {("torch", "load"), ("numpy", "load"), ("np", "load")}


def faults_of(tree: ast.AST) -> list[str]:
    """What could run what somebody sent."""
    found = []
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            names = []
        found += [f"{line}: imports {name}" for name in names if name.split(".")[0] in FORBIDDEN_MODULES]
        if isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Name) and function.id in FORBIDDEN_CALLS:
                found.append(f"{line}: calls {function.id}")
            if isinstance(function, ast.Attribute) and (ast.unparse(function.value), function.attr) in LOADS_CODE:
                refused = any(
                    each.arg == "allow_pickle" and ast.unparse(each.value) == "False" for each in node.keywords
                )
                if not (refused and ast.unparse(function.value) in ("np", "numpy")):
                    found.append(f"{line}: calls {ast.unparse(function)}")
            for keyword in node.keywords:
                unsafe = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
                if keyword.arg in ("allow_pickle", "shell") and unsafe:
                    found.append(f"{line}: {keyword.arg}=True")
    return found


def found_in(sources: list[Path], search: Callable[[ast.AST], list[Any]], word: str = "") -> dict[str, list[Any]]:
    """What a search finds in files that have the word, by file; there are files to search."""
    assert len(sources) > 100
    texts = {path: path.read_text(encoding="utf-8") for path in sources}
    found = {str(path): search(ast.parse(text)) for path, text in texts.items() if word in text}
    assert found
    return {path: faults for path, faults in found.items() if faults}


def test_no_file_unpickles_or_evaluates() -> None:
    assert found_in(SOURCES, faults_of) == {}


@pytest.mark.parametrize(
    "code",
    ["import pickle", "from pickle import loads", "import os, marshal", "eval(x)", "np.load(f)",
     "f(allow_pickle=True)", "run(x, shell=True)", "def f():\n  import dill.source"],
)  # fmt: skip
def test_the_search_finds_what_it_looks_for(code: str) -> None:
    assert faults_of(ast.parse(code))


# --- the secret -----------------------------------------------------------------------------------------
def test_no_representation_shows_the_secret() -> None:
    config = ListenerConfig(segment="/x", port=1, settings=DEFAULTS, secret=SECRET)
    shown = f"{config!r} {config} {SupervisorConfig(ports=(1,), listener=config)!r}"
    assert SECRET.decode() not in shown
    assert "secret=..." in shown


def process_file(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace")


@pytest.mark.ucx
@asynchronous
async def test_the_secret_is_on_no_command_line_in_no_environment_in_no_ticket_and_in_no_log(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    with (
        SharedRingBuffer.create(slots=2, slot_bytes=100) as ring,
        UCXXServer(ring, addresses=(LOOPBACK,), secret=SECRET, log_level="DEBUG") as server,
    ):
        ticket = ring.write_raw(b"x")
        async with UCXXClient(wire=NETWORK, secret=b"another") as stranger:
            with pytest.raises(AuthenticationError) as refused:
                await stranger.read(ticket)
        async with UCXXClient(wire=NETWORK, secret=SECRET) as client:
            assert bytes((await client.read(ticket)).data) == b"x"
            texts = [repr(client), repr(server), repr(ring), str(refused.value), caplog.text]
        texts += [ticket.to_text(), repr(ticket), str(ticket.to_json())]
        for owner in ring.native.owners():
            for name in ("cmdline", "environ"):
                texts.append(process_file(owner.pid, name))
        assert SECRET not in segment_file(ring).read_bytes()
    captured = capfd.readouterr()
    assert SECRET.decode() not in "".join([*texts, captured.out, captured.err])


# --- the handshake --------------------------------------------------------------------------------------
@pytest.mark.ucx
@asynchronous
async def test_a_proof_of_one_connection_is_worth_nothing_on_another() -> None:
    with SharedRingBuffer.create(slots=1, slot_bytes=10) as ring:
        async with Stage(ring, secret=SECRET) as stage:
            first, second = await stage.peer(), await stage.peer()
            await first.say(first.hello())
            challenge = await first.heard(frames.Challenge)
            await second.say(second.hello())
            await second.heard(frames.Challenge)
            await second.say(frames.Proof(proven(SECRET, "client", second.hello(), challenge.nonce)))
            assert (await second.heard(frames.Welcome)).code == AuthenticationError.status


@pytest.mark.ucx
@asynchronous
async def test_two_listeners_cannot_be_played_against_each_other() -> None:
    """A stranger asked by a listener asks another listener the same: its answer is for the other side."""
    with SharedRingBuffer.create(slots=1, slot_bytes=10) as ring:
        async with Stage(ring, secret=SECRET) as one, Stage(ring, secret=SECRET) as other:
            asked, oracle = await one.peer(), await other.peer()
            await asked.say(asked.hello())
            challenge = await asked.heard(frames.Challenge)
            await oracle.say(oracle.hello(nonce=challenge.nonce))
            mirrored = await oracle.heard(frames.Challenge)
            await asked.say(frames.Proof(mirrored.proof))
            assert (await asked.heard(frames.Welcome)).code == AuthenticationError.status


@pytest.mark.parametrize("size", [0, 15, 17, 64])
@pytest.mark.ucx
@asynchronous
async def test_a_nonce_of_another_size_is_refused(size: int) -> None:
    """Two nonces in a row must have one reading, or a proof for one pair would be a proof for another."""
    with SharedRingBuffer.create(slots=1, slot_bytes=10) as ring:
        async with Stage(ring, secret=SECRET) as stage:
            peer: Peer = await stage.peer()
            await peer.say(peer.hello(nonce=bytes(size)))
            assert (await peer.heard(frames.Welcome)).code == ProtocolError.status


@pytest.mark.ucx
@asynchronous
async def test_a_welcome_for_another_ring_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener that does not look at the ring it is asked for."""

    async def anybody(*_: object) -> None: ...

    monkeypatch.setattr("transport.server.listener.Connection._admit", anybody)
    with SharedRingBuffer.create(slots=1, slot_bytes=10) as ring:
        async with Stage(ring) as stage:
            with pytest.raises(WrongRingError, match="serves ring"):
                await Link.open(
                    stage.worker, LOOPBACK, stage.port, ring="f" * 32, tag_base=1, secret=None, settings=Settings()
                )


# --- pids that stand in the segment -------------------------------------------------------------------------
def test_a_signal_goes_to_no_process_that_is_no_listener() -> None:
    with Child("import sys; print('here', flush=True); sys.stdin.readline()") as bystander:
        assert bystander.line() == "here"
        for pid in (bystander.process.pid, os.getpid(), 0, 1, 2**31, 2**32 - 1):
            assert not is_listener(pid)
            send(9, pid)
        bystander.tell()
        assert bystander.wait() == 0


@pytest.mark.ucx
def test_a_listener_is_known_by_its_command() -> None:
    listener = subprocess.Popen(
        [sys.executable, "-m", "transport.server.process"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    try:
        eventually(lambda: is_listener(listener.pid))
        send(9, listener.pid)
        assert listener.wait(10) == -9
    finally:
        listener.kill()
        listener.communicate()


# --- children -------------------------------------------------------------------------------------------------
PLANTED = "import pathlib; pathlib.Path(__file__).with_name('it-ran').touch(); raise SystemExit(1)"


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("planted", ["uvloop.py", "transport/__init__.py", "msgspec/__init__.py"])
@pytest.mark.ucx
def test_no_child_runs_what_lies_in_the_current_directory(
    planted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / planted
    path.parent.mkdir(exist_ok=True)
    path.write_text(PLANTED)
    monkeypatch.chdir(tmp_path)
    with (
        SharedRingBuffer.create(slots=1, slot_bytes=10) as ring,
        UCXXServer(ring, addresses=(LOOPBACK,), secret=SECRET) as server,
    ):
        assert len(server.ports) == 1
    assert not path.with_name("it-ran").exists()


STARTERS = [*SOURCES, *sorted((Path(__file__).resolve().parents[2] / "benchmarks").rglob("*.py"))]


def starts_with_the_current_directory(tree: ast.AST) -> list[int]:
    """Lines that start a Python by ``-m`` or ``-c`` and not by ``-P``."""
    found = []
    for node in ast.walk(tree):
        words = node.elts if isinstance(node, ast.List | ast.Tuple) else node.args if isinstance(node, ast.Call) else []
        said = [word.value if isinstance(word, ast.Constant) else ast.unparse(word) for word in words]
        if "sys.executable" in said and {"-m", "-c"} & set(said) and "-P" not in said:
            found.append(node.lineno)
    return found


def test_no_python_is_started_with_the_current_directory_on_its_path() -> None:
    assert found_in(STARTERS, starts_with_the_current_directory, "sys.executable") == {}


@pytest.mark.parametrize("code", ["run([sys.executable, '-m', name])", "run(sys.executable, '-c', code, stdin=1)"])
def test_the_search_finds_starts_with_the_current_directory(code: str) -> None:
    assert starts_with_the_current_directory(ast.parse(code))
