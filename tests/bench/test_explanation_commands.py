"""The commands in docs/explanation are accepted by make and by the parsers of their programs."""

from __future__ import annotations

import argparse
import re
import runpy
import shlex
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.faults import in_process
from tidemill.cli.main import parse
from tools.docs_report import blocks_of

ROOT = Path(__file__).parents[2]
# tools/docs_report.py finds this pattern, too.
PAGES = sorted(ROOT.glob("docs/explanation/*.md"))
INLINE = re.compile(r"`((?:make|python -m|tidemill|\.venv/bin/python -m) [^`]+)`")


class Parsed(Exception):
    """A program has parsed its arguments."""


def parse_all(commands: list[list[str]]) -> int:
    """Run each program until it has parsed its arguments, before it does anything."""

    def parsing(method: Callable[..., Any]) -> Callable[..., Any]:
        def parse(self: argparse.ArgumentParser, *arguments: Any, **keywords: Any) -> Any:
            result = method(self, *arguments, **keywords)
            if sys._getframe(1).f_globals["__name__"] == "argparse":
                return result
            raise Parsed

        return parse

    for name in ("parse_args", "parse_known_args"):
        method = getattr(argparse.ArgumentParser, name)
        setattr(argparse.ArgumentParser, name, parsing(method))
    warnings.simplefilter("ignore", RuntimeWarning)  # of modules that are imported already
    for module, *sys.argv[1:] in commands:
        with suppress(Parsed):
            runpy.run_module(module, run_name="__main__", alter_sys=True)
            raise AssertionError(f"{module} parses no arguments")
    return 0


def shell_lines(page: Path) -> list[str]:
    """Return the lines of a page's blocks without a language."""
    return [line for it in blocks_of(page) if not it.language for line in it.text.splitlines()]


def commands(start: str) -> list[list[str]]:
    """Return the commands of the pages that begin with a word, without it."""
    lines = {
        " ".join(line.replace(".venv/bin/", "").split())
        for page in PAGES
        for text in [page.read_text(encoding="utf-8")]
        for line in [
            *INLINE.findall(text),
            *shell_lines(page),
        ]
    }
    return sorted(
        shlex.split(line, comments=True)[len(start.split()) :]
        for line in lines
        if line.startswith(f"{start} ")
    )


def test_every_line_of_a_block_is_a_checked_command() -> None:
    """A block is a program that the tests below parse, a file, or tests that exist."""
    for line in (line for page in PAGES for line in shell_lines(page)):
        words = shlex.split(line.removeprefix(".venv/bin/"), comments=True)
        if words[:3] == ["python", "-m", "pytest"]:
            assert (ROOT / words[3]).exists(), line
        elif words[:2] == ["python", "-m"]:
            assert words[2].startswith("bench."), line
        else:
            assert words[0] in {"make", "tidemill"} or (ROOT / words[0]).exists(), line


def test_make_knows_every_target() -> None:
    """`make -n` with the variables as documented; the goals are named in .PHONY."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    names = set(re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE))
    phony = {name for line in names for name in line.split()}
    documented = commands("make")
    assert ["bench-host"] in documented
    for command in documented:
        goals = [word for word in command if "=" not in word]
        variables = [word.partition("=")[0] for word in command if "=" in word]
        assert set(goals) <= phony, command
        assert all(re.search(rf"^{name} \?=", makefile, re.MULTILINE) for name in variables)


def test_every_script_accepts_its_documented_arguments(tmp_path: Path) -> None:
    """Each `python -m bench.…` of the pages is parsed by the script's own parser."""
    documented = [command for command in commands("python -m") if command[0].startswith("bench.")]
    assert len(documented) > 10
    status = in_process(lambda: parse_all(documented), tmp_path / "stderr")
    assert status == 0, (tmp_path / "stderr").read_text()


@pytest.mark.parametrize(
    "command", [it for it in commands("tidemill") if it != ["--help"]], ids=" ".join
)
def test_tidemill_accepts_its_documented_arguments(command: list[str]) -> None:
    """Each `tidemill …` of the pages is parsed by the command's own parser."""
    assert parse(command).command
