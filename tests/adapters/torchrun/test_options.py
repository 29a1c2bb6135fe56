"""What torchrun's arguments mean, without torch."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from transport.adapters.torchrun.options import (
    BACKEND,
    check_address,
    ended,
    options_of,
    own_address,
    run_name,
    verdict,
    where_of,
)
from transport.errors import ConfigurationError
from transport.rendezvous.records import Closing, Reason
from transport.storage.urls import RedisURL, SQLiteURL, parse_url

ROOT = Path(__file__).resolve().parents[3]
REDIS = "redis://127.0.0.1:6379/0"


def options(endpoint: str = REDIS, run_id: str = "job", **conf: Any) -> Any:
    return options_of(endpoint, run_id, 2, 4, {"timeout": 900, **conf}, environ={}, host="host7")


def test_the_run_of_a_redis_url_is_the_id() -> None:
    assert options().url == RedisURL(REDIS, "job")
    assert options(f"{REDIS}?may_forget=yes").url == RedisURL(REDIS, "job", True)
    found = options(f"{REDIS}?run=team")
    assert (found.url.run, found.run) == ("team", "job")


def test_without_an_id_the_urls_run_is_the_run_and_else_there_is_a_warning() -> None:
    assert (options(f"{REDIS}?run=team", "none").run, options(f"{REDIS}?run=team", "none").warning) == ("team", "")
    found = options(run_id="none")
    assert found.run == "none"
    assert "there is no --rdzv-id" in found.warning
    assert options(run_id="") == found  # --rdzv-id=$UNSET


def test_ids_that_cannot_be_names_get_names_of_their_own() -> None:
    names = [run_name(each) for each in ("a b", "a-b", "a/b", "x" * 70, "x" * 71, "ä", "")]
    assert len(set(names)) == len(names)
    assert run_name("a-b") == "a-b"
    for name in names:
        assert parse_url(f"{REDIS}?run={name}").run == name


def test_a_file_is_the_store_of_one_host() -> None:
    found = options("sqlite:/tmp/x.sqlite3")
    assert found.url == SQLiteURL(Path("/tmp/x.sqlite3"))
    assert own_address(found.url, None) == "127.0.0.1"
    assert own_address(found.url, "10.0.0.9") == "10.0.0.9"


def test_on_the_servers_own_host_the_address_is_the_endpoints_name() -> None:
    assert own_address(options("redis://localhost:1/0").url, None) == "localhost"


@pytest.mark.parametrize("endpoint", ["redis://[::1/0", "redis://host:port/0"])
def test_an_endpoint_that_is_no_url_is_named(endpoint: str) -> None:
    with pytest.raises(ConfigurationError, match="--rdzv-endpoint: "):
        options(endpoint)


def test_an_endpoint_that_is_no_url_is_named_without_its_password() -> None:
    with pytest.raises(ConfigurationError, match=re.escape("give redis://...@host:6379/0")) as refused:
        options("user:ses@me@host:6379")
    assert "ses" not in str(refused.value) and "user" not in str(refused.value)


@pytest.mark.parametrize("address", ["no.such.host.invalid", "255.255.255.255"])
def test_an_address_that_is_not_of_this_host_is_refused_at_once(address: str) -> None:
    check_address("127.0.0.1")
    check_address("localhost")
    with pytest.raises(ConfigurationError, match=f"does not reach itself at '{address}'.*give --local-addr"):
        check_address(address)


def test_times_and_rules_come_from_the_conf() -> None:
    rules = options(lease_s="5", join_timeout="8", most_rounds="3", grow="0").rules
    assert (rules.least, rules.most, rules.lease_s, rules.join_timeout_s) == (2, 4, 5.0, 8.0)
    assert (rules.last_call_s, rules.settle_s, rules.most_rounds, rules.grow) == (4.0, 4.0, 3, False)
    assert (options().rules.settle_s, options(last_call_timeout="0.5").rules.settle_s) == (1.0, 0.5)
    assert options(archive="/x/y").archive == Path("/x/y")


@pytest.mark.parametrize(
    ("conf", "message"),
    [
        ({"leases": 1}, "unknown name 'leases'; it takes lease_s, poll_s"),
        ({"lease_s": "x"}, "lease_s=x: give a number"),
        ({"grow": "maybe"}, "give 1 or 0"),
        ({"lease_s": "0"}, "lease_s"),
        ({"most_rounds": "0"}, "most_rounds"),
        ({"most_rounds": "inf"}, "most_rounds=inf: give a whole number"),
        ({"most_rounds": "1.5"}, "most_rounds=1.5: give a whole number"),
        ({"archive": ""}, "archive=: give the path"),
    ],
)
def test_a_wrong_conf_is_named(conf: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        options(**conf)


# --- positions ------------------------------------------------------------------------------------------
def test_positions_come_from_slurm_a_variable_a_list_or_the_argument() -> None:
    slurm = {"SLURM_TOPOLOGY_ADDR": "s0.s3.node7", "SLURM_NODEID": "4"}
    assert where_of("slurm", slurm, "") == "s0/s3/node7"
    assert where_of("slurm", {"SLURM_NODEID": "4"}, "") == "4"
    assert where_of("env:RACK", {"RACK": "r1"}, "") == "r1"
    assert where_of("at:rack3/host7", {}, "") == "rack3/host7"
    hosts = "# the switch's order\nhost9\n\nhost7 # new\n"
    assert where_of("file:/x", {}, "host7.example.org", lambda path: hosts) == "1/host7"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("slurm", "start torchrun by srun"),
        ("env:RACK", "the variable RACK is not set"),
        ("env:", "give where=slurm"),
        ("file:/no/such/list", "cannot read it"),
        (f"file:{sys.executable}", "cannot read it"),
        ("file:a\0b", "cannot read it"),
        ("file:/dev/null", "this host, host7, is not in the list"),
        ("rack3", "give where=slurm"),
    ],
)
def test_a_wrong_position_is_named(source: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        where_of(source, {}, "host7")


# --- torch, the end ---------------------------------------------------------------------------------------
def test_the_entry_point_leads_to_a_function_that_imports_nothing() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["torchrun.handlers"] == {BACKEND: "transport.adapters.torchrun:get_handler"}
    code = "import sys, transport.adapters.torchrun as t; t.get_handler(); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"False\n"


def test_a_run_that_ended_before_names_the_way_out() -> None:
    closing = Closing(run="run", reason=Reason.FAILURE, round=3, incarnation="x", by="m", message="rank 1 is gone")
    assert ended("job", closing, before=False) == "run 'job' ended in round 3: failure (rank 1 is gone)"
    assert ended("job", closing, before=True).endswith("give another --rdzv-id for a new one")


@pytest.mark.parametrize(
    ("failures", "interrupted", "done", "reason"),
    [
        (None, False, True, None),
        (None, True, False, None),
        ({1: 7}, True, False, Reason.FAILURE),
        ({1: -9}, True, False, Reason.FAILURE),
        ({1: 1, 2: 93}, True, False, Reason.NO_RESTART),
    ],
)
def test_an_agents_end_means_for_the_run(
    failures: dict[int, int] | None, interrupted: bool, done: bool, reason: Reason | None
) -> None:
    found = verdict(failures, interrupted=interrupted, no_restart=93, host="host7")
    assert (found.done, found.reason) == (done, reason)
    assert found.message.endswith(", no restart is left") == (reason is not None)


def test_the_worker_that_decided_is_named() -> None:
    named = verdict({1: -9, 2: 93}, interrupted=True, no_restart=93, host="host7").message
    assert named.startswith("worker of rank 2 on host7 ended with exit code 93")
    named = verdict({1: -9, 2: 1}, interrupted=True, no_restart=93, host="host7").message
    assert named.startswith("worker of rank 1 on host7 ended with signal 9")
