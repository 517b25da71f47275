"""The docs cover all files, flags and parameters."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from pydantic import BaseModel

from tidemill.batch.batch_body import BatchRequest
from tidemill.batch.batch_object import TidemillObject
from tidemill.cli.main import make_parser
from tidemill.engine.parsers.registry import REASONING_PARSERS, TOOL_CALL_PARSERS
from tidemill.handler.fleet.kubernetes.config import JobConfig
from tidemill.handler.fleet.kubernetes.plans import Plan
from tidemill.protocol import unsupported
from tidemill.protocol.audio import TranscriptionRequest, TranslationRequest
from tidemill.protocol.chat import ChatCompletionRequest
from tidemill.protocol.completions import CompletionRequest
from tidemill.protocol.validation import NeutralValues

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
_UNTESTED = re.compile(
    "nobody has run it yet|(not|never)( been)?( yet)? (tested|run)", re.IGNORECASE
)


def flags_of(parser: argparse.ArgumentParser, command: str) -> list[str]:
    """Return every flag of one command, in all its spellings, except for help."""
    [commands] = [
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    ]
    actions = commands.choices[command]._actions
    return [flag for action in actions for flag in action.option_strings if action.dest != "help"]


def test_every_folder_of_the_engine_is_documented() -> None:
    """Each folder of engine/ has its row in engine.md, and each file named there exists."""
    page = (DOCS / "explanation/engine.md").read_text(encoding="utf-8")
    rooms = [path.name for path in (ROOT / "engine").iterdir() if (path / "__init__.py").exists()]
    assert "kernels" in rooms
    assert [room for room in rooms if f"`{room}/`" not in page] == []
    named = re.findall(r"`((?:batch|net|protocol|handler|tests|\w+)/[\w/]+\.(?:py|json))`", page)
    assert "loop/cuda_graphs.py" in named
    places = (ROOT, ROOT / "engine", ROOT / "engine/kernels")
    assert [name for name in named if not any((place / name).exists() for place in places)] == []


def test_every_flag_of_the_launcher_is_documented() -> None:
    """Each flag of the launcher and each key of its plans is in integrations/kubernetes.md."""
    page = (DOCS / "integrations" / "kubernetes.md").read_text(encoding="utf-8")
    section = page.partition("\n## Launcher\n")[2].partition("\n## ")[0]
    keys = [*Plan.model_fields, *JobConfig.model_fields]
    flags = [flag for flag in flags_of(make_parser(), "launcher") if flag.startswith("--")]
    assert {"--interval", "--plans"} <= set(flags)
    assert [name for name in (*flags, *keys) if f"`{name}" not in section] == []


@pytest.mark.parametrize(
    "request_type",
    [ChatCompletionRequest, CompletionRequest, TranscriptionRequest, TranslationRequest],
)
def test_every_parameter_of_a_request_is_documented(request_type: type[BaseModel]) -> None:
    """A new request parameter needs a line in docs/reference/parameters.md."""
    page = (DOCS / "reference/parameters.md").read_text(encoding="utf-8")
    fields = list(request_type.model_fields)
    assert "temperature" in fields
    assert [field for field in fields if f"`{field}`" not in page] == []


@pytest.mark.parametrize(
    ("flag", "parsers"),
    [("--tool-call-parser", TOOL_CALL_PARSERS), ("--reasoning-parser", REASONING_PARSERS)],
)
def test_every_parser_has_its_row(flag: str, parsers: Mapping[str, object]) -> None:
    """docs/reference/parameters.md names each parser once, next to its format."""
    page = (DOCS / "reference/parameters.md").read_text(encoding="utf-8")
    table = page.partition(f"| `{flag}` |")[2].partition("\n\n")[0]
    named = re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)))
    assert [name for name in parsers if named.count(name) != 1] == []
    assert set(named) - {"openai_gptoss"} <= parsers.keys()


@pytest.mark.parametrize(
    ("heading", "tables"),
    [
        ("Chat and text completions", [unsupported.GENERATION]),
        ("Vectors and scores", [unsupported.VECTORS, unsupported.SCORES, unsupported.LABELS]),
        ("Decisions", [unsupported.DECISION, unsupported.SYSTEM_ONE_BODY]),
        ("Recordings", [unsupported.TRANSCRIPTION, unsupported.TRANSLATION]),
    ],
)
def test_every_refused_parameter_has_its_reason(heading: str, tables: list[NeutralValues]) -> None:
    """docs/reference/parameters.md lists them in one table, without supported ones."""
    page = (DOCS / "reference/parameters.md").read_text(encoding="utf-8")
    refused = page.partition("## Unsupported parameters")[2]
    section = refused.partition(f"### {heading}\n")[2].partition("\n#")[0]
    rows = [row.split(" | ") for row in section.splitlines() if row.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row[0])} - {"n", "text"}
    names = {name.removesuffix("[]") for table in tables for name in table} - {"n"}
    assert named - {"float", "best_of", "auto"} == names
    assert all(len(row[1]) > len("| yes |") for row in rows)


def test_every_parameter_of_a_new_batch_is_documented() -> None:
    """A new parameter of `POST /v1/batches`, or Batch field of ours, needs a line."""
    page = (DOCS / "reference/api.md").read_text(encoding="utf-8")
    fields = [*BatchRequest.model_fields, *TidemillObject.model_fields]
    assert "metadata" in fields
    assert [field for field in fields if f"`{field}`" not in page] == []


def test_localstack_is_marked_as_untested() -> None:
    """No test has run on LocalStack, which needs Docker; each page that offers it must say so."""
    pages = [*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "localstack" / "compose.yaml"]
    texts = {path.name: path.read_text(encoding="utf-8") for path in pages}
    offering = {name: text for name, text in texts.items() if "LocalStack" in text}
    assert "compose.yaml" in offering
    assert [name for name, text in offering.items() if not _UNTESTED.search(text)] == []
