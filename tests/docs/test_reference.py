"""The reference documents every flag, error code, exit status, variable and recipe key."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

from tidemill.batch.table.recipe import Recipe
from tidemill.cli.batches import outcome
from tidemill.handler.settings import Settings
from tidemill.handler.worker.context.config import WorkerConfig
from tidemill.offline.console import errors
from tools import docs_reference

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
PRODUCT = (
    *("batch", "cli", "demo", "engine", "engine_process", "handler", "net", "offline", "protocol"),
    *("sdk", "server"),
)
CODE = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
# Position of the code among the arguments of these calls.
CODE_PLACES = {
    **dict.fromkeys(("BatchError", "NotRun", "WaitingReason", "refuse"), 0),
    **dict.fromkeys(("NotErasable", "_wrong"), 1),
    "CircuitBreaker": 2,
}
# Codes that are composed, or passed in variables.
COMPOSED = {
    *("batch_not_found", "budget_used_up", "file_not_found", "gpu_hours_used_up", "input_gone"),
    *("start_refused", "upload_cancelled", "upload_not_found"),
}


@cache
def sources() -> list[str]:
    """Return the text of each module of the product."""
    paths = [path for folder in PRODUCT for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path.read_text(encoding="utf-8") for path in paths]


@cache
def constants() -> dict[str, str]:
    """Return the strings that modules of the product assign to names."""
    constant = re.compile(r'^(\w+)(?:: [\w\[\]]+)? = "(\w+)"$', re.MULTILINE)
    return dict(match for text in sources() for match in constant.findall(text))


def strings(node: ast.expr | None) -> Iterator[str]:
    """Yield the strings that an expression may be."""
    if isinstance(node, ast.IfExp):
        yield from strings(node.body)
        yield from strings(node.orelse)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.Name) and node.id in constants():
        yield constants()[node.id]


def codes_of(node: ast.AST) -> Iterator[str]:
    """Yield the error codes in a keyword, call, default, assignment or dictionary."""
    match node:
        case ast.keyword(arg="code") | ast.Assign(targets=[ast.Name(id="code")]):
            yield from strings(node.value)
        case ast.AnnAssign(target=ast.Name(id="code")):
            yield from strings(node.value)
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in CODE_PLACES:
            for argument in node.args[CODE_PLACES[name] :][:1]:
                yield from strings(argument)
        case ast.arguments(kwonlyargs=keywords, kw_defaults=values):
            for keyword, value in zip(keywords, values, strict=True):
                yield from strings(value if keyword.arg == "code" else None)
        case ast.Dict(keys=keys, values=values):
            for key, value in zip(keys, values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "code":
                    yield from strings(value)


def words_of(page: str) -> set[str]:
    """Return the words in backticks on a page."""
    text = (REFERENCE / page).read_text(encoding="utf-8")
    return {
        word for span in re.findall(r"`([^`\n]+)`", text) for word in re.findall(r"[\w-]+", span)
    }


def test_the_page_of_commands_is_generated() -> None:
    """The page equals the parsers: run `make docs-reference` after a change."""
    assert docs_reference.PAGE.read_text(encoding="utf-8") == docs_reference.page()


def test_every_error_code_is_documented() -> None:
    """errors.md lists each code of the product, and no other."""
    with_codes = re.compile(rf"\bcode\b|\b({'|'.join(CODE_PLACES)})\(")
    codes = {
        code
        for text in sources()
        if with_codes.search(text)
        for node in ast.walk(ast.parse(text))
        for code in codes_of(node)
    }
    codes = {code for code in codes if CODE.fullmatch(code)} | COMPOSED
    page = (REFERENCE / "errors.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (`[a-z_0-9`, ]+`) \|", page, re.MULTILINE)
    cells += re.findall(r"^\| [A-Za-z]+ \| (`[a-z_0-9`, ]+`) \|$", page, re.MULTILINE)
    listed = {code for cell in cells for code in re.findall(r"`(\w+)`", cell)}
    assert len(codes) > 130
    assert sorted(codes - listed) == []
    assert sorted(listed - codes) == []


def test_every_exit_status_is_documented() -> None:
    """exit-statuses.md has each status of the command line's exceptions and of batches."""
    page = (REFERENCE / "exit-statuses.md").read_text(encoding="utf-8")
    listed = {
        int(number)
        for row in re.findall(r"^\| ([\d, ]+) \|", page, re.MULTILINE)
        for number in row.split(",")
    }
    classes = [it for it in vars(errors).values() if isinstance(it, type)]
    statuses = {it.exit_status for it in classes if hasattr(it, "exit_status")}
    statuses |= {*outcome._STATUS_OF_END.values(), errors.ROWS_FAILED, errors.OVER_LIMIT}
    assert {1, 2, 4, 6, 7, 8} <= statuses
    assert statuses <= listed


def test_every_environment_variable_is_documented() -> None:
    """environment.md has each variable that the product reads, in its one table."""
    ours = re.compile(r"\b(?:TIDEMILL|VLLM|OTEL)_[A-Z0-9_]*[A-Z0-9]\b")
    read = re.compile(r"\benviron(?:ment)?(?:\.get\(|\[)(?:\"(\w+)\"|(\w+))")
    names = {name for text in sources() for name in ours.findall(text)}
    for literal, name in (found for text in sources() for found in read.findall(text)):
        names |= {it for it in (literal, constants().get(name, "")) if it.isupper()}
    settings = (*Settings.model_fields, *(it.name for it in fields(WorkerConfig)))
    names |= {f"TIDEMILL_{name.upper()}" for name in settings}
    assert {"TIDEMILL_CACHE", "TIDEMILL_TRACEBACK", "NO_COLOR", "CUDA_VISIBLE_DEVICES"} <= names
    assert sorted(names - words_of("environment.md")) == []


def test_every_recipe_key_is_documented() -> None:
    """recipes.md has each field of a recipe."""
    page = words_of("recipes.md")
    names = {it.name for it in fields(Recipe)} - {"fields", "flags", "has_models"}
    assert "params" in names
    assert sorted(names - page) == []


def test_every_prometheus_metric_is_documented() -> None:
    """metrics.md has each metric of a server and of a run."""
    names = {
        f"tidemill_{name}"
        for path in ("server/metrics.py", "offline/run/metrics.py", "server/loop_lag.py")
        if (ROOT / path).exists()
        for pair in re.findall(
            r'"tidemill_(\w+)"|\("(\w+)", "[A-Z]', (ROOT / path).read_text(encoding="utf-8")
        )
        for name in pair
        if name
    }
    assert {"tidemill_rows", "tidemill_requests", "tidemill_preemptions"} <= names
    assert sorted(names - words_of("metrics.md")) == []
