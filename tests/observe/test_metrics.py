"""Metrics of rings, clients, packers and queues, as a scraper gets them; the dashboard names only what there is."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import yaml
from claimed import consumed
from helpers import Child, eventually

from transport import (
    ClientOptions,
    FoundRings,
    Rollout,
    Schema,
    SharedRingBuffer,
    Trainer,
    UCXXDataPackerMixin,
    UCXXRolloutMixin,
)
from transport.claims.deliveries import QueueDepth
from transport.claims.open import given_rings
from transport.config import Configuration
from transport.errors import BusyPortError
from transport.observe.metrics import (
    FAMILIES,
    Exporter,
    configured_exporter,
    ring_samples,
)

ROOT = Path(__file__).resolve().parents[2]


def scrape(port: int) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Name and labels of each sample, and its value, as Prometheus would read them."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(found: dict[tuple[str, frozenset[tuple[str, str]]], float], name: str, **labels: str) -> float:
    """The only sample of that name that has these labels."""
    (number,) = [number for (each, has), number in found.items() if each == name and set(labels.items()) <= set(has)]
    return number


@pytest.fixture
def ring() -> Iterator[SharedRingBuffer]:
    with SharedRingBuffer.create(slots=4, slot_bytes=4096) as ring:
        yield ring


def test_every_sample_is_of_a_family_and_has_its_labels(ring: SharedRingBuffer) -> None:
    ring.write_raw(b"x" * 100)
    for name, labels, _ in ring_samples(ring, 0):
        assert len(labels) == len(FAMILIES[name].labels)


def test_what_was_closed_is_left_out_of_a_scrape(ring: SharedRingBuffer) -> None:
    with Exporter(0) as exporter:
        exporter.add_ring(ring)
        assert value(scrape(exporter.port), "transport_ring_slots", state="free") == 4
        ring.close()
        assert not any(name.startswith("transport_") for name, _ in scrape(exporter.port))


def test_one_source_that_fails_or_has_an_odd_name_takes_no_scrape_from_the_others(ring: SharedRingBuffer) -> None:
    class Failing(FoundRings):
        def depth(self, rank: int | None = None) -> QueueDepth:
            raise OSError("unmounted")

    with Failing() as failing, Exporter(0) as exporter:
        exporter.add_queue("failing", failing)
        with given_rings(ring) as queue:
            exporter.add_queue("caf\udce9", queue)
            assert list(ready(exporter.port)) == ["caf?"]


def ready(port: int) -> dict[str, float]:
    """The ready deliveries of each queue."""
    found = scrape(port)
    return {
        dict(labels)["queue"]: count
        for (name, labels), count in found.items()
        if name == "transport_queue_deliveries" and ("state", "ready") in labels
    }


def test_every_queue_of_a_process_is_shown_until_nobody_shows_it() -> None:
    with contextlib.ExitStack() as stack:
        rings = [stack.enter_context(SharedRingBuffer.create(slots=8, slot_bytes=8)) for _ in range(2)]
        one, two = (stack.enter_context(given_rings(ring)) for ring in rings)
        exporter = stack.enter_context(Exporter(0))
        for ring, count in zip(rings, (5, 3), strict=True):
            for _ in range(count):
                ring.write_raw(b"x")
        exporter.add_queue(FoundRings.__name__, one)
        with Exporter(exporter.port) as other:
            other.add_queue(FoundRings.__name__, one)
            other.add_queue(FoundRings.__name__, two)
            assert sorted(ready(exporter.port).values()) == [3, 5]
        assert list(ready(exporter.port).values()) == [5]


@pytest.mark.nightly
def test_a_queue_whose_server_hangs_is_left_out_of_a_scrape(ring: SharedRingBuffer) -> None:
    answered = threading.Event()

    class Hanging(FoundRings):
        def depth(self, rank: int | None = None) -> QueueDepth:
            answered.wait()
            return super().depth(rank)

    with Hanging() as queue, Exporter(0) as exporter:
        exporter.add_queue(FoundRings.__name__, queue)
        exporter.add_ring(ring)
        try:
            assert not ready(exporter.port)
            assert value(scrape(exporter.port), "transport_ring_slots", state="free") == 4
        finally:
            answered.set()
        eventually(lambda: ready(exporter.port))


@pytest.mark.nightly
def test_every_one_of_scrapes_at_the_same_time_has_the_queue() -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with given_rings() as queue, Exporter(0) as exporter, ThreadPoolExecutor(4) as scrapers:
            exporter.add_queue(FoundRings.__name__, queue)
            assert all(scrapers.map(ready, [exporter.port] * 300))
    finally:
        sys.setswitchinterval(interval)


def test_a_queue_whose_connection_ends_meanwhile_is_left_out_quietly() -> None:
    class Ending(FoundRings):
        def depth(self, rank: int | None = None) -> QueueDepth:
            raise RuntimeError("Event loop is closed")

    with Ending() as queue, Exporter(0) as exporter:
        exporter.add_queue(FoundRings.__name__, queue)
        assert not ready(exporter.port)


def test_exporters_of_one_process_share_a_port_until_the_last_one_closes() -> None:
    with (
        SharedRingBuffer.create(slots=2, slot_bytes=64) as first,
        SharedRingBuffer.create(slots=3, slot_bytes=64) as last,
    ):
        with Exporter(0) as exporter:
            exporter.add_ring(first)
            with Exporter(exporter.port) as other:
                other.add_ring(last)
                seen = scrape(exporter.port)
                assert value(seen, "transport_ring_slots", segment=first.name, state="free") == 2
                assert value(seen, "transport_ring_slots", segment=last.name, state="free") == 3
            seen = scrape(exporter.port)
            assert value(seen, "transport_ring_slots", state="free") == 2
        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind(("127.0.0.1", exporter.port))


def test_a_port_of_another_process_is_refused_and_a_rollout_goes_on_without_metrics(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BusyPortError, match="metrics_port of its own"):
            Exporter(port)
        assert configured_exporter(Configuration(metrics_port=port)) is None
    assert f"no metrics on port {port}" in caplog.text


def test_a_launchers_number_of_the_process_is_added_to_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("LOCAL_RANK", "2")
    exporter = configured_exporter(Configuration(metrics_port=port - 2))
    assert exporter is not None
    with exporter:
        assert exporter.port == port


@pytest.mark.ucx
def test_mixins_and_trainers_answer_where_the_operator_says(monkeypatch: pytest.MonkeyPatch) -> None:
    class Worker(UCXXRolloutMixin): ...

    class Packer(UCXXDataPackerMixin): ...

    monkeypatch.setenv("TRANSPORT_METRICS_PORT", "0")
    worker, packer = Worker(), Packer()
    schema = Schema.of(tokens=("int32", 8))
    values = {"tokens": np.arange(8, dtype=np.int32)}
    run = f"rings:metrics-{secrets.token_hex(4)}-"
    try:
        worker.setup_ucxx(schema, rings=run, mode="thread")
        packer.setup_ucxx_packer(schemas=[schema], client=ClientOptions(name="packer 0"))
        packer.start_prefetch([worker.write_to_buffer(values)])
        batch = packer.collect_prefetch()
        assert batch is not None
        for payload in packer.consume(batch):
            payload.release()
        assert worker.metrics_port and packer.metrics_port
        assert value(scrape(worker.metrics_port), "transport_ring_published_total") == 1
        seen = scrape(packer.metrics_port)
        assert value(seen, "transport_packer_payloads_total", client="packer 0", outcome="consumed") == 1
        assert value(seen, "transport_client_reads_total", client="packer 0") == 1
        with Trainer(schema, run, client=ClientOptions(name="trainer 0")) as trainer:
            worker.write_to_buffer(values)
            taken = trainer.take(1, 30.0)
            assert taken is not None and trainer.metrics_port
            taken.consume()
            worker.write_to_buffer(values)
            seen = scrape(trainer.metrics_port)
            assert value(seen, "transport_packer_payloads_total", client="trainer 0", outcome="consumed") == 1
            assert value(seen, "transport_queue_finished_total", outcome="done") == 2
            assert value(seen, "transport_trainer_wait_seconds_total", client="trainer 0") > 0.0
            step = next(iter(trainer.steps(1)))
            seen = scrape(trainer.metrics_port)
            assert value(seen, "transport_trainer_groups_total", client="trainer 0", outcome="planned") == 1
            assert value(seen, "transport_trainer_steps_total", client="trainer 0", outcome="given") == 1
            step.consume()
    finally:
        packer.cleanup_ucxx_packer()
        worker.cleanup_ucxx()
    assert worker.metrics_port is None


@pytest.mark.ucx
def test_a_rollout_that_waits_for_its_trainers_at_its_end_has_metrics_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRANSPORT_METRICS_PORT", "0")
    rollout = Rollout(Schema.of(x="int64"), slots=2, mode="thread")
    ring, port = rollout.ring, rollout.metrics_port
    assert port is not None
    rollout.write_to_buffer({"x": 1})
    ending = threading.Thread(target=rollout.close, args=(30.0,))
    ending.start()
    try:
        eventually(lambda: ring.native.ended, "it says its end, and waits")
        assert value(scrape(port), "transport_ring_slots", state="ready") == 1
    finally:
        assert consumed(ring, 1)
        ending.join()


def test_the_dashboard_names_only_metrics_and_labels_that_exist() -> None:
    dashboard = json.loads((ROOT / "docs" / "grafana.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(expressions) > 10
    shown = set()
    for expression in expressions:
        (name,) = re.findall(r"transport_\w+", expression)
        shown.add(name)
        by = re.search(r"by \((\w+)\)", expression)
        assert by is None or by[1] in FAMILIES[name].labels, expression
        assert ("rate(" in expression) == (FAMILIES[name].kind == "counter"), expression
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_the_alerts_name_only_metrics_labels_and_values_that_exist() -> None:
    rules = [
        rule
        for group in yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())["groups"]
        for rule in group["rules"]
    ]
    assert len({rule["alert"] for rule in rules}) == len(rules) > 5
    for rule in rules:
        names = set(re.findall(r"transport_\w+", rule["expr"]))
        assert names
        assert names <= FAMILIES.keys(), rule["alert"]
        for name, labels in re.findall(r"(transport_\w+)\{(.*?)\}", rule["expr"]):
            assert set(re.findall(r"(\w+)=", labels)) <= set(FAMILIES[name].labels), rule["alert"]
        for name in names:
            counted = re.search(rf"(increase|rate)\({name}", rule["expr"]) is not None
            assert counted == (FAMILIES[name].kind == "counter"), rule["alert"]
        told = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        assert told <= {label for name in names for label in FAMILIES[name].labels} | {"instance", "job"}, rule["alert"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (apt-get install prometheus)")
def test_prometheus_takes_the_alerts_and_the_scrape_configuration(tmp_path: Path) -> None:
    folder = ROOT / "deploy" / "prometheus"
    subprocess.run(["promtool", "check", "rules", str(folder / "alerts.yml")], check=True)
    subprocess.run(["promtool", "check", "config", "--syntax-only", str(folder / "prometheus.yml")], check=True)


WITHOUT = """
import sys
sys.modules["prometheus_client"] = None
from transport import Rollout
from transport.packer.options import RingOptions
with Rollout(ring=RingOptions(slot_bytes=64), slots=1, mode="thread", drain_s=0) as rollout:
    print(rollout.metrics_port, rollout.write_to_buffer({"x": 1}).slot)
"""


def test_a_rollout_without_prometheus_client_says_so_and_goes_on() -> None:
    with Child(WITHOUT, env={"TRANSPORT_METRICS_PORT": "0"}, stderr=subprocess.PIPE) as rollout:
        assert rollout.line() == "None 0"
        assert rollout.process.stderr is not None
        assert "prometheus-client" in rollout.process.stderr.read()
