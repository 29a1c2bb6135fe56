"""The environment of `make adapters`: the frameworks that adapters are for, in build/adapters, without a GPU.

    .venv/bin/python tests/support/adapters_environment.py cu12

Versions are those of constraints-adapters.txt, requirements those of pyproject.toml's dependency groups. What cannot be
installed or imported ends the program with an error, so that no test is skipped for want of it. The package is
installed editable, from what .venv has compiled.

vLLM and SGLang need a newer transformers than verl: they, torchft and AReaL are in build/engines, where the packages of
build/adapters are found after its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from constraints import ADAPTERS_FILE, ROOT, for_adapters, of_group
from waiting import waiting

HOME = ROOT / "build" / "adapters"
PYTHON = HOME / "bin" / "python"
ENGINES = ROOT / "build" / "engines"
ENGINES_PYTHON = ENGINES / "bin" / "python"
STAMP = HOME / "stamp"
VARIANTS = {"cu12": ("cu12", "gpu"), "cu13": ("cu13", "gpu13")}
_LONGEST_S = 1800.0

# Each framework, and the modules of it that tests use.
IMPORTS = {
    "torch": ("torch", "torch.distributed.elastic.rendezvous.api", "torch.distributed.run"),
    "destinations": ("gcsfs", "huggingface_hub", "transformers"),
    "cupy": ("cupy",),
    "ray": ("ray", "ray.cluster_utils"),
    "transfer_queue": ("transfer_queue",),
    "verl": ("verl.checkpoint_engine.base", "verl.workers.engine_workers", "verl.trainer.ppo.ray_trainer"),
    "cosmos_rl": (
        *("cosmos_rl.comm.base", "cosmos_rl.utils.payload_transport", "cosmos_rl.utils.trajectory"),
        "cosmos_rl.dispatcher.run_web_panel",  # its trainers import what torch 2.13 no longer has
    ),
}

ENGINE_IMPORTS = {
    "vllm": (
        "vllm.distributed.weight_transfer",
        "vllm.model_executor.model_loader.reload",
        "vllm.v1.worker.gpu_worker",
    ),
    "sglang": ("sglang.srt.model_executor.model_runner_components.weight_updater",),
    "torchft": ("torchft.manager", "torchft.checkpointing.transport_test"),
    "areal": ("areal.infra.rpc.rtensor",),
}

# torchvision's wheel is for torch with CUDA, and cannot be imported beside one without. cosmos-rl imports it for
# pictures and videos only. Without metadata of a distribution, transformers does not take it for torchvision.
TORCHVISION = {
    "__init__.py": '"""A stand-in: names that cosmos-rl imports; nothing here works on pictures."""\n'
    "from . import io, transforms  # noqa: F401\n",
    "io.py": "",
    "transforms/__init__.py": "from .functional import InterpolationMode  # noqa: F401\n",
    "transforms/functional.py": "import enum\n\n\n"
    'class InterpolationMode(enum.Enum):\n    BICUBIC = "bicubic"\n    BILINEAR = "bilinear"\n',
}

# The same for vLLM and SGLang, whose transformers takes it for the real one: every name that is imported is there.
_ANY = '''"""A stand-in: whatever name is imported; nothing here works on pictures."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})

