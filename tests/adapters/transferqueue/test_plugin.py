"""How TransferQueue and verl find the manager: options, the configuration to paste, the plugin."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from transport.errors import ConfigurationError

pytest.importorskip("transfer_queue", reason="TransferQueue is not installed: pip install TransferQueue")
from omegaconf import OmegaConf

from transport.adapters.transferqueue import BACKEND, Loader, options_of, provide

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"ring_bites": 1}, "ring_bites.*there are ring_bytes"),
        ({"samples": 17}, "samples=17 must be 1 to 16"),
        ({"timeout_s": "soon"}, "timeout_s"),
        ({"timeout_s": float("nan")}, "timeout_s=nan.* above 0 and finite"),
        ({"most_bytes": 0}, "most_bytes=0.* above 0"),
        (["ring_bytes"], "is a ListConfig: give options by name"),
    ],
)
def test_a_wrong_option_is_an_error_that_names_it(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        options_of(OmegaConf.create(config))


def test_the_configuration_to_paste_is_accepted() -> None:
    page = Path(__file__).resolve().parents[3] / "docs" / "ADAPTERS.md"
    block = page.read_text(encoding="utf-8").split("\n## TransferQueue\n")[1].split("```yaml\n")[1].split("```")[0]
    backend = OmegaConf.create(block).backend
    assert backend.storage_backend == BACKEND
    assert options_of(backend[BACKEND]).ring_bytes == 1 << 28


def test_the_provider_puts_into_the_configuration_what_makes_other_processes_import_it() -> None:
    conf = OmegaConf.create({"backend": {"storage_backend": "PayloadTransport"}}, flags={"allow_objects": True})
    assert provide(conf)
    script = (
        "import pickle, sys; conf = pickle.load(sys.stdin.buffer); "
        "from transfer_queue.storage.managers.base import StorageManagerFactory as factory; "
        "assert 'PayloadTransport' in factory._registry"
    )
    subprocess.run([sys.executable, "-c", script], input=pickle.dumps(conf), check=True, timeout=100)
    assert isinstance(conf.backend.PayloadTransport.loader, Loader)


PROBE = "import importlib.util, transport.adapters.transferqueue_plugin; importlib.util.find_spec('transfer_queue'); "


@pytest.mark.parametrize("before", ["", PROBE, "import transfer_queue; "], ids=["", "after a probe", "imported"])
def test_the_plugin_registers_it_when_transferqueue_is_imported_and_imports_nothing_itself(before: str) -> None:
    script = before + (
        "import sys; import transport.adapters.transferqueue_plugin; "
        f"assert {'import transfer' in before} or not "
        "{'torch', 'ray', 'transfer_queue', 'numpy'} & set(sys.modules); "
        "import transfer_queue; "
        "from transfer_queue.storage.managers.base import StorageManagerFactory as factory; "
        "assert 'PayloadTransport' in factory._registry"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=100)


def test_verl_loads_the_plugin_by_its_entry_point() -> None:
    from importlib.metadata import entry_points

    (found,) = [each for each in entry_points(group="verl.plugins") if each.name == "payload_transport"]
    assert found.load().FRAMEWORK == "transfer_queue"
