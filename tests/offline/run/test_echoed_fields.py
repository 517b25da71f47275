"""`--echo-fields` copies fields of lines to their rows, and `--url` is for lines without one."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.offline.given import CHAT, HI, line, rows
from tidemill.batch.file.echoed_fields import EchoedFields
from tidemill.batch.file.lines import RawLine
from tidemill.batch.file.run_line import LineResult
from tidemill.cli.main import main
from tidemill.demo import MODEL_PATH
from tidemill.offline.console.errors import BadInput, Refused
from tidemill.offline.files.input_file import PlacedLine
from tidemill.offline.run.feed import echoing
from tidemill.offline.run.replicas import EngineReplicas

ROW = b'{"id":"batch_req_1","custom_id":"a","response":null,"error":null}\n'
IDS = {"a": 200, "b": 400, "c": 200, "d": 500}
SCRIPT = Path(__file__).parents[3] / "tests/engine_process/scripted_engine.py"
META = {"a": [1, "é\u2028"]}


def with_fields(text: str, **fields: Any) -> str:
    """Return a line with more fields next to its body."""
    return json.dumps({**json.loads(text), **fields})


def echoed(path: Path) -> list[tuple[Any, Any]]:
    """Return the echoed fields of rows."""
    return [(row.get("metadata"), row.get("label")) for row in rows(path)]


def test_rows_have_the_fields_of_their_lines(
    run: Any, write_input: Callable[..., Path], tmp_path: Path
) -> None:
    """Error rows, resumed and retried ones have them too; a line without a field has none."""
    lines = [
        with_fields(line("a"), metadata=META, label=1),
        with_fields(line("b", status=400), label=None, other=2),
        line("c"),
        '{"custom_id": "d", "label": "no body"}',
        "not JSON",
    ]
    out = tmp_path / "rows.jsonl"
    given = ["-i", write_input(*lines), "-o", out, "--on-invalid-line", "skip"]
    flags = [*given, "--echo-fields", "metadata, label"]
    assert run(*flags) == 0
    whole = out.read_bytes()
    assert echoed(out) == [(META, 1), (None, None), (None, None), (None, "no body"), (None, None)]
    assert ["label" in row for row in rows(out)] == [True, True, False, True, False]
    assert len(whole.decode().splitlines()) == len(lines)
    out.write_bytes(whole[: whole.index(b"\n") + 1])
    assert run(*flags, "--resume") == 0
    assert out.read_bytes() == whole
    assert run(*flags, "--resume", "--retry-failed") == 0
    assert out.read_bytes() == whole
    out.write_bytes(whole[: whole.index(b"\n") + 1])
    with pytest.raises(Refused, match="--echo-fields"):
        run(*given, "--resume")


def test_reused_rows_and_rows_not_run_have_them(
    run: Any, write_input: Callable[..., Path], tmp_path: Path
) -> None:
    """The fields are not part of a stored result."""
    lines = [with_fields(line(name, temperature=0, say=name), label=name.upper()) for name in "ab"]
    out, again = tmp_path / "rows.jsonl", tmp_path / "again.jsonl"
    model = ("--model", MODEL_PATH, "--any-model", "--reuse", tmp_path / "kept")
    source = write_input(*lines)  # its time is that of the replies
    assert run("-i", source, "-o", out, *model) == 0
    run.engine = None
    flags = (*model, "--echo-fields", "label")
    assert run("-i", source, "-o", again, *flags) == 0
    assert run.engine is None
    assert echoed(again) == [(None, "A"), (None, "B")]
    bodies = [[row["response"]["body"] for row in rows(path)] for path in (out, again)]
    for body in (*bodies[0], *bodies[1]):
        del body["created"]  # the runs may be in different seconds
    assert bodies[0] == bodies[1]
    late = tmp_path / "late.jsonl"
    waiting = [with_fields(line(name, wait=60), label=name.upper()) for name in "ab"]
    run("-i", write_input(*waiting), "-o", late, "--echo-fields", "label", "--max-seconds", "0.2")
    assert echoed(late) == [(None, "A"), (None, "B")]
    assert {row["error"]["code"] for row in rows(late)} == {"batch_expired"}


_VENDORS = pytest.mark.parametrize(
    "record",
    [
        {"recordId": "a", "modelInput": {"messages": HI, "say": "x"}},
        {"custom_id": "a", "params": {"messages": HI, "say": "x"}},
        {"key": "a", "request": {"contents": [{"role": "user", "parts": [{"text": "x"}]}]}},
        {"custom_id": "a", "body": {"messages": HI, "say": "x"}},
        {"id": "a", "messages": HI, "say": "x"},
    ],
    ids=["bedrock", "anthropic", "gemini", "no url", "chats"],
)


@_VENDORS
def test_vendors_lines_have_fields_too(run: Any, tmp_path: Path, record: dict[str, Any]) -> None:
    """A row of a chat has all its fields next to the messages."""
    source, out = tmp_path / "in.jsonl", tmp_path / "rows.jsonl"
    source.write_text(json.dumps({**record, "metadata": META, "label": 5}))
    assert run("-i", source, "-o", out, "--echo-fields", "label,metadata") == 0
    assert echoed(out) == [(META, 5)]
    [row] = rows(out)
    assert row["custom_id"] == "a"
    assert [*row] == ["id", "custom_id", "response", "error", "label", "metadata"]


@_VENDORS
def test_fields_of_vendors_are_those_of_their_lines(
    run: Any, tmp_path: Path, record: dict[str, Any]
) -> None:
    """A null is one, and the fields of a request are not mistaken for them."""
    source, out = tmp_path / "in.jsonl", tmp_path / "rows.jsonl"
    flags = ("-i", source, "-o", out, "--echo-fields", "label,method,url", "--force")
    # The first line shows the vendor.
    lines = [{**record, "label": None}, {**record, "url": 5, "method": {"a": None}}]
    is_request = record.keys() == {"custom_id", "body"}
    source.write_text("\n".join(map(json.dumps, lines[:1] if is_request else lines)))
    assert run(*flags) == 0
    first, *others = [[*row.items()][4:] for row in rows(out)]
    given = [("method", "POST"), ("url", CHAT)] if is_request else []
    assert first == [("label", None), *given]
    assert others == ([] if is_request else [[("method", {"a": None}), ("url", 5)]])


def test_a_number_that_json_lacks_is_null() -> None:
    """A row is always strict JSON; the fields come last."""
    echo = EchoedFields(("b", "a"))
    raw = RawLine(1, b'{"a": NaN, "b": "x", "body": {"c": 1}}')
    assert echo.add_to(ROW, raw) == ROW[:-2] + b',"b":"x","a":null}\n'
    assert echo.add_to(ROW, RawLine(1, b"[1]")) == ROW


def test_shards_and_vllms_rows_have_them(
    run: Any, write_input: Callable[..., Path], tmp_path: Path
) -> None:
    """Joined shards are the bytes of one run; failed rows have vLLM's form before them."""
    lines = [with_fields(line(name, status=code), label=name) for name, code in IDS.items()]
    whole, joined = tmp_path / "whole", tmp_path / "joined"
    given = ["-i", write_input(*lines), "--echo-fields", "label", "--dialect", "vllm"]
    assert run(*given, "-o", whole) == 0
    for number in (1, 2):
        assert run(*given, "-o", joined, "--shard", f"{number}/2") == 0
    assert main(["join", str(joined)]) == 0
    assert joined.read_bytes() == whole.read_bytes()
    assert [row["label"] for row in rows(whole)] == [*IDS]
    assert [[*row][-1] for row in rows(whole)] == ["label"] * len(IDS)


