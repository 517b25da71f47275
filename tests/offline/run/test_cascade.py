"""Cascades: a second model decides the rows of which the first one is least sure."""

from __future__ import annotations

import csv
import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from tidemill import demo
from tidemill.cli.main import main, parse
from tidemill.engine.config import EngineConfig
from tidemill.handler.aws.calls import Operation
from tidemill.offline.console.errors import EngineFailed, EngineLost, Refused
from tidemill.offline.engine import weights
from tidemill.offline.engine.engine import engine_config, load_engine
from tidemill.offline.run import cascade
from tidemill.offline.run.cascade import run_cascade
from tidemill.offline.run.run_flags import options_from
from tidemill.protocol.contract import EngineError

FIRST = str(demo.MODEL_PATH)
# With AMX, sums depend on the other rows of a step.
RUN = ("run", "--batch-invariant")
ASK = ("--ask", "town: Is a town named?", "--ask", "size = low<high: How many?")
NUM_ROWS = 24
BELOW = 0.8


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the demo model with noise in its weights, so that it decides differently."""
    folder = tmp_path_factory.mktemp("second") / "model"
    shutil.copytree(FIRST, folder)
    noise = torch.Generator().manual_seed(1)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if "proj" in name:
            factor = 1 + 0.3 * torch.randn(weight.shape, generator=noise)
            weights[name] = (weight.float() * factor).to(weight.dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


class _Kept:
    """An engine that the runs of all tests share."""

    def __init__(self, served: Any) -> None:
        self._served = served

    def __getattr__(self, name: str) -> Any:
        return getattr(self._served, name)

    def close(self) -> None:
        """Leave the engine to the next run."""


@pytest.fixture(scope="module")
def kept(second: str) -> Iterator[dict[tuple[EngineConfig, tuple[str, ...]], _Kept]]:
    """Return the engines of most runs, by their settings, loaded before process checks."""
    engines: dict[tuple[EngineConfig, tuple[str, ...]], _Kept] = {}
    with ExitStack() as stack:
        for model, names in ((FIRST, (FIRST,)), (FIRST, (FIRST, "*")), (second, (second, "*"))):
            config = engine_config(options_from(parse([*RUN, "in.jsonl", "--model", model])))
            config = replace(config, admission="arrival")  # as a plan sets it
            served = load_engine(config, served_names=names, chat_template=None)
            engines[config, names] = _Kept(stack.enter_context(closing(served)))
        yield engines


@pytest.fixture(autouse=True)
def _shared_engines(kept: dict[Any, _Kept], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs use the engines that are loaded."""

    def load(config: EngineConfig, *, served_names: tuple[str, ...], **given: Any) -> Any:
        served = kept.get((config, served_names))
        return served or load_engine(config, served_names=served_names, **given)

    monkeypatch.setattr("tidemill.cli.commands.run.load_engine", load)
    monkeypatch.setattr(f"{__name__}._load", load)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Return a table with gold answers."""
    path = tmp_path / "t.csv"
    rows = [f"{'Paris ' * (n % 3)}{n},{'yes' if n % 3 else 'no'}\n" for n in range(NUM_ROWS)]
    path.write_text("text,gold\n" + "".join(rows))
    return path


_load: Callable[..., Any] = load_engine


def _run(*words: object, load: Callable[..., Any] | None = None) -> int:
    """Run `tidemill run` in this process, as the command does."""
    parsed = parse([*RUN, "--model", FIRST, *map(str, words)])
    return run_cascade(options_from(parsed), load=load or _load)


def _table(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return found


def test_the_unsure_rows_of_a_table_are_decided_by_the_second_model(
    table: Path, second: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each row equals that of its model alone, and the card compares both with the cascade."""
    ask = (str(table), *ASK, "--prompt", "{{ text }}")
    alone = {model: tmp_path / f"{n}.parquet" for n, model in enumerate((FIRST, second))}
    for model, path in alone.items():
        assert main([*RUN, *ask, "-o", str(path), "--model", model]) == 0
    target = tmp_path / "out.parquet"
    escalate = ("--escalate", second, "--escalate-below", BELOW, "--price-per-hour", "2")
    gold = ("--gold", "town=gold")
    closed = []

    def load(config: EngineConfig, **given: Any) -> Any:  # the times of others are not in its card
        served = load_engine(config, **given)
        close = served.close
        served.close = lambda: closed.append(config.model) or close()
        return served

    assert _run(*ask, "-o", target, *escalate, *gold, "--card-markdown", load=load) == 0
    assert closed == [FIRST, second]
    firsts, seconds = (_table(path) for path in alone.values())
    chosen = [min(row["town_confidence"], row["size_confidence"]) < BELOW for row in firsts]
    assert 0 < sum(chosen) < NUM_ROWS
    assert _table(target) == [
        {
            **(late if is_chosen else early),
            "model": second if is_chosen else FIRST,
            "escalation_error": None,
        }
        for early, late, is_chosen in zip(firsts, seconds, chosen, strict=True)
    ]
    card = json.loads(target.with_name("out.card.json").read_text())
    parts = card["cascade"]["parts"]
    right = [row["town"] is (row["gold"] == "yes") for row in _table(target)]
    assert parts["cascade"]["accuracy"]["town"] == {
        "gold_rows": NUM_ROWS,
        "accuracy": sum(right) / NUM_ROWS,
    }
    assert parts["second"]["rows"] == card["cascade"]["escalated"] == sum(chosen)
    tokens = [part["prompt_tokens"] for part in (parts["first"], parts["second"])]
    assert card["tokens"]["prompt"] == sum(tokens) == parts["cascade"]["prompt_tokens"]
    assert card["cost"] == pytest.approx(parts["first"]["cost"] + parts["second"]["cost"])
    host = card["seconds_by_cause"]["host"]  # most of the time, unless the machine is busy
    assert 0.5 * card["seconds"] < sum(host.values()) < card["seconds"] + 0.1
    assert "second model, escalated rows" in target.with_name("out.card.md").read_text()
    assert not [*tmp_path.glob("*.cascade")]
    capsys.readouterr()
    assert _run(*ask, "-o", target, *escalate, *gold, "--resume") == 0
    assert "is complete: nothing to run" in capsys.readouterr().err
    assert main(["calibrate", str(target), "--gold", "town=gold"]) == 0


