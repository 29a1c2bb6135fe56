"""The UCX of nixl's wheel: when it is loaded, what stands in its way, and that a whole process tree has it.

A host with a card is this one with made-up files of a card: the choice depends on nothing else.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from made_up_card import card, with_card
from two_hosts import why_not

from transport.wire import verbs

pytestmark = [
    pytest.mark.ucx,
    pytest.mark.skipif(bool(why_not()), reason="a made-up card needs root and mount namespaces"),
]

LOADED = """
import json
from pathlib import Path
from transport.wire import library
lack = library.lack_of_verbs()
library.engine()
files = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libuc" in line}
print(json.dumps([lack, sorted(file for file in files if Path(file).name.partition(".")[0][3:] in "ucm ucs uct ucp")]))
"""
READ = """
import os
from pathlib import Path
import numpy as np
from transport import BlockingClient, Schema, SharedRingBuffer, UCXXServer, UpTo
from transport.wire import library
schema = Schema.of(a=("uint8", UpTo(4 << 20)))
written = np.frombuffer(os.urandom(4 << 20), np.uint8)
with SharedRingBuffer.create(schema, slots=2) as ring, UCXXServer(ring) as server:
    with BlockingClient(schemas=[schema], wire={"tcp"}) as client:
        payload = client.read(ring.write({"a": written}))
        assert np.array_equal(payload["a"], written)
        payload.release()
        del payload
    started = [os.getpid()]
    for each in started:
        for thread in Path(f"/proc/{each}/task").iterdir():
            started += map(int, (thread / "children").read_text().split())
    maps = "".join(Path(f"/proc/{each}/maps").read_text() for each in started[1:]).splitlines()
    theirs = {line.split()[-1] for line in maps if "/libucp" in line}
    assert theirs == {str(library.library_path())}, theirs
"""


def on_host(cards: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """``code`` on a host with these cards."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    command = with_card(cards, [sys.executable, "-c", code])
    return subprocess.run(command, env={**inherited, **environment}, stdout=subprocess.PIPE, text=True, check=True)


def loaded(cards: Path, **environment: str) -> tuple[verbs.Lack | None, list[str]]:
    """What a new process lacks there, and its files of UCX."""
    lack, files = json.loads(on_host(cards, LOADED, **environment).stdout)
    return lack and verbs.Lack(*lack), files


def wheel(site: Path, version: str, *files: str) -> str:
    """A folder for PYTHONPATH with a release of nixl-cu12 that has these files among its libraries."""
    for name in files:
        (site / "nixl_cu12.libs" / name).parent.mkdir(parents=True, exist_ok=True)
        (site / "nixl_cu12.libs" / name).touch()
    (site / f"nixl_cu12-{version}.dist-info").mkdir(parents=True)
    (site / f"nixl_cu12-{version}.dist-info" / "METADATA").write_text(f"Name: nixl-cu12\nVersion: {version}\n")
    return str(site)


def test_plain_names_take_the_places_of_unique_ones() -> None:
    before = b"\0libucp-b39b3ed9.so.0.0.0\0libuct_ib.so.0.0.0\0libmlx5-79ef1d27.so.1.24.48.0\0libm.so.6\0libcuda.so.1\0"
    after = verbs._with_plain_names(before)
    assert len(after) == len(before)
    names = [b"libucp.so.0", b"libuct_ib.so.0", b"libmlx5.so.1", b"libm.so.6", b"libcuda.so.1"]
    assert [name for name in after.split(b"\0") if name] == names
    assert verbs._with_plain_names(after) == after


@pytest.mark.nightly
def test_a_release_that_is_laid_out_otherwise_is_left_alone_and_named(tmp_path: Path) -> None:
    card(tmp_path / "cards", "mlx5_0")
    files = (
        "libucp-0123abcd.so.1.0.0",
        "libucs-0123abcd.so.0.0.0",
        "libuct-0123abcd.so.0.0.0",
        "ucx/libuct_ib.so.0.0.0",
    )
    lack, (library, *_) = loaded(tmp_path / "cards", PYTHONPATH=wheel(tmp_path / "site", "99.0", *files))
    assert lack is not None
    assert "nixl-cu12 99.0" in lack.why
    assert "libucm.so.0, libucp.so.0" in lack.why
    assert "nixl" not in library


def test_the_users_choice_stands(tmp_path: Path) -> None:
    card(tmp_path / "cards", "mlx5_0")
    site = wheel(tmp_path / "site", "99.0")
    lack, _ = loaded(tmp_path / "cards", PYTHONPATH=site, **{verbs.CHOICE: "false"})
    assert lack is not None
    assert verbs.CHOICE in lack.why


@pytest.mark.nightly
def test_a_ucx_that_the_process_has_already_is_named(tmp_path: Path) -> None:
    card(tmp_path / "cards", "mlx5_0")
    lack, files = json.loads(on_host(tmp_path / "cards", "import ucxx\n" + LOADED).stdout)
    assert next(path for path in files if "libucp" in path) in lack[0]


def ready() -> str:
    """Why the wheel's UCX cannot be loaded here; empty if it can."""
    try:
        distribution("nixl-cu12")
        ctypes.CDLL("libibverbs.so.1")
    except PackageNotFoundError:
        return "pip install --no-deps nixl-cu12"
    except OSError:
        return verbs.PROVIDERS
    return ""


needs_wheel = pytest.mark.skipif(bool(ready()), reason=f"needs nixl's wheel and libibverbs: {ready()}")


@needs_wheel
def test_where_a_port_is_active_every_process_has_the_wheels_ucx_alone(tmp_path: Path) -> None:
    card(tmp_path / "cards", "mlx5_0")
    lack, files = loaded(tmp_path / "cards", XDG_CACHE_HOME=str(tmp_path))
    assert lack is None
    assert len(files) == 4
    assert all(path.startswith(f"{tmp_path}/payload-transport/nixl-cu12-") for path in files)
    on_host(tmp_path / "cards", READ, XDG_CACHE_HOME=str(tmp_path))


@needs_wheel
def test_without_an_active_port_nothing_is_copied(tmp_path: Path) -> None:
    card(tmp_path / "cards", "mlx5_0", state="1: DOWN")
    _, files = loaded(tmp_path / "cards", XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert files
    assert not (tmp_path / "cache").exists()


@needs_wheel
def test_many_processes_make_the_copies_at_once_and_mend_what_was_cut_off(tmp_path: Path) -> None:
    card(tmp_path / "cards", "mlx5_0")
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    command = with_card(tmp_path / "cards", [sys.executable, "-c", LOADED])
    for _ in range(2):
        started = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(4)]
        assert [json.loads(each.communicate()[0])[0] for each in started] == [None] * 4
        for file in tmp_path.glob("payload-transport/*/lib*"):
            with file.open("r+b") as cut:
                cut.truncate(1000)


@needs_wheel
def test_a_folder_that_cannot_be_had_is_named(tmp_path: Path) -> None:
    card(tmp_path / "cards", "mlx5_0")
    (tmp_path / "file").touch()
    lack, files = loaded(tmp_path / "cards", XDG_CACHE_HOME=str(tmp_path / "file"))
    assert lack is not None
    assert "cannot be copied" in lack.why
    assert all("libucx" in path for path in files)
