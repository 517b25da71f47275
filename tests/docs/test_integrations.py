"""Every code block of docs/integrations is run with stubs of its programs, or parsed.

Other tests run more of them: tests/container/chart the commands of helm, tests/sdk/integrations the
first programs for Ray, Daft and Spark, tests/examples the scripts of job schedulers.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import tomllib
from configparser import ConfigParser
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import yaml

from tidemill import Engine
from tidemill.cli.main import parse
from tidemill.sdk.integrations.options import check_options, split_options
from tidemill.sdk.integrations.ray.answer import answer
from tidemill.sdk.integrations.ray.processor_config import vLLMEngineProcessorConfig
from tools.docs_report import ROOT, Block, blocks_of

# tools/docs_report.py finds this pattern, too.
PATTERN = "docs/integrations/*.md"
CASES = [
    pytest.param(block, id=f"{page.stem}-{place}")
    for page in sorted(ROOT.glob(PATTERN))
    for place, block in enumerate(blocks_of(page))
]
STUBS = ("aws", "helm", "hf", "kubectl", "make", "pip", "python", "sbatch", "sky", "tidemill")
# A stub records its words, and prints the ID of a job.
STUB = """#!/bin/bash
printf '%s\\0' "${0##*/}" "$@" $'\\n' >> "$STUB_LOG"
echo 17
"""


@pytest.fixture
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that looks like a checkout, with stubs in its virtual environment."""
    monkeypatch.chdir(tmp_path)
    for name in ("container", "docs", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in ("requests.jsonl", "rows.jsonl", "plans.json"):
        (tmp_path / name).touch()
    folder = tmp_path / ".venv/bin"
    folder.mkdir(parents=True)
    for name in STUBS:
        (folder / name).write_text(STUB)
        (folder / name).chmod(0o755)
    return tmp_path


def recorded(script: str, folder: Path) -> list[list[str]]:
    """Run a script with the stubs, and return the words of each program that it started."""
    log = folder / "log"
    log.touch()
    subprocess.run(
        ["bash", "-euc", f"{script}\nwait"],
        cwd=folder,
        env={"PATH": f"{folder}/.venv/bin:/usr/bin:/bin", "STUB_LOG": str(log)},
        check=True,
    )
    return [line.split("\0") for line in log.read_text().split("\0\n\0") if line]


def check_command(words: list[str]) -> None:
    """Parse a command of ours; check the files, targets, variables and extras of others."""
    match words:
        case ["tidemill", *arguments] | ["kubectl", _, _, _, _, "--", "tidemill", *arguments]:
            parse(arguments)
        case ["sbatch", *_, "--wrap", wrapped]:
            check_command(shlex.split(wrapped))
        case ["sbatch", _, script, *_]:
            assert Path(script).exists()
        case ["sky", "jobs", "launch", path, *flags]:
            task = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
            assert {flag.partition("=")[0] for flag in flags} - {"--env"} == set(task["envs"])
        case ["helm", *arguments]:
            assert Path(arguments[arguments.index("--values") + 1]).exists()
        case ["make", *targets]:
            subprocess.run(["make", "-n", *targets], cwd=ROOT, check=True, capture_output=True)
        case ["pip", "install", package]:
            project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
            extras = package.removeprefix(".[").removesuffix("]").split(",")
            assert set(extras) <= set(project["optional-dependencies"])
        case ["python", "-m", "pytest", *arguments]:
            assert all(Path(it).exists() for it in arguments if it.startswith("tests/"))
        case [program, *_]:
            assert program in STUBS


def check_program(text: str) -> None:
    """Compile a program, and check the keywords of its calls of our API."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    compile(text, "block", "exec")
    of_ray = set(signature(answer).parameters) - {"ds", "options"}
    for call in calls:
        name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        name = call.func.id if isinstance(call.func, ast.Name) else name
        options: dict[str, Any] = {
            keyword.arg: ast.literal_eval(keyword.value)
            for keyword in call.keywords
            if keyword.arg and name in {"answer", "Provider", "Engine"}
        }
        if name == "answer":
            split_options({key: options[key] for key in options if key not in of_ray})
        elif name in {"Provider", "Engine"}:
            check_options(options)
        assert name != "vLLMEngineProcessorConfig" or {it.arg for it in call.keywords} <= set(
            signature(vLLMEngineProcessorConfig).parameters
        )
        assert name != "answer_table" or hasattr(Engine, name)


@pytest.mark.parametrize("block", CASES)
def test_a_block_is_what_its_language_says(block: Block, working_folder: Path) -> None:
    """Scripts run with stubs, programs are compiled, and data is parsed."""
    match block.language:
        case "sh":
            started = recorded(block.text, working_folder)
            assert started
            for words in started:
                check_command(words)
        case "python":
            check_program(block.text)
        case "yaml":
            assert yaml.safe_load(block.text)
        case "json":
            assert json.loads(block.text)
        case language:
            assert language == "ini"
            parser = ConfigParser()
            parser.read_string(block.text)
            assert parser.sections() == ["profile store", "store"]


def test_the_index_links_every_page() -> None:
    """A page without a link from the index would not be found."""
    index = (ROOT / "docs/integrations/README.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(([\w-]+\.md)", index))
    assert linked == {page.name for page in ROOT.glob(PATTERN)} - {"README.md"}