def test_a_file_of_both_kinds_of_decisions_is_a_cascade_too(second: str, tmp_path: Path) -> None:
    """Rows keep order and IDs, and name their model; invalid requests are not escalated."""
    source = _both_kinds(tmp_path)
    alone = []
    for n, model in enumerate((FIRST, second)):
        out = tmp_path / f"{n}.jsonl"
        given = [*RUN, str(source), "-o", str(out), "--model", model, "--any-model"]
        assert main(given) == 0
        alone.append([json.loads(row) for row in out.read_text().splitlines()])
    target = tmp_path / "out.jsonl"
    shares = [_share(row) for row in alone[0]]
    below = sorted(shares)[len(shares) // 2]
    assert _run(source, "-o", target, "--escalate", second, "--escalate-below", below) == 0
    rows = [json.loads(row) for row in target.read_text().splitlines()]
    for early, late, share in zip(*alone, shares, strict=True):
        expected = early
        if share < below:
            late["response"]["body"]["model"] = second
            expected = late
        assert rows.pop(0) == expected
    assert not rows


def _both_kinds(folder: Path) -> Path:
    """Return a file of twelve decisions in both formats; the fifth is invalid."""
    source = folder / "in.jsonl"
    lines: list[dict[str, Any]] = []
    for n in range(12):
        text = f"{'Paris ' * (n % 3)}{n}"
        question = {"type": "predicate", "name": "q", "instructions": "Is a town named?"}
        body: dict[str, Any] = {"model": FIRST, "input": text, "questions": [question]}
        url = "/v1/decisions"
        if n % 2:
            url = "/v1/systemone"
            noul = {"type": "noul", "instructions": "Is a town named?"}
            body = {"model": FIRST, "state": text, "questions": {"q": noul}}
        lines.append({"custom_id": f"c{n}", "method": "POST", "url": url, "body": body})
    lines[4]["body"]["questions"] = []
    source.write_text("\n" + "".join(json.dumps(line) + "\n" for line in lines))
    return source


def _share(row: dict[str, Any]) -> float:
    if row["response"]["status_code"] != 200:
        return 1.0
    answers = row["response"]["body"]["answers"]
    answer = answers["q"] if isinstance(answers, dict) else answers[0]
    yes = answer["noul"] if "noul" in answer else answer["probability"]
    return max(float(yes), 1 - float(yes))


def test_a_chat_decides_unsure_rows_of_both_kinds(second: str, tmp_path: Path) -> None:
    """Rows keep order and IDs, also if the run stopped, and its tokens are counted."""
    source, target = _both_kinds(tmp_path), tmp_path / "out.jsonl"
    alone = tmp_path / "alone.jsonl"
    assert main([*RUN, str(source), "-o", str(alone), "--model", FIRST, "--any-model"]) == 0
    early = [json.loads(line) for line in alone.read_text().splitlines()]
    below = sorted(map(_share, early))[6]
    escalate = ("--escalate", second, "--escalate-by", "chat", "--escalate-below", below)
    given = (source, "-o", target, *escalate)
    with pytest.raises(EngineLost):
        _run(*given, load=_loading(second))
    assert _run(*given, "--resume") == 0
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert [row["id"] for row in rows] == [row["id"] for row in early]
    num_tokens = 0
    for row, before in zip(rows, early, strict=True):
        if _share(before) >= below:
            assert row == before
            continue
        body = row["response"]["body"]
        assert body["model"] == second
        assert body.keys() == before["response"]["body"].keys()
        num_tokens += body["usage"]["output_tokens"]
    card = json.loads(target.with_name("out.card.json").read_text())
    assert card["tokens"]["completion"] == num_tokens > 0
    assert card["cascade"]["settings"]["--escalate-by"] == "chat"
    stopped = target.read_bytes()
    assert _run(*given, "--force") == 0
    assert target.read_bytes() == stopped


def test_the_first_answer_is_kept_where_the_chat_is_truncated_or_too_long(tmp_path: Path) -> None:
    """The row names the first model and the reason; the rows are the same after a resume."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    question = {"type": "predicate", "name": "q", "instructions": "Is a town named?"}
    bodies: list[dict[str, Any]] = [
        {"input": "Paris"},
        {"input": "Paris", "max_completion_tokens": 2},
        {"input": "1" * 100},
    ]
    source.write_text(
        "".join(
            json.dumps(
                {
                    "custom_id": f"c{n}",
                    "method": "POST",
                    "url": "/v1/decisions",
                    "body": {"model": FIRST, "questions": [question], **body},
                }
            )
            + "\n"
            for n, body in enumerate(bodies)
        )
    )
    second = str(shutil.copytree(FIRST, tmp_path / "chat"))
    escalate = ("--escalate", second, "--escalate-by", "chat", "--escalate-below", "1")
    given = (source, "-o", target, *escalate, "--max-model-len", "160")
    with pytest.raises(EngineLost):
        _run(*given, load=_loading(second, 1))
    assert _run(*given, "--resume") == 0
    bodies = [json.loads(row)["response"]["body"] for row in target.read_text().splitlines()]
    assert [body["model"] for body in bodies] == [second, FIRST, FIRST]
    assert "escalation_error" not in bodies[0]
    reasons = [body["escalation_error"] for body in bodies[1:]]
    assert [each["code"] for each in reasons] == ["answer_truncated", "context_length_exceeded"]
    assert {each["model"] for each in reasons} == {second}
    assert all(body["answers"][0]["probability"] for body in bodies)
    resumed = target.read_bytes()
    assert _run(*given, "--force") == 0
    assert target.read_bytes() == resumed


def test_a_chat_of_the_same_model_fills_the_columns_of_a_table(table: Path, tmp_path: Path) -> None:
    """Values, probabilities and models are as after a decision, and gold rows measure them."""
    target = tmp_path / "out.parquet"
    ask = (table, *ASK, "--prompt", "{{ text }}", "-o", target, "--permutations", "2")
    escalate = ("--escalate", FIRST, "--escalate-by", "chat", "--target-accuracy", "0.99")
    assert _run(*ask, *escalate, "--gold", "town=gold") == 0
    rows = _table(target)
    assert {row["model"] for row in rows} == {FIRST}
    for row in rows:
        shares = row["town_probabilities"]
        assert sum(shares.values()) == pytest.approx(1)
        assert row["town_confidence"] == max(shares.values())
        assert row["usage"]["completion_tokens"] > 0
    card = json.loads(target.with_name("out.card.json").read_text())
    right = [row["town"] is (row["gold"] == "yes") for row in rows]
    assert card["cascade"]["parts"]["second"]["accuracy"]["town"]["accuracy"] == sum(right) / 24
    assert card["questions"][0]["mean_label_mass"] is None


class _Dying:
    """An engine that stops after some requests, or fails them if it `only_fails`."""

    def __init__(self, served: Any, requests: int, *, only_fails: bool) -> None:
        self._served = served
        self._left = requests
        self._only_fails = only_fails

    def __getattr__(self, name: str) -> Any:
        return getattr(self._served, name)

    async def respond(self, *given: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise (ValueError if self._only_fails else EngineError)("it ended")
        return await self._served.respond(*given)


def _loading(dying: str, requests: int = 2, *, only_fails: bool = False) -> Callable[..., Any]:
    """Return a load whose engine of one model ends early."""

    def load(config: EngineConfig, **given: Any) -> Any:
        served = _load(config, **given)
        if config.model != dying:
            return served
        return _Dying(served, requests, only_fails=only_fails)

    return load


def _given(table: Path, second: str, target: Path) -> tuple[object, ...]:
    ask = (table, "-o", target, *ASK, "--prompt", "{{ text }}")
    return (*ask, "--escalate", second, "--gold", "town=gold", "--target-accuracy", "0.7")


def test_a_stopped_cascade_resumes_at_any_point_to_the_same_bytes(
    table: Path,
    second: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It stops with the first model, between both, with the second, and before the table."""
    whole, target = tmp_path / "whole.csv", tmp_path / "t2.csv"
    assert _run(*_given(table, second, whole)) == 0
    shown = capsys.readouterr().err
    assert "gold rows" in shown
    assert "fewer than 50 gold rows: the threshold is uncertain" in shown
    given = _given(table, second, target)
    with pytest.raises(EngineLost, match="with --resume"):
        _run(*given, load=_loading(FIRST))
    with pytest.raises(Refused, match="contains finished rows of a stopped run: pass --resume"):
        _run(*given)
    with pytest.raises(Refused, match=r"--target-accuracy: 0\.7 before, 0\.8 now"):
        _run(*given[:-1], "0.8", "--resume")
    for step in ("select", "merge"):
        with monkeypatch.context() as broken:
            broken.setattr(cascade, step, _interrupt)
            with pytest.raises(KeyboardInterrupt):
                _run(*given, "--resume")
        if step == "select":
            with pytest.raises(EngineLost):
                _run(*given, "--resume", load=_loading(second))
    assert not target.exists()
    assert _run(*given, "--resume", load=_no_load) == 0
    assert target.read_bytes() == whole.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("t.csv", "t2.card.json", "t2.csv", "whole.card.json", "whole.csv")
    ]


