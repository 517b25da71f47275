"""Every block of README.md and docs/guides: commands and programs run, files are written.

Pages name models of the hub, which are replaced by demo models. Commands for AWS and Kubernetes,
and for servers, are parsed.
"""

from __future__ import annotations

import ast
import csv
import importlib.util
import io
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

import tidemill
from bench.server.served import serving
from infra.config.read import DEFAULT_PATH, make_config
from tests.docs.blocks import PAGES, commands_of
from tidemill import demo
from tidemill.cli.main import main, parse
from tidemill.engine.config import EngineConfig
from tidemill.engine.load import load_served
from tidemill.protocol.contract import Reply, Served
from tools.demo.train_reranker import assemble, base_path
from tools.docs_report import ROOT, Block, blocks_of

pytestmark = pytest.mark.usefixtures("proved")

ADDRESS = "http://127.0.0.1:8000"
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TRANSCRIBER = "$(python -m tidemill.demo.tiny_en)"
LOCAL = {
    "cache",
    "calibrate",
    "check",
    "diff",
    "estimate",
    "join",
    "models",
    "retry",
    "run",
    "sample",
    "view",
}
REMOTE = {"resume", "results", "status", "submit"}
# Other programs, which pages may name.
OTHERS = {
    "aws",
    "cdk",
    "curl",
    "docker",
    "git",
    "helm",
    "hf",
    "kubectl",
    "litellm",
    "pip",
    "python3",
}


class Models(NamedTuple):
    """The folders that take the place of a page's models."""

    chat: str
    vectors: str
    reranker: str
    speech: str
    second: str

    def replacing(self, name: str) -> str:
        """Return the folder for the name of a model."""
        kinds = {
            "BAAI/bge-base-en-v1.5": self.vectors,
            "BAAI/bge-reranker-v2-m3": self.reranker,
            "openai/whisper-large-v3-turbo": self.speech,
            TRANSCRIBER: self.speech,
            "out/reranker": self.reranker,
            "Qwen/Qwen2.5-Coder-0.5B-Instruct": self.second,
        }
        return kinds.get(name, self.chat)


class Shared:
    """An engine that outlives its runs and serves every name."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.info = served.info
        self.stats = served.stats

    async def respond(self, url: str, body: dict[str, Any], *given: Any) -> Reply:
        """Answer for the engine's own name."""
        served = {name: value for name, value in body.items() if name != "model"}
        return await self.served.respond(url, served, *given)

    def close(self) -> None:
        """Leave the engine to the next run."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Return the demo models; the reranker is assembled, and the second chat model is a copy."""
    reranker = tmp_path_factory.mktemp("models") / "reranker"
    assemble(reranker)
    second = shutil.copytree(demo.MODEL_PATH, reranker.with_name("second"))
    return Models(
        *(str(demo.MODEL_PATH), str(base_path()), str(reranker), str(demo.SPEECH_PATH)),
        str(second),
    )


@pytest.fixture(scope="module")
def load(models: Models) -> Iterator[Callable[..., Any]]:
    """Return a function that gives the engine of a model; each is loaded once, beforehand."""
    engines = {folder: load_served(EngineConfig(folder, max_num_seqs=8)) for folder in models}

    def find(config: EngineConfig, **_: Any) -> Any:
        return Shared(engines[config.model])

    yield find
    for engine in engines.values():
        engine.close()


