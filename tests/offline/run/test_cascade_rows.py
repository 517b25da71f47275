"""Rows of a cascade whose input changes while the second model runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.offline.given import line
from tidemill.batch.file.escalated_line import escalated_line
from tidemill.batch.file.lines import RawLine
from tidemill.batch.file.rows import row_id_of
from tidemill.cli.main import parse
from tidemill.offline.console.errors import InputChanged
from tidemill.offline.files.cascade_files import CascadeFiles, Selection
from tidemill.offline.run.cascade_rows import OpenTable, merge
from tidemill.offline.run.run_flags import options_from

LINES = [line(str(number), input=f"{number}", questions=[]) for number in range(3)]


def _rows(lines: Sequence[RawLine], probability: float) -> bytes:
    """Return the rows of lines with a decision of this probability."""
    answers = {"answers": [{"type": "predicate", "probability": probability}]}
    response = {"status_code": 200, "body": answers}
    rows = [{"id": row_id_of(raw.digest), "custom_id": "c", "response": response} for raw in lines]
    return "".join(f"{json.dumps(row | {'error': None})}\n" for row in rows).encode()


@pytest.mark.parametrize(
    "changed",
    [LINES[:2], [LINES[0], LINES[1].replace('"1"', '"x"'), LINES[2]]],
    ids=["fewer lines", "another line"],
)
def test_a_changed_input_writes_no_incomplete_output(tmp_path: Path, changed: list[str]) -> None:
    """The rows of both models stay, and the message says what has changed."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    flags = ["--escalate", "n", "--escalate-by", "chat", "--escalate-below", "0.9"]
    options = options_from(parse(["run", str(source), "-o", str(out), "--model", "m", *flags]))
    files = CascadeFiles.of(out)
    files.folder.mkdir()
    raws = [RawLine(number, text.encode()) for number, text in enumerate(LINES, 1)]
    files.first.write_bytes(_rows(raws, 0.6))
    files.second.write_bytes(_rows([escalated_line(raw, "chat") for raw in raws], 0.99))

    def merged(lines: list[str]) -> list[bytes]:
        source.write_text("".join(f"{each}\n" for each in lines))
        merge(options, files, Selection(0.9, 3, 3), OpenTable(None))
        return out.read_bytes().splitlines()

    with pytest.raises(InputChanged, match=r"in\.jsonl changed during the run: start over"):
        merged(changed)
    assert not out.exists()
    assert [b"0.99" in row for row in merged(LINES)] == [True] * 3
