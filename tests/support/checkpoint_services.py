"""Stand-ins of the services that keep checkpoints, each in a process of its own that forgets everything at its end."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

import pytest
from helpers import Child

from transport.cooldown import open_destination
from transport.cooldown.destinations import bucket

SECRET: Final = "wJalrXUtnFEMI/K7MDENG-testing-only"
PART: Final = 5 << 20  # the least that S3 takes, so that a few MiB are several
_ENVIRONMENT: Final = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_MAX_ATTEMPTS": "1",  # s3fs repeats as well
    "HF_TOKEN": "hf_testing",
}


class Service(NamedTuple):
    """A service, and the module of tests/support that stands in for it."""

    url: str
    module: str
    variable: str  # of the environment: where the service is
    packages: tuple[str, ...]

    @contextlib.contextmanager
    def prepared(self) -> Iterator[None]:
        """Give its packages what they look for in the environment; skip without them."""
        if missing := [each for each in self.packages if not importlib.util.find_spec(each)]:
            pytest.skip(f"{', '.join(missing)} cannot be imported")
        with pytest.MonkeyPatch.context() as patch:
            for name, value in _ENVIRONMENT.items():
                patch.setenv(name, value)
            patch.setattr(bucket, "PART", PART)
            if self is S3:
                # One, which begins here: the thread of a call that is given up stays busy, and the next begins another.
                threads = ThreadPoolExecutor(1)
                threads.submit(int).result()
                importlib.import_module("fsspec.asyn").get_loop().set_default_executor(threads)
            if self is HUB:
                patch.setattr("tqdm.tqdm.monitor_interval", 0)  # its thread would stay
                patch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
                patch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_PROGRESS_BARS", True)
            yield

    @contextlib.contextmanager
    def serving(self, port: int = 0) -> Iterator[Child]:
        """Start it, and lead to it the destinations that are opened from now on."""
        command = f"import {self.module}; {self.module}.main()"
        with Child(command, port) as server, pytest.MonkeyPatch.context() as patch:
            endpoint = server.line()
            patch.setenv(self.variable, endpoint)
            if self is HUB:
                # The others are made of the first when the package is imported, which another test may have done.
                patch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
                for module in ("constants", "file_download"):
                    template = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
                    patch.setattr(f"huggingface_hub.{module}.HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
            with open_destination(self.url) as place:
                place.names("")  # begins a thread of fsspec's, which stays
            yield server


S3: Final = Service(
    url="s3://checkpoints",
    module="s3_server",
    variable="AWS_ENDPOINT_URL",
    packages=("moto", "s3fs", "flask"),
)
GS: Final = Service(
    url="gs://checkpoints/below",
    module="gcs_server",
    variable="STORAGE_EMULATOR_HOST",
    packages=("gcsfs",),
)
HUB: Final = Service(
    url="hf://user/model",
    module="hub_server",
    variable="HF_ENDPOINT",
    packages=("huggingface_hub",),
)
