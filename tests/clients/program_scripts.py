"""Other people's programs: scripts that run in their own environments against our API.

`python -m tests.clients.program_scripts` updates the table of docs/integrations/programs.md.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "programs"
REQUIREMENTS = Path(__file__).parent / "requirements"
PAGE = ROOT / "docs/integrations/programs.md"
SECONDS = 300
# Several share an environment if their requirements agree.
SHARED = dict.fromkeys(("cohere", "langchain-openai", "pydantic-ai-slim"), "chat-clients")
# Switches off their downloads and telemetry.
QUIET = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TELEMETRY_ENABLED": "false",
}
# The arguments of programs that run a batch, for a server and for a deployment.
BATCHES: dict[str, Any] = {
    "airflow": {"status": "completed", "metadata": {"dag": "sums"}, "answers": ["19", "20"]},
    "curator": {"sums": ["19", "20", "21"]},
    "distilabel": {"answers": [["19"], ["20"]]},
    "litellm_batch": {"listed": True, "answers": {"line-12": "19", "line-13": "20"}},
}


@dataclass(frozen=True, slots=True)
class Program:
    """A script of a program; its docstring has the title, the package and the configuration.

    `note` is further information for users.
    """

    name: str
    package: str
    runs: str
    points: str
    note: str

    @property
    def version(self) -> str:
        """Return the version pinned in its environment."""
        pins = (REQUIREMENTS / f"{self.environment}.txt").read_text(encoding="utf-8")
        [version] = re.findall(rf"^{re.escape(self.package)}==(\S+)$", pins, re.MULTILINE)
        return version

    @property
    def environment(self) -> str:
        """Return the name of its environment, which is the name of its requirements file."""
        if self.package in SHARED:
            return SHARED[self.package]
        [path] = REQUIREMENTS.glob(f"{self.package}-[0-9]*.txt")
        return path.stem

    @property
    def row(self) -> str:
        """Return its row of the table."""
        note = f"; {self.note}" if self.note else ""
        return f"| {self.package} {self.version} | {self.runs} | {self.points} | works{note} |"


def program(name: str) -> Program:
    """Return the program of a script."""
    tree = ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
    runs, _, rest = (ast.get_docstring(tree) or "").partition("\n\n")
    fields = dict(line.split(": ", 1) for line in rest.splitlines())
    return Program(
        name, fields["Package"], runs.removesuffix("."), fields["Point"], fields.get("Note", "")
    )


def programs() -> list[Program]:
    """Return all programs, by the names of their packages."""
    found = [program(path.stem) for path in FOLDER.glob("*.py")]
    return sorted(found, key=lambda each: (each.package, each.name))


def table() -> str:
    """Return the table for the page."""
    head = "| program | what was run | how it is pointed here | result |\n|---|---|---|---|\n"
    return head + "".join(f"{each.row}\n" for each in programs())


def run_program(each: Program, folder: Path, url: str, key: str, **more: str) -> Any:
    """Return the output of a script, run in a folder against a base URL; skips if it cannot run.

    Fails with the program's whole output unless it exits with 0.
    """
    installed = ROOT / f".venv-{each.environment}/.installed"
    if not installed.exists():
        pytest.skip(f"`make {installed.relative_to(ROOT)}` installs {each.package}")
    done = subprocess.run(
        [str(installed.parent / "bin/python"), str(FOLDER / f"{each.name}.py")],
        cwd=folder,
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            # A script has its program's name, and must not shadow it.
            "PYTHONSAFEPATH": "1",
            "OPENAI_BASE_URL": url,
            "OPENAI_API_KEY": key,
            **QUIET,
            **more,
        },
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    printed = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(printed[-1])


def main() -> None:
    """Write the table into the page."""
    head, _, rest = PAGE.read_text(encoding="utf-8").partition("| program |")
    tail = rest.partition("\n\n")[2]
    PAGE.write_text(f"{head}{table()}\n{tail}", encoding="utf-8")


if __name__ == "__main__":
    main()
