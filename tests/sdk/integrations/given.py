"""Questions for the tests of integrations, and the answers of `tidemill run`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pytest
from pyarrow import compute, parquet

from tests.engine.scripted_encoder import minilm
from tidemill import run

ROOT = Path(__file__).parents[3]
_WAIT_SECONDS = 300

QUESTIONS = pa.table(
    {
        "id": pa.array(range(1, 151), pa.int64()),
        "question": [f"What is {n} + 7?" if n % 50 else None for n in range(1, 151)],
        "tags": [["a", str(n)] for n in range(150)],
    }
)
SAMPLED = {"prompt": "{{ question }}", "id": "id", "params": {"temperature": 1.5, "max_tokens": 8}}
TYPED = {
    "prompt": "{{ question }}",
    "id": "id",
    "keep": ["tags", "id"],
    "params": {
        "temperature": 0,
        "max_tokens": 20,
        "response_format": {
            "type": "json_schema",
            "json_schema": {
                "name": "sum",
                "schema": {
                    "type": "object",
                    "properties": {
                        "sum": {"type": "integer"},
                        "parts": {"type": "array", "items": {"type": "number"}, "maxItems": 2},
                    },
                    "required": ["sum", "parts"],
                    "additionalProperties": False,
                },
            },
        },
    },
}
DECISIONS = [
    "even: Is the sum even?",
    {"name": "size", "instructions": "How large is the sum?", "levels": ["small", "large"]},
    "parity = even|odd: Which parity has the sum?",
]
VECTORS = {
    "model": str(minilm()),
    "url": "/v1/embeddings",
    "input": ["{{ question }}", "{{ tags[1] }}"],
    "id": "id",
}
_Found = TypeVar("_Found")


def rows_of_run(folder: Path, recipe: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of `tidemill run` by a recipe, and a model, over the questions."""
    parquet.write_table(QUESTIONS, folder / "questions.parquet")
    keys = {name: value for name, value in recipe.items() if name != "model"}
    toml = "".join(f"{name} = {_toml(value)}\n" for name, value in keys.items())
    (folder / "recipe.toml").write_text(toml)
    done = run(
        folder / "questions.parquet",
        folder / "out.parquet",
        recipe=folder / "recipe.toml",
        model=recipe.get("model"),
        on_invalid_line="skip",
        force=True,
    )
    table = parquet.read_table(done.output)
    # There a row has a number, and advice has the quotes of a recipe file.
    error = compute.replace_substring_regex(table.column("error"), r"^Row \d+: ", "")
    error = compute.replace_substring(error, "''", '""')
    table = table.set_column(table.column_names.index("error"), "error", error)
    more = {} if "questions" in recipe else {"reasoning": None}
    return [row | more for row in table.to_pylist()]


def program_of(page: str) -> str:
    """Return the first program of a page of docs/integrations."""
    text = (ROOT / "docs/integrations" / page).read_text()
    found = re.search(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def printed_by(program: str, folder: Path) -> str:
    """Return the output of a program in a separate process and an empty folder."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def wait_for(find: Callable[[], _Found | None]) -> _Found:
    """Return what there is once it is there."""
    deadline = time.monotonic() + _WAIT_SECONDS
    while not (found := find()):
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.05)
    return found


def nearly(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row with approximate vectors, for comparison."""
    vectors = row["embedding"]
    some = vectors and [pytest.approx(vector, abs=1e-6) for vector in vectors]
    found = {**row, "embedding": some}
    del found["reasoning"]
    return found


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name} = {_toml(item)}' for name, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value)
