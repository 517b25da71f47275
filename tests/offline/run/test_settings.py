"""Rows of one output are made with one set of settings, unless a flag allows others."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.cli.place import typed
from tests.offline.given import line, rows
from tests.offline.run.test_tables import write_recipe, write_table
from tests.offline.scripted import ScriptedEngine
from tidemill.cli.main import main
from tidemill.demo import MODEL_PATH
from tidemill.offline.console.errors import BadInput, Refused
from tidemill.offline.run.run_card import as_markdown
from tidemill.protocol.contract import EngineInfo

Write = Callable[..., Path]
NUM_LINES = 6


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Return the path of the output."""
    return tmp_path / "rows.jsonl"


@pytest.fixture
def source(write_input: Write) -> Path:
    """Return an input of six lines."""
    return write_input(*(line(f"c{number}", name=str(number)) for number in range(NUM_LINES)))


@pytest.fixture(params=[True, False], ids=["card", "no card"])
def run(run: Any, request: pytest.FixtureRequest) -> Any:
    """Run with a card or without one."""
    run.has_card = request.param
    return run


def stop(run: Any, source: Path, out: Path, *flags: object, after: int = 3) -> None:
    """Leave the first rows of a run whose engine has died."""
    run.dies_at = str(after)
    with pytest.raises(Exception, match="the engine has stopped"):
        run("-i", source, "-o", out, "--max-inflight", 1, "--no-plan", *flags)
    run.dies_at, run.engine = None, None
    assert len(rows(out)) == after


def truncated(custom_id: str, **body: Any) -> str:
    """Return a line whose answer ends at its limit of tokens."""
    choices = [{"message": {"content": "wo"}, "finish_reason": "length"}]
    return line(custom_id, reply={"choices": choices, "created": 1}, **body)


def card_of(out: Path) -> dict[str, Any]:
    """Return the card of an output."""
    found: dict[str, Any] = json.loads(out.with_name("rows.card.json").read_text())
    return found


FLAGS: list[tuple[list[object], str]] = [
    (["--max-tokens", 9], "  --max-tokens: not set before, 9 now"),
    (["--temperature", 0.5], "  --temperature: not set before, 0.5 now"),
    (["--system-prompt", "Be brief."], '  --system-prompt: not set before, "Be brief." now'),
    (["--seed", 3], "  --seed: not set before, 3 now"),
    (["--dtype", "float32"], "  --dtype: not set before, float32 now"),
    (["-q", "int8"], "  --quantization: not set before, int8 now"),
    (["--truncate-prompt-tokens", -1], "  --truncate-prompt-tokens: not set before, -1 now"),
    (["--kv-cache-dtype", "fp8"], "  --kv-cache-dtype: not set before, fp8 now"),
    (["--max-model-len", 99], "  --max-model-len: not set before, 99 now"),
    (["--tool-call-parser", "hermes"], "  --tool-call-parser: not set before, hermes now"),
    (["--reasoning-parser", "qwen3"], "  --reasoning-parser: not set before, qwen3 now"),
    (["--reasoning-field", "reasoning"], "  --reasoning-field: not set before, reasoning now"),
    (["--dialect", "vllm"], "  --dialect: not set before, vllm now"),
    (["--served-model-name", "a", "b"], '  --served-model-name: not set before, ["a", "b"] now'),
    (["--any-model"], "  --any-model: not set before, set now"),
    (["--proof-rows"], "  --proof-rows: not set before, set now"),
    (["--chat-template", "{{ messages }}"], "  --chat-template: not set before, inline (files "),
    (["--hf-overrides", '{"a": 1}'], '  --hf-overrides: not set before, {"a": 1} now'),
    (
        ["--lora-modules", "fr=./fr"],
        "  --lora-modules fr: not set before, ./fr (files unknown) now",
    ),
    (["--model", "other"], "  --model: m (files d1) before, other (files unknown) now"),
]


