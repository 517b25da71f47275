"""A whole run with a scripted engine: what comes out for what goes in."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.offline.given import CHAT, HI, Answer, line, rows
from tidemill.demo import MODEL_PATH, NAME
from tidemill.engine.config import EngineConfig
from tidemill.offline.console.errors import BadInput, EngineFailed, Refused
from tidemill.offline.engine.demo_model import demo_model
from tidemill.offline.run.job import run_job
from tidemill.offline.run.run_options import RunOptions
from tidemill.protocol.contract import EngineError

Write = Callable[..., Path]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Return the path of the output."""
    return tmp_path / "out.jsonl"


def statuses(rows: list[dict[str, Any]]) -> list[tuple[str, int | None]]:
    """Return custom_id and status of each row."""
    return [(row["custom_id"], (row["response"] or {}).get("status_code")) for row in rows]


def test_every_line_gets_one_row_in_input_order(run: Any, write_input: Write, out: Path) -> None:
    """The first line is answered last and still comes first."""
    waits = [0.1, 0.05, 0, 0.02, 0]
    source = write_input(*(line(f"c{n}", wait=wait) for n, wait in enumerate(waits)))
    assert run("-i", source, "-o", out) == 0
    assert statuses(rows(out)) == [(f"c{n}", 200) for n in range(5)]
    assert run.engine.most_running == 5
    assert run.engine.is_closed


def test_failed_lines_have_rows_among_the_others(run: Any, write_input: Write, out: Path) -> None:
    """A failure of one request is its own 500 row; the exit status is 0, as some are ok."""
    source = write_input(
        line("a", status=404), line("b", **{"raise": "boom"}), line("c"), line("d", reply={})
    )
    assert run("-i", source, "-o", out) == 0
    found = rows(out)
    assert statuses(found) == [("a", 404), ("b", 500), ("c", 200), ("d", 200)]
    error = found[1]["response"]["body"]["error"]
    assert error["code"] == "internal_error"
    assert "ValueError: boom ?" in error["message"]


@pytest.mark.parametrize("target", ["file", "-", "url"])
@pytest.mark.parametrize(
    ("bodies", "flags", "status"),
    [
        ([{"status": 400}, {"raise": "x"}], [], 3),
        ([{"status": 400}, {}], [], 0),
        ([{"status": 400}, {}], ["--fail-on-error"], 3),
        ([{}, {}], ["--fail-on-error"], 0),
    ],
)
def test_the_exit_status_shows_when_no_row_is_ok(  # noqa: PLR0917 - fixtures and cases
    run: Any,
    write_input: Write,
    out: Path,
    server: Any,
    bodies: Any,
    flags: Any,
    status: int,
    target: str,
) -> None:
    """With --fail-on-error already when one is not, wherever the rows go."""
    server.will(Answer())
    name = {"file": out, "-": "-", "url": f"{server.url}/out"}[target]
    source = write_input(*(line(str(n), **body) for n, body in enumerate(bodies)))
    assert run("-i", source, "-o", name, *flags) == status


def test_the_exit_status_counts_the_rows_that_were_kept(
    run: Any, write_input: Write, out: Path
) -> None:
    """A resume with nothing left to run ends as the whole would have."""
    source = write_input(line("a", status=400))
    assert run("-i", source, "-o", out) == 3
    assert run("-i", source, "-o", out, "--resume") == 3


def test_an_output_with_rows_is_not_written_over(run: Any, write_input: Write, out: Path) -> None:
    """The error names both ways to continue; --force starts over."""
    source = write_input(line("a"), line("b"))
    assert run("-i", source, "-o", out) == 0
    before, run.engine = out.read_bytes(), None
    with pytest.raises(Refused) as refused:
        run("-i", source, "-o", out)
    assert str(refused.value) == (
        f"{out} already contains rows: pass --resume to keep them and run the rest, or "
        "--force to start over"
    )
    assert refused.value.exit_status == 2
    assert (out.read_bytes(), run.engine) == (before, None)
    assert run("-i", source, "-o", out, "--force") == 0
    assert run.engine.num_requests == 2
    assert out.read_bytes() == before


def test_an_output_that_is_something_else_is_not_written_over(
    run: Any, write_input: Write, out: Path
) -> None:
    """The error does not advise --resume."""
    out.write_text("precious\n")
    with pytest.raises(
        Refused, match="does not contain rows: choose another file, or pass --force"
    ):
        run("-i", write_input(line("a")), "-o", out)
    assert out.read_text() == "precious\n"