'''
_MODES = "NEAREST NEAREST_EXACT BILINEAR BICUBIC BOX HAMMING LANCZOS"
ENGINES_TORCHVISION = {
    "__init__.py": _ANY + '__version__ = "0.28.0"\nfrom . import io, transforms\n',
    "io.py": _ANY,
    "transforms/__init__.py": _ANY + "from . import functional, v2\nfrom .functional import InterpolationMode\n",
    "transforms/functional.py": _ANY
    + f'import enum\n\nInterpolationMode = enum.Enum("InterpolationMode", "{_MODES}")\n',
    "transforms/v2/__init__.py": _ANY + "from ..functional import InterpolationMode\nfrom . import functional\n",
    "transforms/v2/functional.py": _ANY + "from ..functional import InterpolationMode\n",
}


def run(what: str, command: list[str], **environment: str) -> None:
    """One step. What it says is shown only if it fails, which ends the program."""
    print(f"{what} …", flush=True)
    start = time.monotonic()
    with waiting(what, 120 if what.startswith("installing torch") else 20):
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=_LONGEST_S
        )
    if done.returncode:
        sys.stderr.write(done.stdout[-4000:] + done.stderr[-8000:])
        raise SystemExit(f"build/adapters could not be made: {what} failed with exit code {done.returncode}")
    print(f"    {time.monotonic() - start:.0f} s", flush=True)


def packages(variant: str) -> tuple[list[str], list[str]]:
    """What pip installs with its requirements, and without them."""
    return for_adapters(VARIANTS[variant]), of_group("adapters-alone")


def fingerprint(variant: str) -> str:
    """Of everything that the installed packages follow from."""
    parts = [
        *packages(variant),
        of_group("adapters-engines"),
        TORCHVISION,
        ENGINES_TORCHVISION,
        sys.version,
        ADAPTERS_FILE.read_text(encoding="utf-8"),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def install_frameworks(variant: str) -> None:
    shutil.rmtree(HOME, ignore_errors=True)
    run("making build/adapters", [sys.executable, "-m", "venv", str(HOME)])
    constrained = {"PIP_CONSTRAINT": str(ADAPTERS_FILE), "PIP_BUILD_CONSTRAINT": str(ADAPTERS_FILE)}
    pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    required, alone = packages(variant)
    run(f"installing {', '.join(of_group('adapters')[:4])} and what they need", [*pip, *required], **constrained)
    run(f"installing {', '.join(alone)} alone", [*pip, "--no-deps", *alone], **constrained)
    write_torchvision(PYTHON, TORCHVISION)
    install_engines()
    STAMP.write_text(fingerprint(variant), encoding="utf-8")


def write_torchvision(python: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        file = Path(site_packages(python), "torchvision", name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")


def install_engines() -> None:
    shutil.rmtree(ENGINES, ignore_errors=True)
    run("making build/engines", [sys.executable, "-m", "venv", str(ENGINES)])
    line = f"import site; site.addsitedir({site_packages()!r})\n"
    Path(site_packages(ENGINES_PYTHON), "adapters.pth").write_text(line, encoding="utf-8")
    write_torchvision(ENGINES_PYTHON, ENGINES_TORCHVISION)
    pip = [str(ENGINES_PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    engines = of_group("adapters-engines")
    run(f"installing {', '.join(engines[:2])} alone", [*pip, "--no-deps", "--ignore-installed", *engines])


def site_packages(python: Path = PYTHON) -> str:
    command = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def install_package() -> None:
    """This package, editable. Its wheel is built by .venv, where the compiler's work is already done."""
    with tempfile.TemporaryDirectory() as folder:
        build = f"import scikit_build_core.build as build; build.build_editable({folder!r})"
        run("building the package", [sys.executable, "-c", build])
        (wheel,) = Path(folder).glob("*.whl")
        pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index"]
        run("installing the package", [*pip, "--force-reinstall", str(wheel)])


def check_imports() -> None:
    for python, imports in ((PYTHON, IMPORTS), (ENGINES_PYTHON, ENGINE_IMPORTS)):
        for name, modules in imports.items():
            run(f"importing {name}", [str(python), "-W", "ignore", "-c", f"import {', '.join(modules)}"])


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1] not in VARIANTS:
        raise SystemExit(f"usage: adapters_environment.py {'|'.join(VARIANTS)}")
    variant = sys.argv[1]
    if not STAMP.exists() or STAMP.read_text(encoding="utf-8") != fingerprint(variant):
        install_frameworks(variant)
    install_package()
    check_imports()


if __name__ == "__main__":
    main()