@pytest.mark.parametrize(("flags", "words"), FLAGS, ids=[str(flags[0]) for flags, _ in FLAGS])
def test_other_settings_are_refused_before_the_model_loads(
    run: Any, source: Path, out: Path, flags: list[object], words: str
) -> None:
    """The message has the flag and both values, and the files are as they were."""
    stop(run, source, out)
    before = out.read_bytes()
    with pytest.raises(Refused) as refused:
        run("-i", source, "-o", out, "--resume", *flags)
    message = str(refused.value)
    assert message.startswith(f"the rows of {out} have other settings than this command:\n{words}")
    assert "pass --allow-other-settings" in message
    assert (run.engine, out.read_bytes()) == (None, before)
    assert run("-i", source, "-o", out, "--resume") == 0
    assert run.engine.num_requests == NUM_LINES - 3


def test_settings_of_speed_may_change(run: Any, source: Path, out: Path, tmp_path: Path) -> None:
    """A run continues with other limits of memory and parallelism and leaves no extra file."""
    stop(run, source, out)
    assert out.with_name("rows.jsonl.settings").exists()
    speed = ["--max-num-seqs", 2, "--max-num-batched-tokens", 64, "--no-plan", "--max-inflight", 2]
    speed += ["--kv-cache-memory", "1M", "--no-speculative-decoding", "--device", "cpu"]
    assert run("-i", source, "-o", out, "--resume", *speed) == 0
    left = {path.name for path in tmp_path.iterdir()}
    cards = {"rows.card.json"} if run.has_card else set()
    assert left == {"in.jsonl", "rows.jsonl"} | cards


def test_a_first_value_that_is_not_the_default_is_shown(run: Any, source: Path, out: Path) -> None:
    """Long values are cut to where they differ."""
    prompt = "You are an assistant that answers in one word, always in "
    stop(run, source, out, "--system-prompt", f"{prompt}French.", "--max-tokens", 5)
    with pytest.raises(Refused) as refused:
        run("-i", source, "-o", out, "--resume", "--system-prompt", f"{prompt}German.")
    message = str(refused.value)
    assert "  --max-tokens: 5 before, not set now\n" in message
    assert 'word, always in French." before, …' in message
    assert 'word, always in German." now' in message


def test_other_settings_can_be_allowed(run: Any, source: Path, out: Path) -> None:
    """The card has both, each with its number of rows."""
    stop(run, source, out, "--temperature", 0)
    flags = ["--temperature", 1, "--resume", "--allow-other-settings"]
    assert run("-i", source, "-o", out, *flags) == 0
    assert len(rows(out)) == NUM_LINES
    if run.has_card:
        uses = card_of(out)["made_with"]
        assert [(each["rows"], each["settings"]["--temperature"]) for each in uses] == [
            (3, 0.0),
            (3, 1.0),
        ]
        text = as_markdown(card_of(out))
        assert "- 3 rows: --temperature 0.0\n- 3 rows: --temperature 1.0\n" in text


def test_a_second_stop_keeps_both_settings(run: Any, source: Path, out: Path) -> None:
    """The newest ones are those that a third run needs."""
    stop(run, source, out, "--seed", 1, after=2)
    stop(run, source, out, "--seed", 2, "--resume", "--allow-other-settings", after=4)
    with pytest.raises(Refused, match="--seed: 2 before, 1 now"):
        run("-i", source, "-o", out, "--seed", 1, "--resume")
    assert run("-i", source, "-o", out, "--seed", 2, "--resume") == 0
    if run.has_card:
        uses = card_of(out)["made_with"]
        assert [(each["rows"], each["settings"]["--seed"]) for each in uses] == [(2, 1), (4, 2)]


