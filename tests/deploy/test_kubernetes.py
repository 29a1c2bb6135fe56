"""deploy/kubernetes: its objects are valid, and what several of them state about one thing agrees."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
OLDEST = "1.28"  # the first that labels the pods of a StatefulSet with their number
UNITS = {"Gi": 1 << 30, "Mi": 1 << 20}


def objects(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def one(name: str, kind: str, called: str) -> dict[str, Any]:
    (found,) = (each for each in objects(name) if (each["kind"], each["metadata"]["name"]) == (kind, called))
    return found


def every_object() -> list[Any]:
    return [
        pytest.param(each, id=f"{name}-{each['kind']}-{each['metadata']['name']}")
        for name in ("job.yaml", "trainers.yaml")
        for each in objects(name)
    ]


def with_patch(whole: Any, patch: Any) -> Any:
    """A strategic merge as far as this patch needs one: containers are merged by name."""
    if isinstance(whole, dict) and isinstance(patch, dict):
        return {**whole, **{name: with_patch(whole.get(name), value) for name, value in patch.items()}}
    if isinstance(patch, list) and patch and isinstance(patch[0], dict) and "name" in patch[0]:
        named = {each["name"]: each for each in whole or []}
        return list({**named, **{each["name"]: with_patch(named.get(each["name"]), each) for each in patch}}.values())
    return patch


def bytes_of(size: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(Gi|Mi)", size).groups()  # type: ignore[union-attr]
    return int(number) * UNITS[unit]


@pytest.mark.parametrize("version", [OLDEST, "1.36"])
@pytest.mark.parametrize("wanted", every_object())
def test_every_object_is_one_of_kubernetes(wanted: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(wanted, version, strict=True)


def test_an_unknown_key_would_be_found() -> None:
    wrong = one("job.yaml", "StatefulSet", "rollout")
    wrong["spec"]["template"]["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, OLDEST, strict=True)


def test_the_patch_for_infiniband_makes_a_valid_rollout() -> None:
    (patch,) = objects("infiniband.yaml")
    patched = with_patch(one("job.yaml", "StatefulSet", "rollout"), patch)
    kubernetes_validate.validate(patched, OLDEST, strict=True)
    pod = patched["spec"]["template"]["spec"]
    assert pod["hostNetwork"] is True
    assert {each["name"] for each in pod["containers"][0]["volumeMounts"]} == {"shm", "secret"}  # nothing went
    (rule,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert rule["labelSelector"] == one("job.yaml", "StatefulSet", "rollout")["spec"]["selector"]


def test_the_trainer_asks_every_rollout_by_its_name_and_port() -> None:
    rollout = one("job.yaml", "StatefulSet", "rollout")
    service = one("job.yaml", "Service", rollout["spec"]["serviceName"])
    port = service["spec"]["ports"][0]["port"]
    (container,) = one("job.yaml", "Job", "trainer")["spec"]["template"]["spec"]["containers"]
    servers = next(word for word in container["args"] if word.startswith("--servers="))
    count = rollout["spec"]["replicas"]
    expected = [f"rollout-{number}.{service['metadata']['name']}:{port}" for number in range(count)]
    assert servers == f"--servers={','.join(expected)}"
    assert f"--rollouts={count}" in container["args"]
    assert f"--port={port}" in rollout["spec"]["template"]["spec"]["containers"][0]["args"]


def test_a_rollout_has_time_to_leave_and_memory_for_its_ring() -> None:
    pod = one("job.yaml", "StatefulSet", "rollout")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    leave = next(float(word.removeprefix("--leave=")) for word in container["args"] if word.startswith("--leave="))
    assert leave < pod["terminationGracePeriodSeconds"]
    (shm,) = (each["emptyDir"] for each in pod["volumes"] if each["name"] == "shm")
    assert shm["medium"] == "Memory"
    assert bytes_of(shm["sizeLimit"]) < bytes_of(container["resources"]["limits"]["memory"])  # which it counts towards


def test_there_are_more_agents_of_torchrun_than_nodes_that_train() -> None:
    trainer = one("trainers.yaml", "StatefulSet", "trainer")
    (container,) = trainer["spec"]["template"]["spec"]["containers"]
    nodes = next(int(word.removeprefix("--nnodes=")) for word in container["args"] if word.startswith("--nnodes="))
    assert trainer["spec"]["replicas"] > nodes
    (store,) = one("trainers.yaml", "StatefulSet", "store")["spec"]["template"]["spec"]["containers"]
    assert store["args"][:2] == ["--appendonly", "yes"]  # the rendezvous refuses a server that forgets
