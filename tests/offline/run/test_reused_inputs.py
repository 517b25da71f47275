"""Second runs of every kind of input: all rows are reused, no model is loaded, rows are equal."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

from tests.engine.scripted_encoder import minilm
from tests.offline.conftest import Runner
from tests.offline.given import HI, rows
from tests.offline.run.test_tables import SUFFIXES, write_recipe, write_table
from tests.offline.scripted import ScriptedEngine
from tidemill import run as run_python
from tidemill.batch.result_cache import FILE_NAME
from tidemill.cli.main import main
from tidemill.demo import MODEL_PATH, NAME
from tidemill.offline.console.errors import Refused
from tidemill.protocol.contract import Reply, Usage

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GREEDY = {"messages": HI, "temperature": 0}
SAMPLED = {"messages": HI, "temperature": 1}


def request_lines(url: str, *bodies: dict[str, Any]) -> str:
    """Return a file of requests to a URL."""
    return "".join(
        json.dumps({"custom_id": f"c{number}", "method": "POST", "url": url, "body": body}) + "\n"
        for number, body in enumerate(bodies)
    )


@dataclass
class Runs:
    """Runs of files with one folder of results."""

    folder: Path
    model: object = MODEL_PATH
    runner: Runner = field(default_factory=Runner)
    num_runs: int = 0

    def __call__(self, source: Path, *flags: object, suffix: str = "jsonl") -> tuple[bytes, int]:
        """Run a file; return its output, and the number of requests that the engine answered."""
        self.num_runs += 1
        out, self.runner.engine = self.folder / f"out-{self.num_runs}.{suffix}", None
        given = ("--model", self.model, "--reuse", self.folder / "kept", *flags)
        assert self.runner("-i", source, "-o", out, *given) == 0
        num_answered = 0 if self.runner.engine is None else self.runner.engine.num_requests
        written = out if out.exists() else next(self.folder.glob(f"{out.name}.*-of-*[0-9]"))
        return written.read_bytes(), num_answered


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    """Return runs of the demo model's scripted stand-in."""
    return Runs(tmp_path)


