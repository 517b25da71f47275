"""Every code block of the reference, the FAQ and the community pages is run or parsed."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import tomllib
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path

import pytest
import transformers
import yaml

from infra.config.read import DEFAULT_PATH, make_config
from tidemill.batch.table.recipe import parse_recipe
from tidemill.cli.main import main, parse
from tidemill.engine.model.config.hf_config import UnsupportedConfig, parse_hf_config
from tidemill.engine.model.families import dense, registry
from tidemill.engine.parsers import tagged_calls
from tools.docs_report import ROOT, Block, blocks_of, pages

# tools/docs_report.py finds these patterns, too.
PATTERNS = ("docs/reference/*.md", "docs/faq.md", "CONTRIBUTING.md", "SECURITY.md")
PAGES = {
    name: blocks_of(page)
    for page in pages()
    if page.exists()
    for name in [str(page.relative_to(ROOT))]
    if any(fnmatch(name, pattern) for pattern in PATTERNS)
}
CASES = [
    pytest.param(name, block, id=f"{name}-{place}")
    for name, listed in PAGES.items()
    for place, block in enumerate(listed)
]
# Programs whose commands are only parsed by a shell.
OTHERS = {"aws", "curl", "export", "seq"}
ENGINE_LINES = 5


def commands(text: str) -> list[list[str]]:
    """Return the words of each command of a block, without comments and leading variables."""
    joined = re.sub(r"\\\n\s*", " ", text)
    typed = [shlex.split(line, comments=True) for line in joined.splitlines()]
    return [strip_variables(words) for words in typed if words]


def strip_variables(words: list[str]) -> list[str]:
    """Return the words behind assignments such as `A=1`."""
    return strip_variables(words[1:]) if re.match(r"[A-Z_]+=", words[0]) else words


def check_command(words: list[str]) -> None:
    """Parse a command of ours by our parser; of others, look for the program and the target.

    Files that it names are made in the working folder, because ours looks for some of them.
    """
    for word in words:
        if re.fullmatch(r"[\w.-]+\.(jsonl|csv)", word):
            Path(word).touch()
    match words:
        case ["tidemill" | ".venv/bin/tidemill", *arguments]:
            parse(arguments)
        case ["make", *targets]:
            makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
            assert all(re.search(rf"^{it}:", makefile, re.MULTILINE) for it in targets)
        case ["python" | ".venv/bin/python", "-m", module, *arguments]:
            file = ROOT / module.removeprefix("tidemill.").replace(".", "/")
            assert module == "pytest" or file.with_suffix(".py").exists() or file.is_dir()
            if module == "pytest":
                assert all((ROOT / it).exists() for it in arguments if not it.startswith("-"))
        case [".venv/bin/ruff", "check" | "format", *folders]:
            assert all((ROOT / folder).exists() for folder in folders)
        case [program, *_]:
            assert program in OTHERS or (ROOT / program).exists(), program


@pytest.fixture
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a file of requests, in which the test runs."""
    monkeypatch.chdir(tmp_path)
    lines = (ROOT / "examples/demo.jsonl").read_text(encoding="utf-8").splitlines()[:ENGINE_LINES]
    (tmp_path / "requests.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


@pytest.mark.usefixtures("working_folder")
@pytest.mark.parametrize(("name", "block"), CASES)
def test_a_block_is_what_its_language_says(name: str, block: Block) -> None:
    """Data is parsed by its own parser, commands by the program that they name."""
    match block.language:
        case "json":
            assert [json.loads(text) for text in [block.text] if text]
        case "toml" if name == "docs/reference/recipes.md":
            assert parse_recipe(tomllib.loads(block.text)).id == "review_id"
        case "toml":
            default = tomllib.loads(DEFAULT_PATH.read_text(encoding="utf-8"))
            assert make_config(default | tomllib.loads(block.text), name).models
        case "yaml":
            assert yaml.safe_load(block.text)
        case "python":
            assert ast.parse(block.text).body
        case "" | "sh":
            subprocess.run(["bash", "-n", "-c", block.text], check=True)
            for words in commands(block.text):
                check_command(words)
        case language:
            assert language == "text"


@pytest.mark.usefixtures("working_folder")
def test_the_commands_of_the_faq_parse() -> None:
    """Each cell of its tables is a command of ours, another program's, or a sentence."""
    page = (ROOT / "docs/faq.md").read_text(encoding="utf-8")
    typed = re.findall(r"\| `([^`]+)` \|$", page, re.MULTILINE)
    assert len(typed) > 15
    for command in typed:
        for words in commands(command):
            check_command(words)


def test_the_blocks_of_local_runs_and_files_run(
    working_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One engine is started: what follows the first run finds its rows complete."""
    run, *_ = PAGES["docs/reference/running.md"]
    for words in commands(run.text):
        assert main(words[1:]) == 0, words
    for name in ("before.jsonl", "after.jsonl"):
        (working_folder / name).write_bytes((working_folder / "requests.output.jsonl").read_bytes())
    for block in PAGES["docs/reference/files.md"]:
        for words in commands(block.text):
            assert main(words[1:]) == 0, words
    assert len((working_folder / "fifty.jsonl").read_text().splitlines()) == ENGINE_LINES
    assert "5 are identical" in capsys.readouterr().out


def test_the_blocks_of_the_faq_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They name files of the repository, and write nothing there."""
    monkeypatch.chdir(ROOT)
    for block in PAGES["docs/faq.md"]:
        for words in commands(block.text):
            assert main(words[1:]) == 0, words
    printed = capsys.readouterr().out
    assert "(qwen3)" in printed
    assert re.search(r"^prompt tokens +\d+$", printed, re.MULTILINE)


def test_the_family_of_the_contributors_page_reads_its_config(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The example maps Helium's config to the decoder, and missing fields to its defaults."""
    [family, _] = [it.text for it in PAGES["CONTRIBUTING.md"] if it.language == "python"]
    names = vars(dense) | {"DENSE": {}}
    exec(family, names)  # noqa: S102 - the page's own code
    monkeypatch.setitem(registry.FAMILIES, "helium", names["DENSE"]["helium"])
    fields = json.loads(json.dumps(transformers.HeliumConfig().to_dict(), default=str))
    architecture = registry.architecture_of(parse_hf_config("helium", fields))
    assert (architecture.class_name, len(architecture.blocks)) == ("HeliumForCausalLM", 24)
    num_read = 0
    for name in fields.keys() - {"model_type"}:
        less = {other: value for other, value in fields.items() if other != name}
        with suppress(UnsupportedConfig):  # a required field
            assert registry.architecture_of(parse_hf_config("helium", less)) == architecture, name
            num_read += 1
    assert num_read > len(fields) / 2


def test_the_parser_of_the_contributors_page_reads_a_call() -> None:
    """The example has the marks that it names."""
    [_, parser] = [it.text for it in PAGES["CONTRIBUTING.md"] if it.language == "python"]
    names = dict(vars(tagged_calls))
    exec(parser, names)  # noqa: S102 - the page's own code
    assert names["ACME"].marks[0] == "<acme:call>"