def test_another_model_in_the_same_folder_is_another_model(
    run: Any, source: Path, out: Path, tmp_path: Path
) -> None:
    """Its files count, not its name: a copy elsewhere is the same, an edit is not."""
    model, copy = tmp_path / "model", tmp_path / "copy"
    shutil.copytree(MODEL_PATH, model)
    shutil.copytree(MODEL_PATH, copy)
    stop(run, source, out, "--model", model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    with pytest.raises(Refused, match=r"--model: \S+/model \(files \w{12}\) before, \S+/model"):
        run("-i", source, "-o", out, "--resume", "--model", model)
    assert run.engine is None
    assert run("-i", source, "-o", out, "--resume", "--model", copy) == 0


def test_a_card_in_the_folder_of_the_model_changes_no_model(
    run: Any, source: Path, tmp_path: Path
) -> None:
    """Rows may be written next to the weights."""
    model = tmp_path / "model"
    shutil.copytree(MODEL_PATH, model)
    given = ["-i", source, "-o", model / "rows.jsonl", "--model", model]
    run.fails_at = {"2"}
    assert run(*given) == 0
    run.fails_at = set()
    assert run(*given, "--resume", "--retry-failed") == 0
    assert run.engine.num_requests == 1


def test_a_model_of_the_hub_is_known_by_its_revision(
    run: Any, source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has changed since is refused once it has loaded, before a line runs."""
    info = ScriptedEngine.info

    def publish(revision: str, digest: str) -> None:
        def published(engine: ScriptedEngine) -> EngineInfo:
            return replace(info(engine), revision=revision, model_digest=digest)

        monkeypatch.setattr(ScriptedEngine, "info", published)

    publish("r1", "d1")
    stop(run, source, out)
    publish("r2", "d2")
    with pytest.raises(Refused, match=r"--model: m \(files r1\) before, m \(files r2\) now"):
        run("-i", source, "-o", out, "--resume")
    assert run.engine.num_requests == 0
    publish("r3", "d1")  # another description of the same weights
    assert run("-i", source, "-o", out, "--resume") == 0


def test_a_model_that_is_only_known_once_loaded_is_compared_then(
    run: Any, source: Path, out: Path
) -> None:
    """No line runs with another one under the same name."""
    stop(run, source, out)
    path = out.with_name("rows.jsonl.settings")
    path.write_text(path.read_text().replace('"d1"', '"d0"'))
    before = out.read_bytes()
    with pytest.raises(Refused, match=r"--model: m \(files d0\) before, m \(files d1\) now"):
        run("-i", source, "-o", out, "--resume")
    assert (run.engine.num_requests, out.read_bytes()) == (0, before)


def test_failed_rows_are_retried_with_the_same_settings(
    run: Any, source: Path, out: Path, tmp_path: Path
) -> None:
    """After a whole run, too: its card has them, or a file that remains for the retry."""
    run.fails_at = {"2", "4"}
    errors = tmp_path / "errors.jsonl"
    given = ["-i", source, "-o", out, "-e", errors]
    assert run(*given, "--max-tokens", 5) == 0
    before, run.engine = out.read_bytes(), None
    assert out.with_name("rows.jsonl.settings").exists() is not run.has_card
    run.fails_at = set()
    retry = [*given, "--resume", "--retry-failed", "--max-tokens"]
    with pytest.raises(Refused, match="--max-tokens: 5 before, 9 now") as refused:
        run(*retry, 9)
    assert (
        "To rerun truncated and failed rows with the higher limit, pass --retry-truncated"
        in str(refused.value)
    )
    assert (run.engine, out.read_bytes()) == (None, before)
    assert run(*retry, 5) == 0
    assert run.engine.num_requests == 2
    assert not out.with_name("rows.jsonl.settings").exists()


def test_truncated_rows_are_retried_with_a_higher_limit(
    run: Any, write_input: Write, out: Path
) -> None:
    """Failed rows, too; rows that ended before the limit are kept, and both limits recorded."""
    source = write_input(
        line("a"), truncated("b"), line("c", name="c"), truncated("d"), line("e"), truncated("f")
    )
    run.fails_at = {"c"}
    given = ["-i", source, "-o", out, "--max-tokens"]
    assert run(*given, 5) == 0
    run.fails_at, run.engine = set(), None
    with pytest.raises(Refused, match="--max-tokens: 5 before, 9 now"):
        run(*given, 9, "--resume")
    with pytest.raises(Refused, match="--max-tokens: 5 before, 4 now"):
        run(*given, 4, "--resume", "--retry-truncated")
    with pytest.raises(Refused, match=r"now\n(?!.*--retry-truncated)") as refused:
        run(*given, 9, "--seed", 7, "--resume", "--retry-truncated")
    assert "--seed: not set before, 7 now" in str(refused.value)
    assert run.engine is None
    assert run(*given, 9, "--resume", "--retry-truncated") == 0
    assert run.engine.num_requests == 4
    assert [row["custom_id"] for row in rows(out)] == ["a", "b", "c", "d", "e", "f"]
    if run.has_card:
        uses = card_of(out)["made_with"]
        assert [(each["rows"], each["settings"]["--max-tokens"]) for each in uses] == [
            (2, 5),
            (4, 9),
        ]


def test_an_interrupted_retry_of_truncated_rows_is_continued(
    run: Any, write_input: Write, out: Path
) -> None:
    """A resume without the flag does not keep those that it was to run again."""
    source = write_input(truncated("a"), line("b"), truncated("c", name="c"), truncated("d"))
    given = ["-i", source, "-o", out, "--max-tokens"]
    assert run(*given, 5) == 0
    run.dies_at = "c"
    with pytest.raises(Exception, match="the engine has stopped"):
        run(*given, 9, "--resume", "--retry-truncated", "--max-inflight", 1, "--no-plan")
    run.dies_at = None
    with pytest.raises(Refused, match="--max-tokens: 9 before, 5 now"):
        run(*given, 5, "--resume")
    assert run(*given, 9, "--resume") == 0
    assert run.engine.num_requests == 2
    assert len(rows(out)) == 4


def test_a_retry_without_its_settings_puts_each_row_in_its_place(
    run: Any, write_input: Write, out: Path
) -> None:
    """A row may be in the old output and, run again, in the spool of the retry."""
    slow = line("a", wait=0.5, name="a")
    source = write_input(slow, line("b"), truncated("c"), line("d"), line("e"))
    given = ["-i", source, "-o", out, "--no-plan", "--max-tokens", 5]
    run.fails_at = {"a"}
    assert run(*given) == 0
    run.fails_at, run.dies_at = set(), "a"
    with pytest.raises(Exception, match="the engine has stopped"):
        run(*given, "--resume", "--retry-truncated")
    run.dies_at = None
    assert out.with_name("rows.jsonl.retry.spool").read_bytes().count(b"\n") == 1
    out.with_name("rows.jsonl.settings").unlink()
    with pytest.raises(Refused, match="finish it with only --resume"):
        run(*given, "--resume", "--retry-truncated")
    assert run(*given, "--resume") == 0
    assert run.engine.num_requests == 1
    assert [row["custom_id"] for row in rows(out)] == ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize("first", [{"status": 400}, {}], ids=["failed", "ok"])
def test_truncated_rows_in_the_spool_are_run_again(
    run: Any, write_input: Write, out: Path, first: dict[str, Any]
) -> None:
    """Rows that wait for an earlier one are included, whether or not earlier ones failed."""
    slow = line("a", wait=0.5, name="a")
    source = write_input(line("f", **first), slow, truncated("b"), line("c"), truncated("d"))
    given = ["-i", source, "-o", out, "--no-plan", "--max-tokens"]
    run.dies_at = "a"
    with pytest.raises(Exception, match="the engine has stopped"):
        run(*given, 5)
    run.dies_at, run.speed = None, 50
    assert out.with_name("rows.jsonl.spool").read_bytes().count(b"\n") == 3
    assert run(*given, 9, "--resume", "--retry-truncated") == 0
    assert run.engine.num_requests == 3 + len(first)
    assert [row["custom_id"] for row in rows(out)] == ["f", "a", "b", "c", "d"]


@pytest.mark.parametrize("flag", ["--retry-truncated", "--allow-other-settings"])
def test_flags_about_kept_rows_need_a_resume(run: Any, source: Path, out: Path, flag: str) -> None:
    """The error has the flag that is missing."""
    with pytest.raises(Refused, match=f"{flag} requires --resume"):
        run("-i", source, "-o", out, flag)


def test_rows_of_unknown_settings_are_kept_with_a_note(
    run: Any, source: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An output of an older version is not refused; the card has its rows apart."""
    stop(run, source, out)
    out.with_name("rows.jsonl.settings").unlink()
    assert run("-i", source, "-o", out, "--resume", "--seed", 4) == 0
    assert "note: the settings of the 3 kept rows are unknown" in capsys.readouterr().err
    if run.has_card:
        first, second = card_of(out)["made_with"]
        assert (first, second["rows"]) == ({"rows": 3, "settings": None}, 3)
        assert "- 3 rows: unknown settings\n" in as_markdown(card_of(out))


def test_a_file_of_settings_that_is_damaged_is_named(run: Any, source: Path, out: Path) -> None:
    """The message has what to do about it."""
    stop(run, source, out)
    path = out.with_name("rows.jsonl.settings")
    for bad in ("{", "[]", '{"made_with": 3, "retries_truncated": false}'):
        path.write_text(bad)
        with pytest.raises(BadInput, match=r"settings does not contain the settings of rows: rem"):
            run("-i", source, "-o", out, "--resume")


def test_starting_over_forgets_earlier_settings(run: Any, source: Path, out: Path) -> None:
    """So does a run of an output that was removed."""
    stop(run, source, out, "--seed", 1)
    stop(run, source, out, "--seed", 2, "--force")
    assert run("-i", source, "-o", out, "--seed", 2, "--resume") == 0
    out.unlink()
    stop(run, source, out, "--seed", 3)
    assert run("-i", source, "-o", out, "--seed", 3, "--resume") == 0
    if run.has_card:
        assert [each["rows"] for each in card_of(out)["made_with"]] == [NUM_LINES]


def test_a_run_without_a_card_is_not_of_the_settings_of_an_older_card(
    run: Any, source: Path, out: Path
) -> None:
    """Its own settings remain next to it, as the card belongs to other rows."""
    if not run.has_card:
        return
    assert run("-i", source, "-o", out, "--seed", 1) == 0
    assert run("-i", source, "-o", out, "--seed", 2, "--force", "--no-card") == 0
    with pytest.raises(Refused, match="--seed: 2 before, 1 now"):
        run("-i", source, "-o", out, "--seed", 1, "--resume")
    assert run("-i", source, "-o", out, "--seed", 2, "--resume") == 0
    assert card_of(out)["made_with"][0]["settings"]["--seed"] == 2


def test_outputs_that_differ_in_their_suffix_have_separate_cards(
    run: Any, source: Path, out: Path
) -> None:
    """The second card has the full name, so that both are compared with their own settings."""
    if not run.has_card:
        return
    other = out.with_suffix(".ndjson")
    for _ in range(2):
        assert run("-i", source, "-o", out, "--seed", 1, "--force") == 0
        assert run("-i", source, "-o", other, "--seed", 2, "--force") == 0
    assert out.with_name("rows.ndjson.card.json").exists()
    for path, seed in ((out, 1), (other, 2)):
        with pytest.raises(Refused, match=f"--seed: {seed} before, 3 now"):
            run("-i", source, "-o", path, "--seed", 3, "--resume")


def test_truncated_rows_are_retried_without_a_limit(
    run: Any, write_input: Write, out: Path
) -> None:
    """Without a card their settings are retained for that, too."""
    source = write_input(line("a"), truncated("b"))
    given = ["-i", source, "-o", out]
    assert run(*given, "--max-tokens", 5) == 0
    with pytest.raises(Refused, match="--seed: not set before, 7 now"):
        run(*given, "--seed", 7, "--resume", "--retry-truncated")
    assert run(*given, "--resume", "--retry-truncated") == 0
    assert run.engine.num_requests == 1


def test_a_card_remains_where_a_resume_runs_nothing(run: Any, source: Path, out: Path) -> None:
    """Its tokens and times are those of the run that made the rows."""
    if not run.has_card:
        return
    assert run("-i", source, "-o", out) == 0
    before = card_of(out)
    assert before["tokens"]["prompt"] > 0
    assert run("-i", source, "-o", out, "--resume") == 0
    assert run("-i", source, "-o", out, "--resume", "--retry-failed") == 0
    assert card_of(out) == before
    with pytest.raises(Refused, match="--seed: not set before, 5 now"):
        run("-i", source, "-o", out, "--resume", "--seed", 5)


def test_lines_added_to_the_input_need_the_same_settings(run: Any, source: Path, out: Path) -> None:
    """The card of the finished run has them."""
    if not run.has_card:
        return
    assert run("-i", source, "-o", out, "--temperature", 0) == 0
    with source.open("a") as file:
        file.write(f"{line('new')}\n")
    with pytest.raises(Refused, match=r"--temperature: 0\.0 before, not set now"):
        run("-i", source, "-o", out, "--resume")
    assert run("-i", source, "-o", out, "--resume", "--temperature", 0) == 0
    assert [each["rows"] for each in card_of(out)["made_with"]] == [NUM_LINES + 1]


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_changed_prompt_of_a_table_is_refused_as_such(
    run: Any, tmp_path: Path, suffix: str
) -> None:
    """Neither the input nor a line of it is blamed, and no flag makes its rows fit."""
    texts = [f"t{number}" for number in range(NUM_LINES)]
    source = write_table(tmp_path / f"table.{suffix}", pa.table({"text": texts}))
    write_recipe(tmp_path)
    out = tmp_path / f"table.output.{suffix}"
    rows_file = tmp_path / f"{out.name}.rows.jsonl"
    assert run(source, "--shard", "1/1", "--prompt", "{{ text }}") == 0
    whole = Path(f"{rows_file}.1-of-1").read_bytes()
    rows_file.write_bytes(b"".join(whole.splitlines(keepends=True)[:2]))
    mark = json.loads(Path(f"{rows_file}.1-of-1.done").read_text())
    rows_file.with_name(f"{rows_file.name}.settings").write_text(
        json.dumps({"made_with": mark["made_with"], "retries_truncated": False})
    )
    run.engine = None
    changed = ["--prompt", "Label: {{ text }}", "--resume"]
    with pytest.raises(Refused) as refused:
        run(source, *changed)
    message = str(refused.value)
    assert message.startswith(f"the rows of {out} have other settings than this command:\n")
    assert '  --prompt: "{{ text }}" before, "Label: {{ text }}" now\n' in message
    assert "line" not in message
    assert "--allow-other-settings" not in message
    with pytest.raises(BadInput, match=r"have another recipe \(--prompt\), so they cannot"):
        run(source, *changed, "--allow-other-settings")
    write_recipe(tmp_path, "params.stop = 'x'")
    with pytest.raises(Refused, match=r"`params\.stop` of the recipe: not set before, x now"):
        run(source, "--prompt", "{{ text }}", "--resume")
    assert run.engine is None
    write_recipe(tmp_path)
    assert run(source, "--prompt", "{{ text }}", "--keep", "text", "--resume") == 0
    assert run.engine.num_requests == NUM_LINES - 2
    assert out.exists()
    assert not rows_file.with_name(f"{rows_file.name}.settings").exists()


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_complete_table_of_other_settings_is_refused(
    run: Any, tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resume would leave it as it is."""
    source = write_table(tmp_path / f"table.{suffix}")
    write_recipe(tmp_path)
    assert run(source) == 0
    assert run(source, "--resume") == 0
    if run.has_card:
        capsys.readouterr()
        with pytest.raises(Refused, match="--prompt: "):
            run(source, "--resume", "--prompt", "Hi {{ text }}")
        assert "is complete" not in capsys.readouterr().err
        with pytest.raises(Refused, match="--max-tokens: not set before, 7 now"):
            run(source, "--resume", "--max-tokens", 7)
    assert run(source, "--resume", "--retry-truncated") == 0


def test_failed_rows_of_a_table_are_retried_with_the_same_settings(
    run: Any, tmp_path: Path
) -> None:
    """Their rows are kept, and so are the settings."""
    cells = pa.table({"text": ["a", None]})
    source = write_table(tmp_path / "table.parquet", cells)
    write_recipe(tmp_path)
    given = [source, "--on-invalid-line", "skip"]
    assert run(*given, "--max-tokens", 5) == 0
    with pytest.raises(Refused, match="--max-tokens: 5 before, 9 now"):
        run(*given, "--resume", "--retry-failed", "--max-tokens", 9)
    flags = ["--resume", "--retry-truncated", "--max-tokens", 9]
    assert run(*given, *flags) == 0


@pytest.mark.long  # with a real model, twice
def test_several_engines_have_the_settings_of_one(
    tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their number is not a setting of the rows: one engine continues the run of two."""
    source = tmp_path / "in.jsonl"
    source.write_text("".join(f"{line(str(number))}\n" for number in range(4)))
    flags = ["run", str(source), "-o", str(out), "--temperature", "0", "--max-tokens"]
    several = ["--data-parallel-size", "2"]
    assert main([*flags, "3", *several]) == 0
    whole, [use] = out.read_bytes(), card_of(out)["made_with"]
    assert (use["rows"], use["settings"]["--max-tokens"]) == (4, 3)
    assert use["settings"]["--model"]["digest"] == card_of(out)["model"]["digest"]
    out.write_bytes(b"".join(whole.splitlines(keepends=True)[:2]))
    assert typed(capsys, *flags, "9", *several, "--resume")[0] == 2
    assert main([*flags, "3", "--resume"]) == 0
    assert out.read_bytes() == whole
    out.write_bytes(b"".join(whole.splitlines(keepends=True)[:2]))
    more = ["--resume", "--retry-truncated", *several]
    assert main([*flags, "9", *more]) == 0
    texts = [row["response"]["body"]["usage"]["completion_tokens"] for row in rows(out)]
    assert min(texts) > 3


def join(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Join shards; return the exit status and the messages."""
    capsys.readouterr()
    status, _, stderr = typed(capsys, "join", *map(str, arguments))
    return status, stderr


def test_shards_of_different_settings_are_not_joined(
    run: Any, source: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By marks or by the input; a flag joins them, and the output has the settings of both."""
    given = ["-i", source, "-o", out, "--shard"]
    assert run(*given, "1/2", "--temperature", 0) == 0
    assert run(*given, "2/2", "--temperature", 1) == 0
    for flags in ([], ["-i", source]):
        status, stderr = join(capsys, out, *flags)
        assert status == 2
        assert "cannot be joined, because its shards were run with different settings:\n" in stderr
        assert "  --temperature: 0.0 in rows.jsonl.1-of-2, 1.0 in rows.jsonl.2-of-2\n" in stderr, (
            stderr
        )
        assert not out.exists()
    assert join(capsys, out, "--allow-other-settings")[0] == 0
    made_with = json.loads(out.with_name("rows.jsonl.settings").read_text())["made_with"]
    assert [(each["rows"], each["settings"]["--temperature"]) for each in made_with] == [
        (3, 0.0),
        (3, 1.0),
    ]
    with pytest.raises(Refused, match=r"--temperature: 1\.0 before, not set now"):
        run("-i", source, "-o", out, "--resume")


def test_a_shard_is_resumed_with_its_settings(
    run: Any, source: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """While it is incomplete, and from its mark afterwards."""
    given = ["-i", source, "-o", out, "--shard"]
    assert run(*given, "1/2", "--seed", 1) == 0
    part = out.with_name("rows.jsonl.2-of-2")
    run.dies_at = "4"
    with pytest.raises(Exception, match="the engine has stopped"):
        run(*given, "2/2", "--seed", 1, "--max-inflight", 1, "--no-plan")
    run.dies_at = None
    with pytest.raises(Refused, match="--seed: 1 before, not set now"):
        run(*given, "2/2", "--resume")
    assert run(*given, "2/2", "--seed", 1, "--resume") == 0
    assert not part.with_name(f"{part.name}.settings").exists()
    with pytest.raises(Refused, match="--seed: 1 before, 2 now"):
        run(*given, "2/2", "--seed", 2, "--resume")
    assert join(capsys, out)[0] == 0
    assert len(rows(out)) == NUM_LINES


def test_shards_whose_truncated_rows_were_run_again_are_joined(
    run: Any, write_input: Write, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A shard without such rows has the higher limit by the same command."""
    source = write_input(line("a"), line("b"), line("c"), truncated("d"))
    given = ["-i", source, "-o", out, "--shard"]
    for number in (1, 2):
        assert run(*given, f"{number}/2", "--max-tokens", 5) == 0
    flags = ["--resume", "--retry-truncated", "--max-tokens", 9]
    assert run(*given, "2/2", *flags) == 0
    assert join(capsys, out)[0] == 2
    assert run(*given, "1/2", *flags) == 0
    assert join(capsys, out)[0] == 0
    made_with = json.loads(out.with_name("rows.jsonl.settings").read_text())["made_with"]
    assert [(each["rows"], each["settings"]["--max-tokens"]) for each in made_with] == [
        (3, 5),
        (1, 9),
    ]


def test_a_table_of_joined_shards_has_their_settings(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command that makes the table needs them, too, and its card has them."""
    source = write_table(tmp_path / "table.parquet")
    write_recipe(tmp_path)
    for number in (1, 2):
        assert run(source, "--shard", f"{number}/2", "--max-tokens", 5) == 0
    joined = tmp_path / "table.output.parquet.rows.jsonl"
    assert join(capsys, joined)[0] == 0
    with pytest.raises(Refused, match="--max-tokens: 5 before, not set now"):
        run(source, "--resume")
    assert run(source, "--resume", "--max-tokens", 5) == 0
    assert not joined.with_name(f"{joined.name}.settings").exists()
    if run.has_card:
        card = json.loads((tmp_path / "table.output.card.json").read_text())
        assert [each["rows"] for each in card["made_with"]] == [3]


def test_a_shard_of_an_older_version_is_joined_with_a_note(
    run: Any, source: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its mark has no settings."""
    given = ["-i", source, "-o", out, "--shard"]
    for number in (1, 2):
        assert run(*given, f"{number}/2") == 0
    mark = out.with_name("rows.jsonl.1-of-2.done")
    found = json.loads(mark.read_text())
    del found["made_with"]
    mark.write_text(json.dumps(found))
    status, stderr = join(capsys, out)
    assert status == 0
    assert "note: the settings of 1 shard are unknown, so they were not compared\n" in stderr


def test_a_resume_with_reuse_compares_settings_too(
    run: Any, write_input: Write, out: Path, tmp_path: Path
) -> None:
    """Reused rows are of the settings of the run that takes them."""
    lines = [line(f"c{number}", temperature=0, name=str(number)) for number in range(NUM_LINES)]
    source = write_input(*lines)
    reuse = ["--model", MODEL_PATH, "--any-model", "--reuse", tmp_path / "kept"]
    assert run("-i", source, "-o", tmp_path / "first.jsonl", *reuse, "--max-tokens", 9) == 0
    stop(run, source, out, "--model", MODEL_PATH, "--any-model", "--max-tokens", 5)
    flags = ["-i", source, "-o", out, "--resume", *reuse, "--max-tokens", 9]
    with pytest.raises(Refused, match="--max-tokens: 5 before, 9 now"):
        run(*flags)
    assert run(*flags, "--allow-other-settings") == 0
    assert run.engine is None
    if run.has_card:
        assert [each["rows"] for each in card_of(out)["made_with"]] == [3, 3]


def test_rows_that_were_not_uploaded_have_their_settings(
    run: Any, source: Path, tmp_dir: Path, server: Any
) -> None:
    """The file that they are kept in is resumed with the same."""
    run.dies_at = "3"
    flags = ["-i", source, "--output-tmp-dir", tmp_dir, "--max-inflight", 1, "--no-plan"]
    with pytest.raises(Exception, match="Nothing was uploaded"):
        run(*flags, "-o", f"{server.url}/out", "--seed", 1)
    run.dies_at = None
    [kept] = tmp_dir.glob("*.jsonl")
    with pytest.raises(Refused, match="--seed: 1 before, not set now"):
        run("-i", source, "-o", kept, "--resume")
    assert run("-i", source, "-o", kept, "--resume", "--seed", 1) == 0
    assert len(rows(kept)) == NUM_LINES