@pytest.mark.parametrize(
    ("url", "body"),
    [
        (CHAT, GREEDY),
        (CHAT, {**GREEDY, "model": None}),
        (CHAT, {**GREEDY, "model": NAME}),
        (CHAT, {**SAMPLED, "seed": 7, "n": 2}),
        ("/chat/completions", GREEDY),
        ("/v1/responses", {"input": [{"role": "user", "content": "a"}], "temperature": 0}),
        (COMPLETIONS, {"prompt": ["a", "b"], "temperature": 0}),
        ("/v1/generative_scoring", {"query": "a", "items": ["b"], "label_token_ids": [1]}),
        (
            "/v1/decisions",
            {"input": "a", "questions": [{"type": "predicate", "instructions": "b"}]},
        ),
        (
            "/v1/systemone",
            {"state": None, "questions": {"a": {"type": "noul", "instructions": "b"}}},
        ),
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/score", {"text_1": "a", "text_2": ["b"]}),
        ("/v1/rerank", {"query": "a", "documents": ["b", "c"]}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
@pytest.mark.parametrize("flags", [(), ("--shard", "2/3")], ids=["whole", "shard"])
def test_a_second_run_of_requests_reuses_every_row(
    runs: Runs, tmp_path: Path, url: str, body: dict[str, Any], flags: Sequence[str]
) -> None:
    """With and without `model`, of every endpoint; a default parameter is part of the request."""
    if url.removeprefix("/v1/") in {"embeddings", "score", "rerank"}:
        runs.model = minilm()
    names = ("--served-model-name", NAME)
    source = tmp_path / "in.jsonl"
    source.write_text(request_lines(url, *({**body, "number": number} for number in range(6))))
    first, num_first = runs(source, *names, *flags)
    second, num_second = runs(source, *names, *flags)
    assert (num_first, num_second) == (2 if flags else 6, 0)
    assert first == second
    if url == CHAT:
        assert runs(source, *names, *flags, "--max-tokens", 9)[1] == num_first
        assert runs(source, *names, *flags, "--max-tokens", 9)[1] == 0


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_second_run_of_a_table_reuses_every_row(runs: Runs, tmp_path: Path, suffix: str) -> None:
    """Its rows name no model."""
    source = write_table(tmp_path / f"table.{suffix}")
    recipe = write_recipe(tmp_path, "params.temperature = 0")
    given = ("--recipe", recipe)
    first, num_first = runs(source, *given, suffix=suffix)
    second, num_second = runs(source, *given, suffix=suffix)
    assert (num_first, num_second) == (3, 0)
    assert first == second


def test_requests_without_a_model_are_those_that_name_it(runs: Runs, tmp_path: Path) -> None:
    """The row has the name that is served, so that another name is another request."""
    named, unnamed = tmp_path / "named.jsonl", tmp_path / "unnamed.jsonl"
    named.write_text(request_lines(CHAT, {**GREEDY, "model": "b"}))
    unnamed.write_text(request_lines(CHAT, GREEDY))
    assert runs(unnamed, "--served-model-name", "b")[1] == 1
    assert runs(named, "--served-model-name", "b")[1] == 0
    assert runs(named, "--served-model-name", "a", "b")[1] == 0
    assert runs(unnamed, "--served-model-name", "a", "b")[1] == 1
    assert runs(unnamed, "--served-model-name", "a", "b")[1] == 0


def test_a_resume_reuses_what_has_no_row(runs: Runs, tmp_path: Path) -> None:
    """Rows of the output come first, then results, and no model is loaded for the rest."""
    source, out = tmp_path / "in.jsonl", tmp_path / "resumed.jsonl"
    source.write_text(request_lines(CHAT, *({**GREEDY, "top_k": number} for number in range(5))))
    whole, _ = runs(source)
    out.write_bytes(b"".join(whole.splitlines(keepends=True)[:2]))
    runs.runner.engine = None
    given = ("--model", MODEL_PATH, "--reuse", tmp_path / "kept")
    assert runs.runner("-i", source, "-o", out, "--resume", *given) == 0
    assert (runs.runner.engine, out.read_bytes()) == (None, whole)


class SamplingEngine(ScriptedEngine):
    """Draws the text of a request by its seed, or else by its id, as an engine does."""

    async def respond(self, url: str, body: dict[str, Any], request_id: str, created: int) -> Reply:
        """Answer with the draw and the number of choices."""
        del url
        self.num_requests += 1
        drawn_by = str(body.get("seed") or request_id)
        text = blake2b(drawn_by.encode(), digest_size=8).hexdigest()
        reply = {"id": request_id, "created": created, "text": text, "n": body.get("n")}
        return Reply(200, reply, Usage(1, 1))


@pytest.fixture
def sampling(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Return runs of an engine that samples."""
    monkeypatch.setattr("tests.offline.conftest.ScriptedEngine", SamplingEngine)
    return runs


def texts_of(data: bytes) -> list[str]:
    """Return the texts of the rows of an output."""
    return [json.loads(row)["response"]["body"]["text"] for row in data.splitlines()]


@pytest.mark.parametrize("more", [{}, {"n": 2}])
@pytest.mark.parametrize("names", ["abcdef", "aaaaaa"])
def test_equal_sampled_lines_keep_their_own_samples(
    sampling: Runs, tmp_path: Path, names: str, more: dict[str, Any]
) -> None:
    """Six equal lines have six samples, also in a second run, a shard and a longer file."""
    source = tmp_path / "in.jsonl"

    def write(names: str) -> None:
        source.write_text(
            "".join(
                json.dumps({"custom_id": name, "url": CHAT, "body": {**SAMPLED, **more}}) + "\n"
                for name in names
            )
        )

    write(names)
    first, num_first = sampling(source, "--reuse-sampled")
    second, num_second = sampling(source, "--reuse-sampled")
    assert (num_first, num_second) == (6, 0)
    assert first == second
    assert len({*texts_of(first)}) == 6
    shard, num_shard = sampling(source, "--reuse-sampled", "--shard", "2/3")
    assert (texts_of(shard), num_shard) == (texts_of(first)[2:4], 0)
    write(f"{names}{names[-1]}")
    longer, num_longer = sampling(source, "--reuse-sampled")
    assert (texts_of(longer)[:6], num_longer) == (texts_of(first), 1)
    write(f"z{names[1:]}{names}")
    moved, _ = sampling(source, "--reuse-sampled")
    assert texts_of(moved)[1:6] == texts_of(first)[1:]
    assert len({*texts_of(moved)}) == 12


def test_equal_lines_with_a_seed_share_their_sample(sampling: Runs, tmp_path: Path) -> None:
    """The seed determines the result, wherever the line is."""
    source = tmp_path / "in.jsonl"
    body = {**SAMPLED, "seed": 5}
    source.write_text(request_lines(CHAT, body, body))
    first, _ = sampling(source)
    source.write_text(request_lines(CHAT, *[body] * 6, {**body, "seed": 6}))
    second, num_second = sampling(source)
    assert num_second == 1
    assert texts_of(second)[:6] == [texts_of(first)[0]] * 6
    assert texts_of(second)[6] != texts_of(first)[0]


def test_sampled_lines_are_computed_again_by_default(sampling: Runs, tmp_path: Path) -> None:
    """Without `--reuse-sampled` they are neither looked up nor stored."""
    source = tmp_path / "in.jsonl"
    source.write_text(request_lines(CHAT, SAMPLED, SAMPLED))
    assert sampling(source)[1] == 2
    assert sampling(source, "--reuse-sampled")[1] == 2
    assert sampling(source)[1] == 2
    assert sampling(source, "--reuse-sampled")[1] == 0


def flipped_bits(path: Path) -> None:
    """Flip a bit of every 200th byte behind the schema."""
    data = bytearray(path.read_bytes())
    for place in range(9_000, len(data), 200):
        data[place] ^= 1
    path.write_bytes(data)


def cut_off(path: Path) -> None:
    """Cut a database in the middle."""
    path.write_bytes(path.read_bytes()[:20_000])


def foreign(path: Path) -> None:
    """Write something that is not a database."""
    path.write_bytes(b"something else" * 1_000)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (flipped_bits, r"\d+ damaged results ignored and computed again"),
        (cut_off, "malformed"),
        (foreign, "file is not a database"),
    ],
)
def test_a_damaged_folder_costs_its_results(
    runs: Runs,
    tmp_path: Path,
    harm: Callable[[Path], None],
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every line has its own row, a note names the damage, and its advice works as it is."""
    source = tmp_path / "in.jsonl"
    bodies = [{**GREEDY, "say": f"{number} {'.' * 200}"} for number in range(60)]
    source.write_text(request_lines(CHAT, *bodies))
    first, _ = runs(source)
    database = tmp_path / "kept" / FILE_NAME
    harm(database)
    capsys.readouterr()
    second, num_second = runs(source)
    assert (texts_of(second), first) == ([body["say"] for body in bodies], second)
    assert num_second > 0
    stderr = capsys.readouterr().err
    assert re.search(words, stderr)
    command = stderr.split("`tidemill ")[1].split("`")[0]
    assert main(command.split()) == 0
    assert "was damaged and was deleted" in capsys.readouterr().err
    assert [runs(source)[1] for _ in range(2)] == [60, 0]


def test_real_samples_and_tables_are_reused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real model's six samples of one request, its answers without `model`, and its table."""
    source, table = tmp_path / "in.jsonl", tmp_path / "t.csv"
    body = {"messages": [{"role": "user", "content": "Name any word."}]}
    body |= {"temperature": 2, "max_tokens": 8}
    source.write_text(
        request_lines(CHAT, *[body] * 6, {**body, "temperature": 0})
        + request_lines(COMPLETIONS, {"prompt": "The", "temperature": 0, "max_tokens": 3})
        + request_lines("/v1/responses", {"input": "A", "temperature": 0, "max_output_tokens": 3})
    )
    table.write_text("q\nWhat is the capital of France?\nWhat is the capital of Spain?\n")
    kept = ["--reuse", str(tmp_path / "kept"), "--reuse-sampled", "--no-card"]
    prompt = ["--prompt", "{{ q }}", "--temperature", "0", "--max-tokens", "8"]
    for given, num_rows, suffix in (([str(source)], 9, "jsonl"), ([str(table), *prompt], 2, "csv")):
        outs = [tmp_path / f"{number}.{suffix}" for number in range(2)]
        for out in outs:
            capsys.readouterr()
            assert main(["run", *given, "-o", str(out), *kept]) == 0
        stderr = capsys.readouterr().err
        shown = "line has its row" if suffix == "jsonl" else "row has its result"
        assert f"every {shown} by reuse ({num_rows}): nothing to run" in stderr
        assert "loading" not in stderr
        assert outs[0].read_bytes() == outs[1].read_bytes()
    samples = [row["response"]["body"]["choices"][0] for row in rows(tmp_path / "0.jsonl")[:6]]
    assert len({sample["message"]["content"] for sample in samples}) > 1


# tests/sdk proves that keywords are the flags of the command.
@pytest.mark.long
def test_a_second_run_of_a_program_reuses_every_row(tmp_path: Path) -> None:
    """The card counts them."""
    source = tmp_path / "t.csv"
    source.write_text("q\nWhat is the capital of France?\n")
    flags = {"prompt": "{{ q }}", "max_tokens": 8, "temperature": 0, "reuse": tmp_path / "kept"}
    outs = [tmp_path / "0.jsonl", tmp_path / "1.jsonl"]
    cards = [run_python(source, out, progress=False, **flags).card for out in outs]
    assert [card["rows"]["reused"] for card in cards] == [0, 1]
    assert outs[0].read_bytes() == outs[1].read_bytes()


def test_several_engines_reuse_nothing(runs: Runs, tmp_path: Path) -> None:
    """Both flags are named, and what to do."""
    source = tmp_path / "in.jsonl"
    source.write_text(request_lines(CHAT, GREEDY))
    with pytest.raises(Refused, match="--data-parallel-size cannot be combined with --reuse"):
        runs(source, "--data-parallel-size", 2)
