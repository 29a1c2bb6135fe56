"""Commands that install a missing package, for error messages.

This project is installed from a checkout and is on no package index, so messages name the missing packages themselves.
"""

from __future__ import annotations

from typing import Final

# The optional dependencies of pyproject.toml, and what else a message may ask for.
PACKAGES: Final[dict[str, tuple[str, ...]]] = {
    "cu12": ("ucxx-cu12>=0.52,<0.53",),
    "cu13": ("ucxx-cu13>=0.52,<0.53",),
    "verbs": ("nixl-cu12>=1.5,<1.6",),
    "verbs13": ("nixl-cu13>=1.5,<1.6",),
    "gpu": ("cupy-cuda12x>=13.3",),
    "gpu13": ("cupy-cuda13x>=13.6",),
    "redis": ("redis[hiredis]>=5.0",),
    "metrics": ("prometheus-client>=0.20",),
    "s3": ("fsspec>=2024.6", "s3fs>=2024.6"),
    "gs": ("fsspec>=2024.6", "gcsfs>=2024.6"),
    "hf": ("fsspec>=2024.6", "huggingface_hub>=0.24"),
    "torch": ("torch>=2.6",),
    "torchrun": ("torch>=2.5",),  # the first that reads the entry points of other packages
    "otel": ("opentelemetry-api>=1.20",),
    "images": ("pillow>=10.0",),
    "demo": ("gymnasium>=1.0",),
    "bench": ("matplotlib>=3.9", "xxhash>=3.4"),
    "cmake": ("cmake>=3.24",),
    "libucx": ("libucx-cu12",),
    "ray": ("ray>=2.40",),
    "verl": ("verl>=0.9,<0.10",),
    "cosmos-rl": ("cosmos-rl>=0.4.7,<0.5",),
    "tensordict": ("tensordict>=0.10",),
    "vllm": ("vllm>=0.33,<0.34",),
    "sglang": ("sglang>=0.5.23,<0.6",),
    "torchft": ("torchft>=0.2,<0.3",),
    "areal": ("areal>=1.0.4,<1.1",),
    "TransferQueue": ("TransferQueue>=0.1.9,<0.2", "tensordict"),
}


def install(what: str, *options: str) -> str:
    """Return the command that installs what the extra ``what`` would, or another package of the list."""
    packages = (f"'{each}'" if set(each) & set("<>[") else each for each in PACKAGES[what])
    return " ".join(["pip install", *options, *packages])