def _interrupt(*_: object) -> Any:
    raise KeyboardInterrupt


def _no_load(*_: object, **__: object) -> Any:
    raise AssertionError("no model is needed")


def test_rows_that_fail_with_the_second_model_are_retried_with_it(
    table: Path, second: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Until then they keep the first model's answer, and the output and the card say why."""
    whole, target = tmp_path / "whole.csv", tmp_path / "t2.csv"
    assert _run(*_given(table, second, whole)) == 0
    given = _given(table, second, target)
    assert _run(*given, load=_loading(second, only_fails=True)) == 0
    rows = [*csv.DictReader(target.read_text().splitlines())]
    failed = [row for row in rows if row["escalation_error"]]
    assert {row["escalation_error"] for row in failed} == {
        "The engine failed on this request: ValueError: it ended"
    }
    assert all(row["model"] == FIRST and row["town"] and not row["error"] for row in failed)
    card = json.loads(target.with_name("t2.card.json").read_text())
    found = card["cascade"]
    assert found["escalation_failed"] == len(failed) == found["escalated"] - 2
    assert found["escalation_errors"][0]["count"] == len(failed)
    assert card["rows"]["failed"] == 0
    assert f"{len(failed)} rows failed with the second model" in capsys.readouterr().err
    assert main(["retry", str(target)]) == 0
    assert target.read_bytes() == whole.read_bytes()
    assert not [*tmp_path.glob("*.cascade")]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("--escalate", "2", "--escalate-below", "1.5"), "'1.5' must be a number above 0 and at"),
        (("--escalate", "2"), "--escalate requires a threshold: pass --escalate-below 0.8, or"),
        (
            ("--escalate", "2", "--escalate-below", "0.8", "--target-accuracy", "0.9"),
            "--escalate-below cannot be combined with --target-accuracy: omit one",
        ),
        (("--escalate-below", "0.8"), "--escalate-below requires --escalate MODEL"),
        (("--escalate-by", "chat"), "--escalate-by requires --escalate MODEL"),
        (("--escalate", "2", "--target-accuracy", "0.9"), "name their column with --gold"),
        (("--escalate", "./no", "--escalate-below", "0.8"), "--escalate ./no: folder not found"),
        (("--escalate", "", "--escalate-below", "0.8"), "--escalate is empty: name a model"),
        (("--escalate", FIRST, "--escalate-below", "0.8"), "is the same model as --model"),
        (("--escalate", "2", "--escalate-below", "0.8", "--shard", "1/2"), "with --shard: omit"),
        (
            (
                "--escalate",
                "2",
                "--escalate-below",
                "0.8",
                "--calibrate",
                "batch",
                "--prior",
                "even",
            ),
            "--escalate cannot be combined with --calibrate, because each model would need its own",
        ),
    ],
)
def test_an_unsuitable_cascade_is_refused_before_anything_runs(
    table: Path, given: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The refusal is one sentence, and nothing is written."""
    flags = ("-o", str(table.with_name("out.csv")), "--ask", "town: Is a town named?")
    assert main([*RUN, str(table), *flags, "--model", FIRST, *given]) == 2
    assert words in capsys.readouterr().err
    assert [path.name for path in table.parent.iterdir()] == ["t.csv"]


class _EmptyBucket:
    """S3 without objects."""

    def run(self, operation: Operation[Any]) -> None:
        """Answer the first call, a listing."""
        next(operation)
        operation.send({})


def test_a_second_model_that_cannot_decide_or_does_not_fit_is_refused(
    table: Path, second: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So are requests without questions, and a model whose files are incomplete."""
    cascade_flags = ("--escalate-below", "0.8", "--escalate")
    chats = table.with_name("chats.jsonl")
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    chats.write_text(json.dumps(line) + "\n")
    with pytest.raises(Exception, match="has requests for /v1/chat/completions, but --escalate"):
        _run(chats, *cascade_flags, second)
    with pytest.raises(Refused, match="--escalate needs questions to decide: pass --ask"):
        _run(table, "--prompt", "{{ text }}", *cascade_flags, second)
    silent = shutil.copytree(second, table.parent / "silent")
    settings = json.loads((silent / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (silent / "tokenizer_config.json").write_text(json.dumps(settings))
    (silent / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(Refused, match="does not chat: name a chat model, or omit --escalate-by"):
        _run(table, *ASK, *cascade_flags, str(silent), "--escalate-by", "chat")
    shutil.rmtree(silent)
    monkeypatch.setattr(weights, "_aws_in", lambda _: _EmptyBucket())
    with pytest.raises(EngineFailed, match="no objects found under s3://bucket/second/"):
        _run(table, *ASK, *cascade_flags, "s3://bucket/second")
    speech = str(Path(FIRST).with_name("speech"))
    with pytest.raises(Refused, match="so it cannot decide: name a chat model"):
        _run(table, *ASK, *cascade_flags, speech)
    monkeypatch.setattr("tidemill.engine.model.model_plan.free_bytes", lambda _: 1_000)
    with pytest.raises(Refused, match="does not fit into the free memory of this machine"):
        _run(table, *ASK, *cascade_flags, second)
    assert sorted(path.name for path in table.parent.iterdir()) == ["chats.jsonl", "t.csv"]


@pytest.mark.long
@pytest.mark.parametrize(
    "threshold", [("--escalate-below", "0.75"), ("--gold", "gold", "--target-accuracy", "0.7")]
)
def test_a_killed_cascade_resumes_to_the_same_bytes(
    second: str, tmp_path: Path, threshold: tuple[str, ...]
) -> None:
    """Five runs are killed at random moments, two of them after the second model's start."""
    table = tmp_path / "t.csv"
    rows = [f"{'Paris ' * (n % 5)}{n},{'yes' if n % 5 else 'no'}\n" for n in range(4_000)]
    table.write_text("text,gold\n" + "".join(rows))
    whole, moments = tmp_path / "whole.csv", random.Random(7)
    command = [sys.executable, "-m", "tidemill", "run", str(table), *ASK, "--model", FIRST]
    command += ["--prompt", "{{ text }}", "--escalate", second, *threshold, "-o"]
    subprocess.run([*command, str(whole)], check=True, capture_output=True)
    for kill in range(5):
        target = tmp_path / f"{kill}.csv"
        begun = target.with_name(f"{kill}.csv.cascade") / ("first.jsonl", "second.jsonl")[kill % 2]
        process = subprocess.Popen([*command, str(target)], stderr=subprocess.DEVNULL)
        while not begun.exists():
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(moments.uniform(0, 2))
        process.kill()
        process.wait()
        subprocess.run([*command, str(target), "--resume"], check=True, capture_output=True)
        assert target.read_bytes() == whole.read_bytes(), kill
    assert len(whole.read_text().splitlines()) == 4_001
