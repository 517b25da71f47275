"""container/Dockerfile as its instructions, and its build stage done on this machine."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATH = ROOT / "container/Dockerfile"


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of a stage; `words` is all that follows its name, on one line."""

    stage: str
    name: str
    words: str

    @property
    def is_exec_form(self) -> bool:
        """Say whether it names a program and its arguments, without a shell."""
        return self.words.startswith("[")

    @property
    def listed(self) -> list[str]:
        """Return the words of an exec form."""
        return [str(word) for word in json.loads(self.words)]

    @property
    def flags(self) -> dict[str, str]:
        """Return the flags before the words proper."""
        found = (
            word[2:].partition("=")[::2] for word in self.words.split() if word.startswith("--")
        )
        return dict(found)

    @property
    def pairs(self) -> dict[str, str]:
        """Return what an ENV or a LABEL sets."""
        return dict(word.split("=", 1) for word in shlex.split(self.words))


def read_dockerfile(text: str) -> list[Instruction]:
    """Return the instructions in order; a stage without a name is the empty one."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    found: list[Instruction] = []
    stage = ""
    for line in joined.splitlines():
        name, words = line.split(maxsplit=1)
        if name == "FROM":
            stage = words.partition(" AS ")[2]
        found.append(Instruction(stage, name, words))
    return found


INSTRUCTIONS = read_dockerfile(PATH.read_text(encoding="utf-8"))


def of_stage(stage: str, *names: str) -> list[Instruction]:
    """Return the instructions with these names in a stage; the last stage has no name."""
    return [it for it in INSTRUCTIONS if it.stage == stage and it.name in names]


def only(stage: str, name: str) -> Instruction:
    """Return the one instruction of this name."""
    [found] = of_stage(stage, name)
    return found


def copied_from_context(stage: str) -> list[tuple[list[str], str]]:
    """Return sources and destination of each COPY that takes files of the repository."""
    copies = [it.words.split() for it in of_stage(stage, "COPY") if "from" not in it.flags]
    return [(words[:-1], words[-1]) for words in copies]


def copied_sources(stage: str) -> set[str]:
    """Return the files and folders of the context that a stage copies."""
    return {source for sources, _ in copied_from_context(stage) for source in sources}


@dataclass(frozen=True, slots=True)
class Image:
    """Files of the build stage, under a folder of this machine instead of the root."""

    root: Path

    def here(self, text: str) -> str:
        """Return a text with every path of the image replaced by where that is here."""
        made = ("/build", "/opt/libraries", "/opt/tidemill", "/opt/kernels")
        places = "|".join(map(re.escape, (*made, *volumes())))
        return re.sub(rf"({places})(?![\w-])", lambda found: f"{self.root}{found[0]}", text)

    def path(self, text: str) -> Path:
        """Return where a path of the image is here."""
        return Path(self.here(text))

    @property
    def environment(self) -> Mapping[str, str]:
        """Return what the image sets for its processes, and nothing of this machine."""
        return {name: self.here(value) for name, value in only("", "ENV").pairs.items()}

    def command(self, *words: str) -> list[str]:
        """Return what a container runs that was given these words, or none."""
        entry, default = only("", "ENTRYPOINT").listed, only("", "CMD").listed
        name, *arguments = [*entry, *(words or default)]
        return [self.program(name), *arguments]

    @property
    def health_check(self) -> list[str]:
        """Return what the image checks its health by."""
        name, *arguments = json.loads(only("", "HEALTHCHECK").words.partition("CMD ")[2])
        return [self.program(name), *arguments]

    def program(self, name: str) -> str:
        """Return the program that the image finds under this name."""
        found = shutil.which(name, path=self.environment["PATH"])
        assert found is not None, f"the image has no {name}"
        return found


def volumes() -> Sequence[str]:
    """Return the folders that a container may write to."""
    return only("", "VOLUME").listed


def build_image(root: Path) -> Image:
    """Do all that the build stage says, with pip's configuration and cache of this machine."""
    image = Image(root)
    folder = image.path(only("build", "WORKDIR").words)
    folder.mkdir(parents=True)
    for place in volumes():
        image.path(place).mkdir(parents=True)
    for it in of_stage("build", "COPY", "RUN"):
        if it.name == "COPY":
            *sources, destination = it.words.split()
            _copy(sources, folder / destination)
        else:
            # torch's builds with CUDA bring triton along; its build for CPUs, which is here, none.
            words = it.words.replace(
                "> requirements.txt", "> requirements.txt && echo triton >> requirements.txt"
            )
            _run(image.here(words), folder)
    return image


def _copy(sources: Sequence[str], destination: Path) -> None:
    for source in (ROOT / name for name in sources):
        if source.is_dir():
            # As a builder does: a link stays one.
            left_out = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, destination, symlinks=True, ignore=left_out, dirs_exist_ok=True)
        else:
            shutil.copy(source, destination)


def _run(command: str, folder: Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["/bin/sh", "-c", command],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