@pytest.fixture(scope="module")
def address(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the URL of a server of the demo model."""
    folder = tmp_path_factory.mktemp("server")
    flags = ("--model", models.chat, "--served-model-name", demo.NAME, "gpt-4o-mini")
    with serving(*flags, "--data-dir", str(folder), log=folder / "log") as place:
        yield place.url


@pytest.fixture(scope="module")
def engine(models: Models) -> Iterator[tidemill.Engine]:
    """Return the one engine of programs, loaded before a test looks at the process."""
    with tidemill.Engine(models.chat, max_num_seqs=64) as engine:
        engine.info()
        yield engine


class Lent:
    """An engine that a program may close without ending its process."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def __enter__(self) -> Any:
        return self._engine

    def __exit__(self, *_: object) -> None:
        """Leave the process to the next program."""

    async def __aenter__(self) -> Any:
        return self._engine

    async def __aexit__(self, *_: object) -> None:
        """Leave the process to the next program."""


class Page:
    """The blocks of one page, run in their order in one folder."""

    def __init__(self, folder: Path, models: Models, address: str) -> None:
        self.folder = folder
        self.models = models
        self.address = address
        self.printed = ""

    def run(self, block: Block) -> None:
        """Run a block, or write, compare or parse the file that it shows."""
        if block.language == "sh":
            for words in commands_of(block.text):
                self.run_command(words)
        elif block.title == "output":
            assert self.printed == block.text
        elif block.title and (self.folder / block.title).exists():
            shown, made = block.text, (self.folder / block.title).read_text(encoding="utf-8")
            assert shape_of(block.title, made) == shape_of(block.title, shown)
        elif block.title:
            assert ".output." not in block.title, "no command of the page has made it"
            path = self.folder / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
            parse_file(block)
        elif block.language == "python":
            self.run_program(block)
        else:
            parse_file(block)

    def run_command(self, words: list[str]) -> None:
        """Run one of our commands or a script of the page; only parse other commands."""
        if words[:3] == ["python", "-m", "tidemill"]:
            words = words[2:]
        if words[0] == "tidemill":
            self.run_ours(words[1:])
        elif words[0] in {"cp", "mkdir"}:
            subprocess.run(words, cwd=self.folder, check=True)
        elif words[0] == "python" and (self.folder / words[1]).exists():
            subprocess.run([sys.executable, *words[1:]], cwd=self.folder, check=True)
        elif words[0] == "python":
            assert words[1] != "-m" or importlib.util.find_spec(words[2]), words
        elif words[0] == "curl" and words[2].startswith(f"{ADDRESS}/v1/chat"):
            typed = [word.replace(ADDRESS, self.address) for word in words]
            answer = subprocess.run(typed, check=True, capture_output=True).stdout
            assert json.loads(answer)["choices"]
        elif words[0] == "make":
            # Not by `make -n`, which runs the recipes that name $(MAKE), such as `check`.
            targets = [word for word in words[1:] if "=" not in word]
            assert all(re.search(rf"^{target}:", MAKEFILE, re.MULTILINE) for target in targets)
        else:
            assert Path(words[0]).name in OTHERS, words

    def run_ours(self, typed: list[str]) -> None:
        """Run a command in this process, or parse one that needs a cloud or does not end."""
        words = [self.models.replacing(word) if is_model(word) else word for word in typed]
        is_local = words[0] in LOCAL | REMOTE and "--html" not in words
        if not is_local or any(
            word.startswith(("hf://", "s3://", "batch_", "@last")) for word in words
        ):
            parse(typed)
            return
        if words[0] == "view" and "-n" not in words:
            words += ["-n", "9"]
        if "--model" in words and "--served-model-name" not in words:
            name = typed[words.index("--model") + 1]
            words += ["--served-model-name", name]
        printed = io.StringIO()
        with redirect_stdout(printed):
            status = main(words)
        # The small model may leave an answer incomplete, which `check` reports.
        assert status in ({0, 1} if words[0] == "check" else {0}), (typed, printed.getvalue())
        self.printed = printed.getvalue()

    def run_program(self, block: Block) -> None:
        """Run a program in this process; compile one whose packages are not installed."""
        text = block.text.replace(ADDRESS, self.address)
        text = re.sub(r"time\.sleep\(\d+\)", "time.sleep(0.1)", text)
        tree = ast.parse(text)
        names = [
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for alias in node.names
        ]
        code = compile(text, f"line {block.line}", "exec")
        if all(importlib.util.find_spec(name.partition(".")[0]) for name in names):
            printed = io.StringIO()
            with redirect_stdout(printed):
                exec(code, {"__name__": "__main__"})  # noqa: S102 - a program of a page
            self.printed = printed.getvalue()


def is_model(word: str) -> bool:
    """Return whether a word of a command is the name of a model of the hub."""
    return (
        word in {TRANSCRIBER, "out/reranker"}
        or re.fullmatch(r"[\w-]+/[\w.-]+-[\w.-]+", word) is not None
    )


def parse_file(block: Block) -> None:
    """Parse a file by its language."""
    parsers: dict[str, Callable[[str], object]] = {
        "csv": lambda text: list(csv.reader(io.StringIO(text), strict=True)),
        "json": json.loads,
        "jsonl": lambda text: [json.loads(line) for line in text.splitlines()],
        "python": ast.parse,
        "toml": parse_toml,
        "yaml": yaml.safe_load,
        "text": str,
    }
    parsers[block.language](block.text)


def parse_toml(text: str) -> object:
    """Return a recipe as it is, and the configuration of a deployment in full."""
    given = tomllib.loads(text)
    if "models" not in given:
        return given
    return make_config(tomllib.loads(DEFAULT_PATH.read_text(encoding="utf-8")) | given, "a page")


def shape_of(name: str, text: str) -> object:
    """Return what a shown file has in common with one of another model."""
    if name.endswith(".csv"):
        rows = list(csv.reader(io.StringIO(text), strict=True))
        return rows[0], [row[0] for row in rows]
    return [keys_of(json.loads(line)) for line in text.splitlines()]


def keys_of(value: object) -> object:
    """Return the keys of a JSON value, those of its parts included."""
    if isinstance(value, dict):
        return {key: keys_of(part) for key, part in value.items()}
    return [keys_of(part) for part in value] if isinstance(value, list) else None


@pytest.fixture
def page(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    load: Callable[..., Any],
    models: Models,
    address: str,
) -> Page:
    """Return a page in its folder, with the examples; runs share the engines."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.setenv("OPENAI_BASE_URL", f"{address}/v1")
    monkeypatch.setenv("TIDEMILL_BASE_URL", address)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    for module in ("cli.commands.run", "offline.estimate.estimate"):
        monkeypatch.setattr(f"tidemill.{module}.load_engine", load_without_cache(load))
    return Page(tmp_path, models, address)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_every_block_of_a_page_runs(
    path: Path, page: Page, engine: tidemill.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are written, commands and programs run, and output has the form that is shown."""
    monkeypatch.setattr(tidemill, "Engine", lambda *_, **__: Lent(engine))
    for block in blocks_of(path):
        try:
            page.run(block)
        except Exception as error:
            error.add_note(f"{path.name}:{block.line}")
            raise


def load_without_cache(load: Callable[..., Any]) -> Callable[..., Any]:
    """Return the loader as commands call it."""

    def find(config: EngineConfig, *, weights_cache: str | None = None, **given: Any) -> Any:
        del weights_cache
        return load(config, **given)

    return find
