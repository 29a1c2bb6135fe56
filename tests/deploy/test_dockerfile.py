"""deploy/Dockerfile: what it copies is there, and is all that the build may see. `make image-check` takes its steps."""

from __future__ import annotations

import re

from image_steps import DOCKERFILE, ROOT, steps

IGNORE = DOCKERFILE.with_name("Dockerfile.dockerignore")


def copied() -> list[str]:
    """From the checkout."""
    sources = (rest.split()[:-1] for name, rest in steps(DOCKERFILE.read_text()) if name == "COPY")
    return [source for each in sources if not each[0].startswith("--from=") for source in each]


def test_what_is_copied_is_there_and_nothing_else_is_sent() -> None:
    assert all((ROOT / source).exists() for source in copied())
    admitted = [line[1:] for line in IGNORE.read_text().splitlines() if line.startswith("!")]
    assert sorted(admitted) == sorted(copied())
    assert IGNORE.read_text().splitlines()[0] == "*"


def stages() -> list[list[tuple[str, str]]]:
    found: list[list[tuple[str, str]]] = []
    for name, rest in steps(DOCKERFILE.read_text()):
        if name == "FROM":
            found.append([])
        found[-1].append((name, rest))
    return found


def test_the_image_has_no_compiler_and_the_stage_that_builds_has_what_make_asks_for() -> None:
    build, image = (
        {word for name, rest in stage if name == "RUN" and "apt-get install" in rest for word in rest.split()}
        for stage in stages()
    )
    target = (ROOT / "Makefile").read_text().split("\nprerequisites:")[1].split("\n\n")[0]
    asked = {word for words in re.findall(r"apt-get install ([^\"]+)\"", target) for word in words.split()}
    assert {"g++", "python3-dev"} <= asked <= build
    assert not image & {"g++", "gcc", "make", "python3-dev"}


def test_the_command_runs_as_a_user_without_privileges() -> None:
    order = [name for name, _ in stages()[-1]]
    assert order.index("USER") < order.index("CMD")
    assert order.index("USER") > max(at for at, name in enumerate(order) if name == "RUN")
