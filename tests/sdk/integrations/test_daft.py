"""Daft: rows equal those of `tidemill run`, and its own functions are answered by a provider."""

from __future__ import annotations

import gc
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel

from tests.engine.scripted_encoder import minilm
from tests.sdk.integrations.given import (
    DECISIONS,
    QUESTIONS,
    SAMPLED,
    TYPED,
    VECTORS,
    printed_by,
    program_of,
    rows_of_run,
    wait_for,
)
from tidemill import Engine, TidemillError
from tidemill.sdk.integrations import process_engine

daft = pytest.importorskip("daft")
functions = pytest.importorskip("daft.functions")
ours = pytest.importorskip("tidemill.daft")

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]
GREEDY = {"temperature": 0, "max_tokens": 8}


class Sum(BaseModel):
    """An answer."""

    sum: int


def in_order(df: Any) -> list[dict[str, Any]]:
    """Return the rows by their ids."""
    return sorted(df.collect().to_pylist(), key=lambda row: row["id"])


@pytest.mark.parametrize("recipe", [SAMPLED, TYPED], ids=["sampled", "typed"])
def test_rows_equal_those_of_run(recipe: dict[str, Any], tmp_path: Path) -> None:
    """With their columns, answers and errors, in whichever batches they come."""
    answered = ours.answer(daft.from_arrow(QUESTIONS), **recipe)
    assert in_order(answered) == rows_of_run(tmp_path, recipe)
    assert answered.column_names[:2] == recipe.get("keep", ["id", "question"])


def test_decisions_equal_those_of_run(tmp_path: Path) -> None:
    """Each question has typed columns, and a row without an input its error."""
    decided = ours.decide(daft.from_arrow(QUESTIONS), "question", DECISIONS, id="id")
    recipe = {"input": "{{ question }}", "questions": DECISIONS, "id": "id"}
    assert in_order(decided) == rows_of_run(tmp_path, recipe)
    assert decided.schema()["size_score"].dtype == daft.DataType.float64()


def test_vectors_equal_those_of_run(tmp_path: Path) -> None:
    """Several a row, as lists of floats."""
    rows = in_order(ours.answer(daft.from_arrow(QUESTIONS), **VECTORS))
    for found, right in zip(rows, rows_of_run(tmp_path, VECTORS), strict=True):
        if right["embedding"] is not None:
            assert found["embedding"] == [
                pytest.approx(one, abs=1e-6) for one in right["embedding"]
            ]
        assert [found[name] for name in ("id", "usage", "error")] == [
            right[name] for name in ("id", "usage", "error")
        ]


def test_prompt_is_answered_by_the_provider() -> None:
    """With a system message, several texts, a type; a null stays null."""
    daft.attach_provider(ours.Provider(), "here")
    frame = daft.from_pydict({"q": ["What is the capital of France?", None], "r": ["Say it.", "x"]})
    given = {"provider": "here", **GREEDY}
    brief = {"system_message": "Be brief.", **given}
    typed = {"return_format": Sum, **given, "max_tokens": 20}
    found = frame.select(
        functions.prompt(frame["q"], **given).alias("one"),
        functions.prompt([frame["q"], frame["r"]], **brief).alias("two"),
        functions.prompt(frame["q"], **typed).alias("typed"),
    ).to_pydict()
    assert sorted(found["one"], key=str) == [None, "Paris"]
    assert found["two"].count(None) == 1
    assert [sorted(row) for row in found["typed"] if row is not None] == [["sum"]]


def test_a_failed_prompt_follows_on_error() -> None:
    """It fails the query with its reason, or is null."""
    provider, frame = ours.Provider(), daft.from_pydict({"q": ["Hi"]})
    given = {"provider": provider, "max_tokens": -1, "max_retries": 0}
    with pytest.raises(Exception, match="`max_tokens`"):
        frame.select(functions.prompt(frame["q"], **given)).collect()
    answer = functions.prompt(frame["q"], on_error="ignore", **given)
    found = frame.select(answer.alias("a"))
    assert found.to_pydict() == {"a": [None]}


def test_texts_are_embedded_by_the_provider() -> None:
    """The engine gives the same vectors; their length is known when the query is planned."""
    provider, texts = ours.Provider(), ["ebb", None, "flow", *map(str, range(100))]
    frame = daft.from_pydict({"id": list(range(103)), "text": texts})
    embedded = frame.with_column(
        "vector", functions.embed_text(frame["text"], provider=provider, model=str(minilm()))
    )
    assert embedded.schema()["vector"].dtype == daft.DataType.embedding(
        daft.DataType.float32(), 384
    )
    vectors = [row["vector"] for row in in_order(embedded)]
    assert vectors[1] is None
    with Engine(model=str(minilm())) as engine:
        right = engine.embed([text for text in texts if text is not None], progress=False)
    given = [vector for vector in vectors if vector is not None]
    np.testing.assert_allclose(np.stack(given), right, atol=1e-6)


def test_a_dead_engine_is_followed_by_another() -> None:
    """Its batches are tried again; every row is there once."""
    params = {"max_tokens": 100, "ignore_eos": True, "temperature": 0}
    answered = ours.answer(
        daft.from_arrow(QUESTIONS), prompt="Hi {{ id }}", id="id", params=params, max_num_seqs=8
    )
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(in_order, answered)
        options = {"model": None, "max_num_seqs": 8}
        engine = process_engine.process_engine(options)
        first = engine.pid
        wait_for(lambda: engine.stats().running)
        os.kill(first, signal.SIGKILL)
        rows = job.result()
    assert [row["id"] for row in rows] == QUESTIONS.column("id").to_pylist()
    assert {row["usage"]["completion_tokens"] for row in rows} == {100}
    assert process_engine.process_engine(options).pid != first


def test_engines_end_with_their_frames() -> None:
    """A notebook can then go on without them."""
    answered = ours.answer(daft.from_arrow(QUESTIONS), seed=5, **TYPED).collect()
    assert len(answered) == 150
    del answered
    gc.collect()
    assert not [key for key in process_engine._engines if '"seed": 5' in key[1]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prompt": "{{ qestion }}"}, "did you mean `question`"),
        ({"prompt": "Hi", "modell": "x"}, "did you mean `model`"),
        ({"prompt": "Hi", "max_num_seqs": 0}, "--max-num-seqs"),
        ({"prompt": "Hi"}, "sampled requests need an ID per row"),
    ],
)
def test_invalid_options_are_reported_at_the_call_on_daft(
    options: dict[str, Any], words: str
) -> None:
    """The query does not run."""
    with pytest.raises(TidemillError, match=words):
        ours.answer(daft.from_arrow(QUESTIONS), **options)
    with pytest.raises(TidemillError, match="a Daft DataFrame; got a Table"):
        ours.answer(QUESTIONS, prompt="Hi")


def test_an_option_that_is_none_is_refused_by_the_provider() -> None:
    """The constructor raises the error."""
    with pytest.raises(TidemillError, match="did you mean `max_num_seqs`"):
        ours.Provider(max_num_seq=8)


def test_the_program_of_the_page_runs(tmp_path: Path) -> None:
    """It prints the answers."""
    assert "Tokyo" in printed_by(program_of("daft.md"), tmp_path)
