"""`tidemill run` of other vendors' files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.offline.given import HI, rows
from tidemill.cli.main import main
from tidemill.offline.console.errors import BadInput


def test_a_vendors_file_is_run_resumed_sharded_and_retried(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An odd line has its error row; a resumed run and joined shards are the bytes of one run."""
    records = [{"recordId": name, "modelInput": {"messages": HI, "say": name}} for name in "abc"]
    records[1]["modelInput"]["status"] = 400
    lines = [*map(json.dumps, records), json.dumps({"custom_id": "d", "url": "/x", "body": {}})]
    source, out = tmp_path / "records.jsonl", tmp_path / "rows.jsonl"
    source.write_text("\n".join(lines))
    given = ["-i", source, "-o", out, "--on-invalid-line", "skip"]
    with pytest.raises(BadInput, match="line 4: `modelInput` is required and must be an object"):
        run("-i", source, "-o", out)
    assert "contains Bedrock records; `tidemill convert` writes rows in" in capsys.readouterr().err
    assert run(*given) == 0
    whole = out.read_bytes()
    found = rows(out)
    assert [row["custom_id"] for row in found] == ["a", "b", "c", None]
    assert [bool(row["response"]) for row in found] == [True, True, True, False]
    assert found[3]["error"]["message"].startswith("Line 4: `modelInput`")
    out.write_bytes(whole[: whole.index(b"\n") + 1])
    assert run(*given, "--resume") == 0
    assert out.read_bytes() == whole
    assert run(*given, "--resume", "--retry-failed") == 0
    assert out.read_bytes() == whole
    for number in (1, 2):
        assert run(*given, "--shard", f"{number}/2") == 0
    assert main(["join", str(out), "--force"]) == 0
    assert out.read_bytes() == whole
    assert main(["convert", str(out), "-i", str(source)]) == 0
    converted = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [{**each}.keys() - records[0].keys() for each in converted] == [
        {"modelOutput"},
        {"error"},
        {"modelOutput"},
        {"error"},
    ]


def test_errors_name_the_request_of_the_vendor(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The warning before the run does, too; the system's message is not counted."""
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "video"}]}]
    source = tmp_path / "in.jsonl"
    records = [
        {"custom_id": "a", "params": {"messages": HI, "say": "x"}},
        {"custom_id": "b", "params": {"system": "Be brief.", "messages": messages}},
    ]
    source.write_text("\n".join(map(json.dumps, records)))
    assert run("-i", source, "-o", tmp_path / "out.jsonl") == 0
    place = "`messages.0.content.1.type` must be 'text'"
    assert place in capsys.readouterr().err
    assert main(["check", str(source)]) == 1
    assert place in "".join(capsys.readouterr())