def test_rows_of_two_engines_have_them() -> None:
    """Each row has the fields of its line."""
    lines = []
    for place in range(4):
        fields = {"custom_id": str(place), "url": "/v1/x", "body": {}, "label": place}
        lines.append(PlacedLine(place, RawLine(place + 1, json.dumps(fields).encode())))

    async def run() -> list[LineResult]:
        command = [sys.executable, str(SCRIPT)]
        replicas = EngineReplicas([command] * 2, created=1, home=lambda place: place)
        run_line = echoing(replicas.run_line, EchoedFields(("label",)))
        async with replicas.started():
            return await asyncio.gather(*map(run_line, lines))

    found = [json.loads(result.row) for result in asyncio.run(run())]
    assert [(row["custom_id"], row["label"]) for row in found] == [(str(n), n) for n in range(4)]


@pytest.mark.parametrize("names", ["", "a,", "custom_id", "label,response"])
def test_names_of_rows_are_refused(run: Any, tmp_path: Path, names: str) -> None:
    """They would replace a row's own fields."""
    with pytest.raises(Refused, match=r"--echo-fields: .* must be 1 to 16 names .* other than id,"):
        run("-i", tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", "--echo-fields", names)


def test_a_table_keeps_columns_instead(run: Any, tmp_path: Path) -> None:
    """The error names the flag."""
    source = tmp_path / "in.csv"
    source.write_text("text\na\n")
    with pytest.raises(Refused, match="--keep copies columns"):
        run("-i", source, "-o", tmp_path / "o.csv", "--prompt", "{{ text }}", "--echo-fields", "a")


def test_lines_without_a_url_get_one(
    run: Any, write_input: Callable[..., Path], tmp_path: Path
) -> None:
    """The fields of a body decide only if they belong to another endpoint."""
    bodies = [{"input": "a", "status": 404}, {"prompt": "b", "status": 404}]
    lines = [json.dumps({"custom_id": str(n), "body": each}) for n, each in enumerate(bodies)]
    out = tmp_path / "rows.jsonl"
    flags = ["-i", write_input(*lines), "-o", out]
    run(*flags, "--url", "/v1/classify")
    assert [row["response"]["body"]["error"]["message"] for row in rows(out)] == [
        "No /v1/classify.",
        "No /v1/completions.",
    ]
    with pytest.raises(Refused, match="--url: The URL /v1/x is not supported"):
        run(*flags, "--force", "--url", "/v1/x")
    with pytest.raises(Refused, match="--url cannot be combined with --shard"):
        run(*flags, "--url", "/v1/classify", "--shard", "1/2")
    with pytest.raises(BadInput, match="only for lines without `url`"):
        run("-i", write_input(line("a")), "-o", out, "--force", "--url", "/v1/classify")
