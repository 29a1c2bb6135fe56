"""Checkpoints in a repository of Hugging Face, by its own packages, against a stand-in of the service over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_services import HUB
from cooldown_runs import Run
from helpers import Child, asynchronous
from sharded_runs import HOSTS, ShardedRun
from silent_server import silent_server

from transport.cooldown import CooldownHost, EpochRecord, Outcome, open_destination, restore
from transport.cooldown.destinations import base
from transport.cooldown.destinations.base import Destination, check_permissions
from transport.cooldown.destinations.hub import Hub
from transport.cooldown.epochs.records import upload_folder
from transport.cooldown.pruning import carry_out, plan
from transport.errors import DestinationError, UploadCancelledError, UsageError
from transport.store.sqlite import SQLiteStore

SERVICE = HUB
pytestmark = [pytest.mark.adapters("torch"), pytest.mark.usefixtures("shared")]  # its environment has the packages
URL = HUB.url
MODEL = {"model.safetensors": secrets.token_bytes(300_000), "config.json": b"{}", "empty": b""}
PLACE = upload_folder("run", 7, f"a/{'0' * 16}")


@pytest.fixture
def hub(server: Child) -> Iterator[Destination]:
    with open_destination(URL) as each:
        assert isinstance(each, Hub)
        yield each


def branches(server: Child) -> dict[str, list[str]]:
    server.tell("branches")
    found: dict[str, list[str]] = json.loads(server.line())
    return found


def save(folder: Path, step: int) -> None:
    for name, data in MODEL.items():
        (folder / name).write_bytes(data)


def write(hub: Destination, path: str, data: bytes) -> dict[str, str]:
    return hub.write(path, len(data), [data])


def test_what_was_written_is_visible_once_it_is_settled(server: Child, hub: Destination) -> None:
    large = secrets.token_bytes(100_000)
    proofs = {name: write(hub, f"{PLACE}/files/{name}", data) for name, data in (("a/large", large), ("small", b"1"))}
    assert hub.size(f"{PLACE}/files/a/large") is None
    hub.settle(PLACE)
    assert (hub.size(f"{PLACE}/files/a/large"), hub.size(f"{PLACE}/files/small")) == (100_000, 1)
    with hub.pieces(f"{PLACE}/files/a/large") as pieces:
        assert b"".join(pieces) == large
    assert hub.part(f"{PLACE}/files/a/large", 500, 1000) == large[500:1500]
    for name, kind in (("small", "git"), ("a/large", "sha256")):
        assert hub.proofs(f"{PLACE}/files/{name}") == {kind: proofs[name][kind]}
    assert hub.proofs(f"{PLACE}/files/other") == {}
    assert "a/large" in branches(server)[f"upload/{PLACE}"]  # at the root


def test_a_copy_on_this_host_stays_for_as_long_as_the_service_lacks_its_bytes(
    hub: Destination, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    large = secrets.token_bytes(100_000)
    for number in range(3):
        write(hub, f"{PLACE}/files/large-{number}", large)
    assert list(tmp_path.iterdir()) == []
    write(hub, f"{PLACE}/files/small", b"1")  # which the commit takes along
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [b"1"]
    hub.settle(PLACE)
    assert list(tmp_path.iterdir()) == []
    assert [hub.read(f"{PLACE}/files/{name}", 100_000) for name in ("large-2", "small")] == [large, b"1"]
    write(hub, f"{PLACE}/files/more", b"1")
    hub.close()
    assert list(tmp_path.iterdir()) == []


def test_an_upload_that_was_given_up_leaves_nothing(server: Child, hub: Destination) -> None:
    write(hub, f"{PLACE}/files/a", b"1")

    def given_up() -> Iterator[bytes]:
        yield b"1"
        raise UploadCancelledError("given up")

    with pytest.raises(UploadCancelledError):
        hub.write(f"{PLACE}/files/b", 10, given_up())
    hub.delete(f"{PLACE}/manifest.json")
    hub.delete(PLACE)
    hub.delete(PLACE)
    assert set(branches(server)) == {"main"}
    assert hub.names("run") == []


def test_folders_are_listed_from_branches_and_main(hub: Destination) -> None:
    hub.put(f"{PLACE}/manifest.json", b"{}")
    hub.put("run/outcomes/1.json", b"{}")
    assert hub.names("run") == ["epoch-000000000007", "outcomes"]
    assert hub.names("run/epoch-000000000007") == ["a"]
    assert hub.names("run/epoch-000000000007/a") == ["0" * 16]
    assert hub.read(f"{PLACE}/manifest.json", 10) == b"{}"
    hub.delete("run")
    assert hub.names("run") == []


def test_commits_that_meet_are_repeated(server: Child, hub: Destination) -> None:
    server.tell("conflict 3")
    hub.put("outcome", b"1")
    assert hub.read("outcome", 10) == b"1"
    server.tell("conflict 9")
    with pytest.raises(DestinationError, match="412"):
        hub.put("outcome", b"2")


@pytest.mark.parametrize("url", ["hf://user", "hf://user/model/folder", "hf://user/model@main"])
def test_a_url_names_a_repository_only(url: str) -> None:
    with pytest.raises(UsageError, match="hf://user/repository"):
        open_destination(url)


def test_a_repository_that_is_not_there_is_an_error() -> None:
    with open_destination("hf://user/other") as other, pytest.raises(DestinationError, match="cannot join"):
        check_permissions(other)


@asynchronous
async def test_a_sharded_checkpoint_is_published_in_one_revision(server: Child, tmp_path: Path) -> None:
    """Its parts are in a branch for each uploader; large files are named again, not sent again."""
    with SQLiteStore(tmp_path / "store.sqlite3") as store:
        job = ShardedRun(tmp_path, store)
        host = CooldownHost(store, "run", URL, cooldown_s=60, seed=49, clock=job.clock)
        await host.open(7)
        record, *_ = await asyncio.gather(host.cooldown(7, 1, HOSTS), *(job.member(name).cooldown(7) for name in HOSTS))
        assert record.outcome is Outcome.CHECKPOINTED
        with open_destination(URL) as hub:
            files = restore(record, hub, tmp_path / "restored").files
    assert branches(server)["run-epoch-000000000007"] == sorted([*files, "README.md"])


def test_pruning_ends_the_revisions_of_old_checkpoints(server: Child, hub: Destination, tmp_path: Path) -> None:
    async def cooldowns(cooling: Run) -> dict[int, EpochRecord]:
        host = CooldownHost(cooling.store, "run", URL, cooldown_s=60, seed=1, clock=cooling.clock)
        for epoch in (1, 2):
            await host.open(epoch)
            client = cooling.client("a", save=save)
            await asyncio.gather(host.cooldown(epoch, epoch, ["a"]), client.cooldown(epoch))
        return cooling.ledger.epochs()

    with SQLiteStore(tmp_path / "store.sqlite3") as store:
        records = asyncio.run(cooldowns(Run(tmp_path, store)))
    assert sum(name.startswith("run-epoch") for name in branches(server)) == 2
    carry_out(plan(records, hub, "run", 1), hub, "run")
    left = [name for name in branches(server) if name != "main"]
    assert (
        sorted(name.removeprefix("upload/run/").rpartition("epoch-")[2][:12] for name in left) == ["000000000002"] * 2
    )
    assert restore(records[2], hub, tmp_path / "restored").manifest.step == 2


LOADS = """
import sys, warnings
warnings.simplefilter("ignore")
import torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained("user/model", revision=sys.argv[1], cache_dir=sys.argv[2])
saved = torch.load(sys.argv[3])
found = model.state_dict()
assert set(saved) == set(found) and all(torch.equal(saved[name], found[name]) for name in saved)
print("equal", sum(each.numel() for each in saved.values()), flush=True)
"""
SAVES = """
import sys, warnings
warnings.simplefilter("ignore")
import torch, transformers
config = transformers.LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
)
model = transformers.LlamaForCausalLM(config)
model.save_pretrained(sys.argv[1], max_shard_size="20KB")  # several files and their index
torch.save(model.state_dict(), sys.argv[2])
print("saved", flush=True)
"""


@pytest.mark.slow
def test_from_pretrained_loads_what_was_uploaded(server: Child, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with Child(SAVES, tmp_path / "model", tmp_path / "state") as child:
        assert child.line() == "saved"
    files = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    assert sum(name.endswith(".safetensors") for name in files) > 1

    def save_all(folder: Path, step: int) -> None:
        for name, data in files.items():
            (folder / name).write_bytes(data)

    async def cooldown(cooling: Run) -> EpochRecord:
        host = CooldownHost(cooling.store, "run", URL, cooldown_s=60, seed=1, clock=cooling.clock)
        await host.open(7)
        record, _ = await asyncio.gather(host.cooldown(7, 1, ["a"]), cooling.client("a", save=save_all).cooldown(7))
        return record

    with SQLiteStore(tmp_path / "store.sqlite3") as store:
        assert asyncio.run(cooldown(Run(tmp_path, store))).outcome is Outcome.CHECKPOINTED
    environment = {"HF_ENDPOINT": os.environ["HF_ENDPOINT"], "HF_HUB_DISABLE_XET": "1"}
    with Child(LOADS, "run-epoch-000000000007", tmp_path / "cache", tmp_path / "state", env=environment) as child:
        assert child.line().startswith("equal")


def test_a_service_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "ANSWER_S", 0.2)
    with silent_server() as port:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
        with open_destination(URL) as place:
            for ask in (lambda: place.names(""), lambda: place.put("a", b"x")):
                with pytest.raises(DestinationError, match=r"[Tt]imed? ?out"):
                    ask()


def test_a_service_that_pauses_while_it_takes_bytes_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pause is longer than the limit of a connection, and shorter than that of an answer."""
    import huggingface_hub.utils as package

    if not hasattr(package, "configure_http_backend"):
        pytest.skip("this release of huggingface_hub bounds its requests itself")
    monkeypatch.setattr(base, "CONNECT_S", 0.1)
    gave_up = threading.Event()
    with socket.socket() as listening, contextlib.closing(Hub(URL)):
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        listening.bind(("127.0.0.1", 0))
        listening.listen()

        def take() -> None:
            connection, _ = listening.accept()
            with connection:
                _, _, body = connection.recv(1 << 16).partition(b"\r\n\r\n")
                gave_up.wait(1.0)  # ten times that limit: a client that gives up does so now
                left = (64 << 20) - len(body)
                while left and (data := connection.recv(1 << 20)):
                    left -= len(data)
                if not left:
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

        taking = threading.Thread(target=take)
        taking.start()
        try:
            session = package.get_session()
            url = f"http://127.0.0.1:{listening.getsockname()[1]}/upload"
            assert session.put(url, data=bytes(64 << 20)).status_code == 200
        finally:
            gave_up.set()
            taking.join()