def test_an_error_file_with_rows_is_not_written_over(
    run: Any, write_input: Write, out: Path, tmp_path: Path
) -> None:
    """Standard output cannot be resumed, so that is not offered."""
    errors = tmp_path / "errors"
    source = write_input(line("a", status=400))
    run("-i", source, "-o", out, "-e", errors)
    with pytest.raises(Refused, match="errors already contains rows: pass --force to start over"):
        run("-i", source, "-o", "-", "-e", errors)
    with pytest.raises(Refused, match="errors already contains rows: pass --resume to keep them"):
        run("-i", source, "-o", tmp_path / "other", "-e", errors)


def test_a_reply_that_json_cannot_hold_is_a_failed_row(
    run: Any, write_input: Write, out: Path
) -> None:
    """A lone surrogate in a reply costs one row; NaN is written as null."""
    source = write_input(line("a", surrogate=True), line("b", reply={"x": float("nan")}))
    assert run("-i", source, "-o", out) == 0
    found = rows(out)
    assert statuses(found) == [("a", 500), ("b", 200)]
    assert found[1]["response"]["body"] == {"x": None}


def test_error_rows_go_to_their_own_file_when_there_is_one(
    run: Any, write_input: Write, out: Path, tmp_path: Path
) -> None:
    """Both files keep the order of the input."""
    bodies = [{}, {"status": 400}, {"wait": 0.02}, {"raise": "x"}, {}]
    source = write_input(*(line(str(n), **body) for n, body in enumerate(bodies)))
    errors = tmp_path / "errors.jsonl"
    assert run("-i", source, "-o", out, "-e", errors) == 0
    assert statuses(rows(out)) == [("0", 200), ("2", 200), ("4", 200)]
    assert statuses(rows(errors)) == [("1", 400), ("3", 500)]


@pytest.mark.parametrize("old", ["", "old rows\n", None])
def test_an_error_file_without_rows_does_not_exist(
    run: Any, write_input: Write, out: Path, tmp_path: Path, old: str | None
) -> None:
    """An old one is also removed, so that it is not mistaken for this run's."""
    errors = tmp_path / "errors.jsonl"
    if old is not None:
        errors.write_text(old)
    assert run("-i", write_input(line("a")), "-o", out, "-e", errors, "--force") == 0
    assert not errors.exists()


def test_an_old_error_file_is_replaced(
    run: Any, write_input: Write, out: Path, tmp_path: Path
) -> None:
    """Its rows are gone, those of this run are there."""
    errors = tmp_path / "errors.jsonl"
    errors.write_text("old rows, many of them\n" * 100)
    source = write_input(line("a", status=400), line("b"))
    assert run("-i", source, "-o", out, "-e", errors, "--force") == 0
    assert statuses(rows(errors)) == [("a", 400)]


def test_the_dialect_of_vllm_is_printed_on_request(run: Any, write_input: Write, out: Path) -> None:
    """An error object for one failure, the plain message for another, the same for successes."""
    source = write_input(line("a", status=404), line("b", status=400, bare=True), line("c"))
    assert run("-i", source, "-o", out, "--dialect", "vllm") == 0
    unknown, bare, success = rows(out)
    assert unknown["error"]["error"]["message"] == f"No {CHAT}."
    assert bare["error"] == f"No {CHAT}."
    assert unknown["response"]["body"] is None
    assert (success["error"], success["response"]["body"]["text"]) == (None, "hello")


@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf", b"\n\n  \n"])
@pytest.mark.parametrize("flags", [["--force"], ["--resume"], ["--fail-on-error", "--force"]])
def test_an_empty_file_gives_an_empty_output(
    run: Any, tmp_path: Path, out: Path, content: bytes, flags: list[str]
) -> None:
    """Exit status 0, and no model is loaded for it."""
    source = tmp_path / "in.jsonl"
    source.write_bytes(content)
    if "--force" in flags:
        out.write_text("old\n")
    assert run("-i", source, "-o", out, *flags) == 0
    assert out.read_bytes() == b""
    assert run.engine is None


def test_the_same_file_gives_the_same_bytes(
    run: Any, write_input: Write, out: Path, tmp_path: Path
) -> None:
    """Nothing random and no clock is in a row: `created` is the age of the input."""
    source = write_input(line("a"), line("a"), line("b", status=400))
    os.utime(source, (1_000, 1_700_000_000))
    again = tmp_path / "again.jsonl"
    assert run("-i", source, "-o", out) == 0
    assert run("-i", source, "-o", again, "--max-inflight", 1) == 0
    assert out.read_bytes() == again.read_bytes()
    assert [row["response"]["body"].get("created") for row in rows(out)] == [
        1_700_000_000,
        1_700_000_000,
        None,
    ]


