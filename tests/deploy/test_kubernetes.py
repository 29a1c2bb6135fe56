"""deploy/kubernetes: its objects are valid, and what several of them state about one thing agrees."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
OLDEST = "1.28"  # of podFailurePolicy by default, and of all else here
UNITS = {"Gi": 1 << 30, "Mi": 1 << 20}
RUN = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())


def objects(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def one(name: str, kind: str, called: str) -> dict[str, Any]:
    (found,) = (each for each in objects(name) if (each["kind"], each["metadata"]["name"]) == (kind, called))
    return found


def pod(name: str, called: str) -> dict[str, Any]:
    """Of a Job."""
    found: dict[str, Any] = one(name, "Job", called)["spec"]["template"]["spec"]
    return found


def every_object() -> list[Any]:
    return [
        pytest.param(each, id=f"{name}-{each['kind']}-{each['metadata']['name']}")
        for name in (*RUN["resources"], "trainers.yaml")
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


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_what_kubectl_makes_of_the_values_is_valid(tmp_path: Path) -> None:
    folder = shutil.copytree(FOLDER, tmp_path / "run")
    (folder / "secret").write_bytes(bytes(32))
    made = subprocess.run(["kubectl", "kustomize", str(folder)], check=True, capture_output=True, text=True).stdout
    found = list(yaml.safe_load_all(made))
    for each in found:
        kubernetes_validate.validate(each, OLDEST, strict=True)
    kinds = sorted((each["kind"], each["metadata"]["name"].partition("-")[0]) for each in found)
    assert kinds == [
        ("ConfigMap", "run"),
        ("Deployment", "directory"),
        ("Job", "rollout"),
        ("Job", "trainer"),
        ("Secret", "transport"),
        ("Service", "directory"),
    ]
    images = {each["spec"]["template"]["spec"]["containers"][0]["image"] for each in found if each["kind"] == "Job"}
    assert images == {f"{RUN['images'][0]['newName']}:{RUN['images'][0]['newTag']}"}


def test_the_values_of_a_run_are_those_that_its_objects_use() -> None:
    (values,) = RUN["configMapGenerator"]
    given = dict(line.split("=", 1) for line in values["literals"])
    (secret,) = RUN["secretGenerator"]
    (patch,) = RUN["patches"]
    replaced = {each["path"]: each["value"] for each in yaml.safe_load(patch["patch"])}
    assert replaced == {"/spec/completions": int(given["ROLLOUTS"]), "/spec/parallelism": int(given["ROLLOUTS"])}
    (service,) = (each for each in objects("directory.yaml") if each["kind"] == "Service")
    assert f"//{service['metadata']['name']}:{service['spec']['ports'][0]['port']}/" in given["RINGS"]
    for each in (pod("rollouts.yaml", "rollout"), pod("trainer.yaml", "trainer")):
        (container,) = each["containers"]
        assert container["envFrom"] == [{"configMapRef": {"name": values["name"]}}]
        assert container["image"] == RUN["images"][0]["name"]
        used = set(re.findall(r"\$\((\w+)\)", " ".join(container["args"]))) - {"JOB_COMPLETION_INDEX"}
        assert used <= given.keys()
        (of_secret,) = (volume["secret"] for volume in each["volumes"] if "secret" in volume)
        assert of_secret["secretName"] == secret["name"]
        (mount,) = (mount for mount in container["volumeMounts"] if mount["name"] == "secret")
        path = next(entry["value"] for entry in container["env"] if entry["name"] == "TRANSPORT_SECRET_FILE")
        assert path == f"{mount['mountPath']}/{secret['files'][0]}"


@pytest.mark.parametrize(("name", "called"), [("rollouts.yaml", "rollout"), ("trainer.yaml", "trainer")])
def test_probes_and_annotations_name_the_ports_that_the_program_has(name: str, called: str) -> None:
    template = one(name, "Job", called)["spec"]["template"]
    (container,) = template["spec"]["containers"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert container["livenessProbe"]["httpGet"]["port"] in ports
    assert f"TRANSPORT_METRICS_PORT={ports['metrics']}" in RUN["configMapGenerator"][0]["literals"]
    assert template["metadata"]["annotations"]["prometheus.io/port"] == str(ports["metrics"])
    if called == "rollout":
        assert container["readinessProbe"]["tcpSocket"]["port"] in ports
        assert f"--port={ports['listener']}" in container["args"]


def test_the_patch_for_infiniband_makes_a_valid_rollout() -> None:
    (patch,) = objects("infiniband.yaml")
    patched = with_patch(one("rollouts.yaml", "Job", "rollout"), patch)
    kubernetes_validate.validate(patched, OLDEST, strict=True)
    rollout = patched["spec"]["template"]
    assert rollout["spec"]["hostNetwork"] is True
    assert {each["name"] for each in rollout["spec"]["containers"][0]["volumeMounts"]} == {"shm", "secret"}
    (rule,) = rollout["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert rule["labelSelector"]["matchLabels"] == rollout["metadata"]["labels"]


def test_a_rollout_has_time_to_leave_and_memory_for_its_ring() -> None:
    rollout = pod("rollouts.yaml", "rollout")
    (container,) = rollout["containers"]
    leave = next(float(word.removeprefix("--leave=")) for word in container["args"] if word.startswith("--leave="))
    assert leave < rollout["terminationGracePeriodSeconds"]
    (shm,) = (each["emptyDir"] for each in rollout["volumes"] if "emptyDir" in each)
    assert shm["medium"] == "Memory"
    assert bytes_of(shm["sizeLimit"]) < bytes_of(container["resources"]["limits"]["memory"])  # which it counts towards
