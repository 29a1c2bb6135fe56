"""deploy/Dockerfile: what it copies is there, and is all that the build may see. `make image-check` takes its steps."""

from __future__ import annotations

import re

from image_steps import DOCKERFILE, ROOT, steps

IGNORE = DOCKERFILE.with_name("Dockerfile.dockerignore")


def copied() -> list[str]:
    return [source for name, rest in steps(DOCKERFILE.read_text()) if name == "COPY" for source in rest.split()[:-1]]


def test_what_is_copied_is_there_and_nothing_else_is_sent() -> None:
    assert all((ROOT / source).exists() for source in copied())
    admitted = [line[1:] for line in IGNORE.read_text().splitlines() if line.startswith("!")]
    assert sorted(admitted) == sorted(copied())
    assert IGNORE.read_text().splitlines()[0] == "*"


def test_the_packages_of_the_system_are_those_that_make_asks_for() -> None:
    (install,) = (rest for name, rest in steps(DOCKERFILE.read_text()) if name == "RUN" and "apt-get install" in rest)
    target = (ROOT / "Makefile").read_text().split("\nprerequisites:")[1].split("\n\n")[0]
    asked = {word for words in re.findall(r"apt-get install ([^\"]+)\"", target) for word in words.split()}
    assert {"g++", "python3-dev"} <= asked
    assert {*asked, "make"} <= set(install.split())


def test_the_command_runs_as_a_user_without_privileges() -> None:
    order = [name for name, _ in steps(DOCKERFILE.read_text())]
    assert order.index("USER") < order.index("CMD")
    assert order.index("USER") > max(at for at, name in enumerate(order) if name == "RUN")
