"""Spark: rows equal those of `tidemill run`, by one engine for all tasks of an executor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.sdk.integrations.given import (
    DECISIONS,
    QUESTIONS,
    ROOT,
    SAMPLED,
    TYPED,
    VECTORS,
    printed_by,
    program_of,
    rows_of_run,
    wait_for,
)
from tidemill import TidemillError
from tidemill.sdk.integrations.hosted_engine import HostedEngine

pytest.importorskip("pandas")
sql = pytest.importorskip("pyspark.sql")
ours = pytest.importorskip("tidemill.spark")

# PySpark warns of pandas 3, and leaves sockets to be collected.
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def sockets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the folder of the sockets of engines, for a Spark that starts hereafter."""
    folder = tmp_path_factory.mktemp("s")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        yield folder / f"tidemill-{os.getuid()}"


@pytest.fixture(scope="module")
def spark(sockets: Path) -> Iterator[Any]:
    """Return a session on one executor of two cores, which tries a task four times."""
    assert not sockets.exists()
    builder = sql.SparkSession.builder.master("local[2,4]").config("spark.ui.enabled", "false")
    session = builder.config("spark.sql.session.timeZone", "UTC").getOrCreate()
    yield session
    session.stop()


@pytest.fixture(scope="module")
def questions(spark: Any) -> Any:
    """Return the questions in four partitions."""
    schema = "id long, question string, tags array<string>"
    return spark.createDataFrame(QUESTIONS.to_pylist(), schema).repartition(4)


def addresses(sockets: Path) -> list[Path]:
    """Return the sockets of engines that run."""
    return [path for path in sockets.glob("*") if path.is_socket()]


def pids(*arguments: str) -> list[int]:
    """Return the processes that pgrep finds."""
    done = subprocess.run(["pgrep", *arguments], capture_output=True, text=True, check=False)
    return [int(pid) for pid in done.stdout.split()]


def in_order(df: Any) -> list[dict[str, Any]]:
    """Return the rows by their ids; one job answers them."""
    return sorted((row.asDict(recursive=True) for row in df.collect()), key=lambda row: row["id"])


@pytest.mark.parametrize("recipe", [SAMPLED, TYPED], ids=["sampled", "typed"])
def test_rows_equal_those_of_run(
    recipe: dict[str, Any], questions: Any, sockets: Path, tmp_path: Path
) -> None:
    """With their columns, answers and errors; one engine answers all four partitions."""
    before = addresses(sockets)
    answered = ours.answer(questions, **recipe)
    assert in_order(answered) == rows_of_run(tmp_path, recipe)
    assert answered.columns[: len(questions.columns[:2])] == recipe.get("keep", ["id", "question"])
    assert len(set(addresses(sockets)) - set(before)) <= 1


def test_decisions_equal_those_of_run(questions: Any, tmp_path: Path) -> None:
    """Each question has typed columns, and a row without an input its error."""
    decided = ours.decide(questions, "question", DECISIONS, id="id")
    recipe = {"input": "{{ question }}", "questions": DECISIONS, "id": "id"}
    assert in_order(decided) == rows_of_run(tmp_path, recipe)
    assert decided.schema["size_score"].dataType.simpleString() == "double"


def test_vectors_equal_those_of_run(questions: Any, tmp_path: Path) -> None:
    """Several a row, as arrays of floats."""
    answered = ours.answer(questions, **VECTORS)
    assert answered.schema["embedding"].dataType.simpleString() == "array<array<float>>"
    for found, right in zip(in_order(answered), rows_of_run(tmp_path, VECTORS), strict=True):
        if right["embedding"] is not None:
            assert found["embedding"] == [
                pytest.approx(one, abs=1e-6) for one in right["embedding"]
            ]
        assert [found[name] for name in ("id", "usage", "error")] == [
            right[name] for name in ("id", "usage", "error")
        ]


def test_a_dead_engine_fails_tasks_that_are_tried_again(questions: Any, sockets: Path) -> None:
    """A new engine answers them, and every row exists once."""
    before = addresses(sockets)
    params = {"max_tokens": 100, "ignore_eos": True, "temperature": 0}
    answered = ours.answer(questions, prompt="Hi {{ id }}", id="id", params=params, max_num_seqs=8)
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(in_order, answered)
        [address] = wait_for(lambda: [one for one in addresses(sockets) if one not in before])
        engine = HostedEngine(str(address), {}, {})
        assert engine.max_inflight() == 4 * 8
        [host] = pids("-f", str(address))
        [process] = pids("-P", str(host))
        os.kill(process, signal.SIGKILL)
        wait_for(lambda: engine.is_dead)
        rows = job.result()
    assert [row["id"] for row in rows] == QUESTIONS.column("id").to_pylist()
    assert {row["usage"]["completion_tokens"] for row in rows} == {100}
    [other] = pids("-f", str(address))
    assert other != host


def test_an_engine_that_cannot_start_is_named(questions: Any) -> None:
    """In the error of the job, with its last words."""
    with pytest.raises(Exception, match=r"EngineDied.*no-such-model") as caught:
        ours.answer(questions, prompt="Hi", id="id", model="./no-such-model").collect()
    assert "the engine did not start" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prompt": "{{ qestion }}"}, "did you mean `question`"),
        ({"prompt": "Hi", "modell": "x"}, "did you mean `model`"),
        ({"prompt": "Hi", "max_num_seqs": 0}, "--max-num-seqs"),
        ({"prompt": "Hi"}, "sampled requests need an ID per row"),
        (VECTORS | {"vectors": "float16"}, "Spark does not support"),
    ],
)
def test_invalid_options_are_reported_at_the_call(
    questions: Any, options: dict[str, Any], words: str
) -> None:
    """No task runs."""
    with pytest.raises(TidemillError, match=words):
        ours.answer(questions, **options)
    with pytest.raises(TidemillError, match="a Spark DataFrame; got a Table"):
        ours.answer(QUESTIONS, prompt="Hi")
    renamed = questions.withColumnRenamed("question", "Text")
    with pytest.raises(TidemillError, match="rename `Text`, or remove it"):
        ours.answer(renamed, prompt="Hi", id="id")


def test_the_program_of_the_page_runs(tmp_path: Path) -> None:
    """It leaves no engine behind."""
    assert "Tokyo" in printed_by(program_of("spark.md"), tmp_path)