def test_identical_lines_have_different_ids(run: Any, write_input: Write, out: Path) -> None:
    """Duplicates run with a warning; their order and IDs distinguish them."""
    assert run("-i", write_input(line("a"), line("a")), "-o", out) == 0
    first, second = rows(out)
    assert first["id"] != second["id"]
    assert first["response"]["request_id"] != second["response"]["request_id"]
    assert first["id"].removeprefix("batch_req_") == first["response"]["request_id"][4:]


def test_duplicates_are_warned_of(
    run: Any, write_input: Write, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The lines are named, the first few of many."""
    run("-i", write_input(line("a"), line("b"), line("a")), "-o", out)
    assert "1 line repeats a custom_id: 3 (as line 1)\n" in capsys.readouterr().err
    run("-i", write_input(*[line("a")] * 1_001), "-o", out, "--force")
    words = "1,000 lines repeat a custom_id: 2 (as line 1), 3 (as line 1), "
    assert words in capsys.readouterr().err


def test_every_malformed_line_is_named_before_the_model_loads(
    run: Any, write_input: Write, out: Path
) -> None:
    """Blank lines count, the output stays as it was."""
    out.write_text("precious\n")
    source = write_input(line("a"), "", "{", line("b"), '{"custom_id":"c","body":{}}', "[]")
    with pytest.raises(BadInput) as refused:
        run("-i", source, "-o", out, "--force")
    named = [words for words in str(refused.value).splitlines() if words.startswith("  line")]
    assert [words.split(":")[0] for words in named] == ["  line 3", "  line 5", "  line 6"]
    assert "`url` is required" in named[1]
    assert "--on-invalid-line skip" in str(refused.value)
    assert refused.value.exit_status == 1
    assert run.engine is None
    assert out.read_text() == "precious\n"


def test_an_output_that_was_not_there_is_not_made_for_a_bad_file(
    run: Any, write_input: Write, out: Path, tmp_path: Path
) -> None:
    """Neither it nor the error file."""
    errors = tmp_path / "errors.jsonl"
    with pytest.raises(BadInput):
        run("-i", write_input("{"), "-o", out, "-e", errors)
    assert not out.exists()
    assert not errors.exists()


def test_of_many_malformed_lines_a_hundred_are_named(
    run: Any, write_input: Write, out: Path
) -> None:
    """The others are counted."""
    with pytest.raises(BadInput) as refused:
        run("-i", write_input(line("a"), *["{"] * 1_250), "-o", out)
    words = str(refused.value)
    assert "1,250 malformed lines" in words
    assert "  100 × not JSON: EOF while parsing an object at byte 1: lines 2–101\n" in words
    assert "  and 1,150 more lines\n" in words


def test_malformed_lines_can_have_an_error_row_instead(
    run: Any, write_input: Write, out: Path
) -> None:
    """The rest is run; code, line number and custom_id are in the row."""
    source = write_input(line("a"), "{", "", '{"custom_id":"c","body":{}}', line("b"))
    assert run("-i", source, "-o", out, "--on-invalid-line", "skip") == 0
    found = rows(out)
    assert statuses(found) == [("a", 200), (None, None), ("c", None), ("b", 200)]
    assert found[1]["error"]["code"] == found[2]["error"]["code"] == "invalid_json_line"
    assert found[1]["error"]["message"].startswith("Line 2: not JSON: ")
    assert found[2]["error"]["message"].startswith("Line 4: `url` is required")
    assert found[1]["response"] is None
    assert len({row["id"] for row in found}) == 4


def test_a_line_above_the_limit_is_named_with_its_length(
    run: Any, write_input: Write, out: Path
) -> None:
    """The limit is configurable; on request the other lines run."""
    source = write_input(line("a"), line("b", say="x" * 5_000), line("c"))
    with pytest.raises(BadInput, match=r"line 2: too long: 5,\d\d\d bytes, and the limit is 4,096"):
        run("-i", source, "-o", out, "--max-line-bytes", "4K")
    flags = ["--max-line-bytes", "4K", "--on-invalid-line", "skip"]
    assert run("-i", source, "-o", out, *flags) == 0
    assert statuses(rows(out)) == [("a", 200), (None, None), ("c", 200)]


def test_an_engine_that_cannot_load_leaves_the_output_alone(write_input: Write, out: Path) -> None:
    """Its message is shown, exit status 1, no traceback."""

    def load(config: EngineConfig, **_: object) -> Any:
        raise EngineError(f"{config.model} is a hybrid")

    out.write_text("precious\n")
    options = RunOptions(str(write_input(line("a"))), str(out), model="jamba", force=True)
    with pytest.raises(EngineFailed, match="jamba is a hybrid") as failed:
        run_job(options, load=load)
    assert failed.value.exit_status == 1
    assert out.read_text() == "precious\n"


def test_an_engine_that_dies_ends_the_run_and_can_be_resumed(
    run: Any, write_input: Write, out: Path
) -> None:
    """Rows before the death are kept, and no line behind it becomes an error row."""
    source = write_input(line("a"), line("b", wait=0.05, die="CUDA is lost"), line("c", wait=5))
    with pytest.raises(EngineFailed, match=r"CUDA is lost.*--resume"):
        run("-i", source, "-o", out)
    assert statuses(rows(out)) == [("a", 200)]
    assert run.engine.is_closed


def test_the_engine_gets_the_options(
    run: Any, write_input: Write, out: Path, tmp_path: Path
) -> None:
    """Flags become its configuration, names and template."""
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}é", encoding="utf-8")
    flags = "--served-model-name x y --max-model-len 99 --max-num-seqs 5 --dtype float".split()
    flags += "--max-num-batched-tokens 50 --kv-cache-memory 1M --seed 3 --device cpu".split()
    run("-i", write_input(line("a")), "-o", out, *flags, "--chat-template", template)
    assert run.configs == [
        EngineConfig(
            "m",
            dtype="float32",
            device="cpu",
            max_model_len=99,
            max_num_seqs=5,
            max_num_batched_tokens=50,
            kv_cache_memory=2**20,
            seed=3,
            kv_forecast=True,
        )
    ]
    assert run.loaded_with["served_names"] == ("x", "y")
    assert run.loaded_with["chat_template"] == "{{ messages }}é"
    run("-i", write_input(line("a")), "-o", out, "--force", "--chat-template", "{{ x }}")
    assert run.loaded_with["chat_template"] == "{{ x }}"
    assert run.loaded_with["served_names"] == ("m",)
    run("-i", write_input(line("a")), "-o", out, "--force", "--no-plan")
    assert not run.configs[-1].deduplication


def test_without_a_model_the_demo_model_runs_with_a_note(
    write_input: Write, out: Path, run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is served under its own name."""
    demo_model.cache_clear()  # a process prints the note once
    run_job(RunOptions(str(write_input(line("a"))), str(out)), load=run._load)
    assert run.configs[0].model == str(MODEL_PATH)
    assert run.loaded_with["served_names"] == (NAME,)
    assert (
        f"running {MODEL_PATH} (TIDEMILL_DEMO_MODEL), served as {NAME}" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--max-num-seqs", "9", "--max-num-batched-tokens", "8"], "max_num_batched_tokens"),
        (["--chat-template", "/no/such.jinja"], "chat template /no/such.jinja"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_the_input_is_read(
    run: Any, write_input: Write, out: Path, flags: list[str], words: str
) -> None:
    """The bad line is not what is complained of."""
    with pytest.raises(Refused, match=words):
        run("-i", write_input("{"), "-o", out, *flags)
    assert not out.exists()


def test_the_number_of_running_requests_is_limited(run: Any, write_input: Write, out: Path) -> None:
    """--max-inflight limits them, and all are answered."""
    source = write_input(*(line(str(n), wait=0.001) for n in range(50)))
    assert run("-i", source, "-o", out, "--max-inflight", "3") == 0
    assert len(rows(out)) == 50
    assert run.engine.most_running == 3


def test_the_window_follows_the_engine(run: Any, write_input: Write, out: Path) -> None:
    """Without --max-inflight it is four times the engine's sequences per step."""
    source = write_input(*(line(str(n), wait=0.02) for n in range(50)))
    assert run("-i", source, "-o", out) == 0
    assert run.engine.most_running == 4 * run.engine.info().max_num_seqs == 16


def test_unusual_ids_and_texts_come_back_as_they_were(
    run: Any, write_input: Write, out: Path
) -> None:
    """Any string is an id: empty, long, with line separators, NUL and emoji."""
    ids = ["", "a\nb", "\u2028", "\0", "😀", "é" * 5_000, '"\\']
    lines = [
        json.dumps(
            {"custom_id": i, "url": CHAT, "body": {"say": i, "messages": HI}},
            ensure_ascii=bool(n % 2),
        )
        for n, i in enumerate(ids)
    ]
    assert run("-i", write_input(*lines), "-o", out) == 0
    assert [row["custom_id"] for row in rows(out)] == ids
    assert [row["response"]["body"]["text"] for row in rows(out)] == ids
