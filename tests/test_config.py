"""transport.toml and TRANSPORT_…: what wins, what is refused in which words, and that commands and mixins use it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from transport import ClientOptions, Schema, Settings, UCXXDataPackerMixin, UCXXRolloutMixin, config
from transport.cli import run
from transport.doctor import report
from transport.errors import ConfigurationError


def load(folder: Path, text: str = "", **environment: str) -> config.Loaded:
    if text:
        (folder / config.FILE_NAME).write_text(text, encoding="utf-8")
    return config.load(environment, folder)


def test_without_file_and_environment_everything_is_a_default(tmp_path: Path) -> None:
    loaded = load(tmp_path)
    assert loaded.configuration == config.Configuration()
    assert loaded.configuration.settings == Settings()
    assert set(loaded.sources.values()) == {config.DEFAULT}
    assert (loaded.configuration.wire_policy, loaded.configuration.server_wires) == ("auto", None)
    assert loaded.configuration.secret() is None


def test_the_environment_wins_over_the_file_and_that_over_the_default(tmp_path: Path) -> None:
    loaded = load(
        tmp_path,
        'read_timeout_s = 20\nlinger_s = 60.5\nwires = ["shm", "tcp"]\nmetrics_port = 9400\n',
        TRANSPORT_LINGER_S="61",
        TRANSPORT_ADDRESSES="10.0.0.7, 10.0.0.8",
        UNRELATED="1",
    )
    found = loaded.configuration
    assert (found.read_timeout_s, found.linger_s, found.metrics_port) == (20.0, 61.0, 9400)
    assert (found.wires, found.addresses) == (("shm", "tcp"), ("10.0.0.7", "10.0.0.8"))
    assert loaded.sources["read_timeout_s"] == str(tmp_path / config.FILE_NAME)
    assert loaded.sources["linger_s"] == "TRANSPORT_LINGER_S"
    assert loaded.sources["claim_lease_s"] == config.DEFAULT
    settings = found.settings
    assert settings.connect_timeout_s == settings.handshake_timeout_s == settings.read_timeout_s == 20.0


def test_a_named_file_wins_over_the_one_in_the_folder(tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text("linger_s = 7.0\n")
    assert load(tmp_path, "linger_s = 8.0\n", TRANSPORT_CONFIG=str(other)).configuration.linger_s == 7.0


def test_an_empty_variable_unsets_what_may_be_unset(tmp_path: Path) -> None:
    found = load(tmp_path, "metrics_port = 9400\nwires = ['tcp']\n", TRANSPORT_METRICS_PORT="", TRANSPORT_WIRES="")
    assert (found.configuration.metrics_port, found.configuration.wires) == (None, ())


@pytest.mark.parametrize(
    ("text", "environment", "words"),
    [
        ("read_timeout = 3.0", {}, "read_timeout is not a setting; did you mean read_timeout_s?"),
        ("zzz = 3.0", {}, "zzz is not a setting; `transport doctor --settings` lists the known ones"),
        ("", {"TRANSPORT_LINGERS": "3"}, "TRANSPORT_LINGERS is not a setting; did you mean TRANSPORT_LINGER_S?"),
        ("linger_s = '3'", {}, "linger_s='3': give a number"),
        ("", {"TRANSPORT_LINGER_S": "soon"}, "TRANSPORT_LINGER_S=soon: give a number"),
        ("linger_s = nan", {}, "give a finite number"),
        ("linger_s = -1.0", {}, "linger_s=-1: give a finite number of at least 0"),
        ("read_timeout_s = 400.0", {}, "read_timeout_s < batch_deadline_s must hold"),
        ("metrics_port = 70000", {}, "metrics_port=70000: give a whole number from 0 to 65535"),
        ("", {"TRANSPORT_WIRES": "tcp,pigeon"}, "choose some of mapped, shm, tcp"),
        ("log_level = 'LOUD'", {}, "log_level='LOUD': choose one of DEBUG"),
        ("consumed_rings = 2.5", {}, "consumed_rings=2.5: give a whole number"),
        ("[read]\ntimeout_s = 3", {}, "[read] is a table"),
        ("[transport]\nrun = 'seven'", {}, "[transport] is a table"),
        ("wires = 'mapped'", {}, 'give a list, wires = ["mapped"]'),
        ("addresses = '10.0.0.7'", {}, 'give a list, addresses = ["10.0.0.7"]'),
        ("linger_s = ", {}, "is not TOML"),
        ("", {"TRANSPORT_CONFIG": "/nowhere/transport.toml"}, "TRANSPORT_CONFIG must name a file"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, environment: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load(tmp_path, text, **environment)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_settings_that_contradict_each_other_are_named_without_the_others(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load(
            tmp_path,
            "linger_s = 20\n",
            TRANSPORT_RUN="seven",
            TRANSPORT_READ_TIMEOUT_S="5",
            TRANSPORT_BATCH_DEADLINE_S="4",
        )
    where, _, _ = str(caught.value).partition(": ")
    assert where == "TRANSPORT_BATCH_DEADLINE_S, TRANSPORT_READ_TIMEOUT_S"


@pytest.mark.parametrize(
    "address", ["10.0.0.300", "10.0.0", "host:7450", "10.0.0.1:7450", "[::1]", ":1", "two words", "-x", "rings://host"]
)
def test_what_can_be_no_address_is_refused(tmp_path: Path, address: str) -> None:
    with pytest.raises(ConfigurationError, match="TRANSPORT_ADDRESSES"):
        load(tmp_path, TRANSPORT_ADDRESSES=f"10.0.0.7,{address}")


@pytest.mark.parametrize("address", ["127.0.0.1", "rollout-3.rollouts.default.svc.cluster.local.", "node_7", "7a"])
def test_addresses_and_names_of_hosts_are_taken(tmp_path: Path, address: str) -> None:
    assert load(tmp_path, TRANSPORT_ADDRESSES=address).configuration.addresses == (address,)


def test_the_secret_is_read_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b"between us\n")
    assert load(tmp_path, f"secret_file = '{file}'").configuration.secret() == b"between us"
    file.write_bytes(b"\n")
    with pytest.raises(ConfigurationError, match="is empty"):
        load(tmp_path).configuration.secret()
    file.unlink()
    with pytest.raises(ConfigurationError, match="No such file"):
        load(tmp_path).configuration.secret()


@pytest.mark.nightly(keep=6)
@pytest.mark.parametrize(
    "command",
    [
        "doctor --settings",
        "top --once",
        "reclaim --dry-run",
        "size --slot-bytes 1KiB",
        "queue rings:x-",
        "cooldown status",
    ],
)
@pytest.mark.parametrize("wrong", ["TRANSPORT_LINGERS=3", "TRANSPORT_READ_TIMEOUT_S=abc", "transport.toml"])
def test_a_wrong_configuration_is_wrong_usage_of_every_command(
    command: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    variable, _, value = wrong.partition("=")
    if value:
        monkeypatch.setenv(variable, value)
    else:
        (tmp_path / wrong).write_text("lingers = 3\n")
    assert run(command.split()) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert variable in said.err and said.err.count("\n") == 1
    assert run([command.split()[0], "--help"]) == 0


def test_settings_are_listed_with_their_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRANSPORT_LINGER_S", "42")
    assert run(["doctor", "--settings", "--json", "-"]) == 0
    rows = {row["key"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["linger_s"] == {
        "key": "linger_s",
        "variable": "TRANSPORT_LINGER_S",
        "value": "42",
        "source": "TRANSPORT_LINGER_S",
    }
    assert set(rows) == set(config.Configuration.__struct_fields__)


@pytest.mark.nightly(keep=4)
@pytest.mark.parametrize("password", ["sesame", "s@same", "se/same", "a:sesame", ""])
@pytest.mark.parametrize("user", ["user", ""])
def test_a_password_is_neither_listed_nor_reported(
    user: str, password: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRANSPORT_STORE", f"redis://{user}:{password}@host:6379/0?run=seven")
    assert run(["doctor", "--settings"]) == 0
    for said in (capsys.readouterr().out, report.settings(config.load()).detail, repr(config.load())):
        assert f"redis://{user}:...@host:6379/0?run=seven" in said
        assert "same" not in said
    assert config.configuration().store == f"redis://{user}:{password}@host:6379/0?run=seven"


def test_what_has_no_password_is_listed_as_it_is() -> None:
    for place in (
        "redis://host:6379/0?run=a",
        "redis://user@host:6379/0",
        "sqlite:///var/lib/a:b@c/store.db",
        "sqlite:a:b@c",
        "",
        "-",
    ):
        assert config.without_password(place) == place


@pytest.mark.ucx
def test_mixins_are_as_the_operator_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Worker(UCXXRolloutMixin): ...

    class Packer(UCXXDataPackerMixin): ...

    secret = tmp_path / "secret"
    secret.write_bytes(b"shared")
    (tmp_path / config.FILE_NAME).write_text(
        f"wires = ['tcp']\nsecret_file = '{secret}'\naddresses = ['127.0.0.1']\nlinger_s = 250.5\n"
    )
    monkeypatch.chdir(tmp_path)
    schema = Schema.of(step=("int64",))
    worker, packer = Worker(), Packer()
    try:
        worker.setup_ucxx(schema, slots=2, mode="thread")
        packer.setup_ucxx_packer(schemas=[schema])
        ticket = worker.write_to_buffer({"step": 3})
        assert ticket.addresses == ("127.0.0.1",)
        packer.start_prefetch([ticket])
        batch = packer.collect_prefetch()
        assert batch is not None
        (payload,) = packer.consume(batch)
        assert (payload.wire, int(payload["step"])) == ("tcp", 3)  # a mapped read would have needed no secret
        assert packer._packer.settings.linger_s == 250.5
        payload.release()
    finally:
        packer.cleanup_ucxx_packer()
        worker.cleanup_ucxx()


def test_what_is_given_wins_over_what_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    class Packer(UCXXDataPackerMixin): ...

    monkeypatch.setenv("TRANSPORT_LINGER_S", "42")
    packer = Packer()
    packer.setup_ucxx_packer(client=ClientOptions(settings=Settings(linger_s=250.0)), wire="auto")
    try:
        assert packer._packer.settings.linger_s == 250.0
    finally:
        packer.cleanup_ucxx_packer()
