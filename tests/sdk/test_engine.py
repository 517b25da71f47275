"""`from tidemill import Engine`: an engine process, used from threads, tasks and event loops."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from itertools import count, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import tidemill
from tests.long_parameters import with_long
from tests.sdk.hosting import accepting_host
from tests.warm_start import FORKED
from tidemill import Engine, EngineDied, RequestFailed, TidemillError
from tidemill.engine_process import frames
from tidemill.protocol.validation import short_repr
from tidemill.sdk.integrations.batch_answers import BatchAnswers
from tidemill.sdk.integrations.hosted_engine import HostedEngine

ROOT = Path(__file__).parents[2]
FRANCE = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 8,
    "temperature": 0,
}
BAD = {"messages": 1}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Return an engine of the demo model."""
    with Engine() as engine:
        yield engine


def text_of(answer: Any) -> str:
    """Return the text of a chat, or what went wrong."""
    if isinstance(answer, RequestFailed):
        return str(answer.param)
    return str(answer["choices"][0]["message"]["content"])


def test_an_answer_is_the_body_of_a_response(engine: Engine) -> None:
    """Another URL works too, and each call may have its own event loop."""
    body = asyncio.run(engine.answer(FRANCE))
    assert (body["object"], text_of(body)) == ("chat.completion", "Paris")
    body = asyncio.run(engine.answer({"prompt": "Hi", "max_tokens": 1}, url="/v1/completions"))
    assert body["object"] == "text_completion"


def test_decisions_about_many_inputs_are_in_their_order(engine: Engine) -> None:
    """An input is text or items; a failed one has its error in its place."""
    choice = {
        "type": "choice",
        "instructions": "Which?",
        "choices": [{"value": True}, {"value": 7}],
    }
    questions = ["Is a city named?", {**choice, "choices": [{"value": True}, {"value": "x"}]}]
    items = [{"role": "user", "content": "Paris"}]
    text, same, failed = engine.decide_many(["Paris", items, ""], questions, progress=False)
    assert isinstance(text, list)
    assert isinstance(same, list)
    assert [answer["type"] for answer in text] == ["predicate", "choice"]
    assert same[0]["probability"] == pytest.approx(text[0]["probability"], abs=1e-5)
    assert isinstance(failed, RequestFailed)
    assert failed.param == "input"
    with pytest.raises(RequestFailed, match="must be a valid string"):
        engine.decide("Paris", [choice])
    [answer] = engine.decide("Paris", questions[1:], debias=2)
    assert isinstance(answer["choice"], (bool, str))


def test_a_lone_question_is_not_taken_for_a_list_of_questions(engine: Engine) -> None:
    """It may be a text, also one with options, or a body; a lone input is refused by name."""
    [answer] = engine.decide("Paris", "Is a city named?")
    assert answer["type"] == "predicate"
    assert engine.decide("Paris", {"type": "predicate", "instructions": "Is a city named?"})
    choice, score, plain = engine.decide(
        "Paris", ["team = billing|shipping: Which?", "tone = calm<angry: How?", "a=b: is it < 3?"]
    )
    assert [each["value"] for each in choice["probabilities"]] == ["billing", "shipping"]
    assert (choice["name"], score["type"], plain["type"]) == ("team", "score", "predicate")
    with pytest.raises(TidemillError, match="has 'a' twice in its choices"):
        engine.decide("Paris", "team = a|a: Which?")
    with pytest.raises(TidemillError, match="has no colon: put one between the options and"):
        engine.decide("Paris", "team = a|b")
    with pytest.raises(TypeError, match="`questions` must be a question or a list; got null"):
        engine.decide("Paris", None)  # type: ignore[arg-type]
    with pytest.raises(
        TidemillError, match=r"`permutations` is not a parameter of .*: use .*debias"
    ):
        engine.decide("Paris", "Is a city named?", permutations=2)
    with pytest.raises(TypeError, match="use `decide` for a single one"):
        engine.decide_many("Paris", "Is a city named?")


def test_a_request_that_fails_is_an_exception_that_says_why(engine: Engine) -> None:
    """With status, code and parameter, as of the API."""
    with pytest.raises(RequestFailed, match="`messages` must be") as caught:
        asyncio.run(engine.answer(BAD))
    assert (caught.value.status_code, caught.value.param) == (400, "messages")
    with pytest.raises(RequestFailed, match=r"^`body` must be"):
        asyncio.run(engine.answer([]))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="cannot be serialized to JSON"):
        asyncio.run(engine.answer({"messages": object()}))


def test_many_are_answered_in_order(engine: Engine) -> None:
    """Failures are in their places; each request may have its own URL."""
    requests = [FRANCE, BAD, ("/v1/chat/completions", FRANCE)]
    assert [text_of(one) for one in engine.answer_many(requests)] == ["Paris", "messages", "Paris"]
    assert list(engine.answer_many([])) == []
    malformed: list[Any] = [("/v1/x", FRANCE, 1), (FRANCE, "/v1/x"), "Hi", FRANCE]
    *failed, good = engine.answer_many(malformed)
    assert [one.message for one in failed] == [
        "a request must be a body, or a pair such as ('/v1/chat/completions', body); got "
        + short_repr(one)
        for one in malformed[:3]
    ]
    assert text_of(good) == "Paris"

    async def malformed_ones() -> AsyncIterator[Any]:
        for one in (None, FRANCE):
            yield one

    async def answers() -> list[str]:
        return [text_of(one) async for one in engine.answer_many(malformed_ones())]

    assert asyncio.run(answers()) == ["None", "Paris"]


def test_many_are_answered_as_they_come(engine: Engine) -> None:
    """Each with its place."""
    long = FRANCE | {"max_tokens": 200, "ignore_eos": True}
    found = list(engine.answer_many([long, FRANCE, BAD, FRANCE], in_order=False))
    assert sorted(place for place, _ in found) == [0, 1, 2, 3]
    assert found[-1][0] == 0
    assert text_of(dict(found)[2]) == "messages"


def test_requests_without_end_are_taken_as_needed(engine: Engine) -> None:
    """No more than a few at a time, in both ways of iterating."""
    taken = count()

    def endless() -> Iterator[Any]:
        for _ in taken:
            yield FRANCE

    async def endlessly() -> AsyncIterator[Any]:
        for request in endless():
            yield request

    async def first(number: int) -> list[str]:
        found = []
        async for one in engine.answer_many(endlessly(), max_inflight=3):
            found.append(text_of(one))
            if len(found) == number:
                return found
        return found

    answers = engine.answer_many(endless(), max_inflight=3)
    assert [text_of(one) for one in islice(answers, 5)] == ["Paris"] * 5
    assert asyncio.run(first(5)) == ["Paris"] * 5
    assert next(taken) <= 20


def test_what_requests_raise_passes_through(engine: Engine) -> None:
    """An exception of the iterator reaches the caller."""

    def broken() -> Iterator[Any]:
        yield FRANCE
        raise LookupError("no more")

    with pytest.raises(LookupError, match="no more"):
        list(engine.answer_many(broken()))


def test_threads_and_tasks_ask_at_once(engine: Engine) -> None:
    """A running loop, as in a notebook, is supported; a cancelled task ends alone."""

    async def several() -> list[str]:
        cancelled = asyncio.create_task(engine.answer(FRANCE | {"max_tokens": 500}))
        await asyncio.sleep(0)
        cancelled.cancel()
        here = [text_of(one) for one in engine.answer_many([FRANCE])]
        bodies = await asyncio.gather(*(engine.answer(FRANCE) for _ in range(5)))
        return [*here, *map(text_of, bodies)]

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: asyncio.run(several()), range(3)))
    assert found == [["Paris"] * 6] * 3


def test_a_table_is_answered(engine: Engine) -> None:
    """The result is that of `tidemill run`; invalid options are reported."""
    table = pa.table({"q": ["What is the capital of France?", None], "n": [1, 2]})
    params = {"max_tokens": 8, "temperature": 0}
    found = engine.answer_table(table, prompt="{{ q }}", keep=["n"], params=params)
    assert found.column("n").to_pylist() == [1, 2]
    assert found.column("text").to_pylist() == ["Paris", None]
    assert "column `q` is null" in found.column("error").to_pylist()[1]
    found = engine.answer_table(table, prompt="Hi", keep=[], params=params)
    assert all("cut off at the token limit" in error for error in found.column("error").to_pylist())
    assert None not in found.column("text").to_pylist()
    with pytest.raises(TidemillError, match="did you mean `q`"):
        engine.answer_table({"q": ["x"]}, prompt="{{ qq }}")
    twice = pa.table([["x"], ["y"]], names=["q", "q"])
    with pytest.raises(TidemillError, match="more than one column named `q`: rename them"):
        engine.answer_table(twice, prompt="{{ q }}")
    with pytest.raises(TidemillError, match=r"Arrow cannot read the table.*Pass a data frame"):
        engine.answer_table([1, 2], prompt="x")
    far = pa.array([1], pa.int64()).view(pa.timestamp("s", "Mars/Phobos"))
    with pytest.raises(TidemillError, match="column `q` is timestamp"):
        engine.answer_table(pa.table({"q": far}), prompt="{{ q }}")


def test_questions_about_a_table_are_answered(engine: Engine) -> None:
    """`ask` is a list of questions, or one of them."""
    table = pa.table({"q": ["My lamp is broken.", "Where is my parcel?"]})
    found = engine.answer_table(table, ask=["broken: Is it broken?", "team = a|b: Which team?"])
    assert [found.schema.field(name).type for name in ("broken", "team")] == [
        pa.bool_(),
        pa.string(),
    ]
    assert {*found.column("team").to_pylist()} <= {"a", "b"}
    found = engine.answer_table(table, ask="broken: Is it broken?", keep=[])
    assert found.column_names[:2] == ["broken", "broken_confidence"]
    gold = pa.table({"q": ["x"] * 12, "known": ["yes"] * 11 + ["maybe"]})
    with pytest.raises(TidemillError, match="column `known`, row 12: 'maybe' is not an answer to"):
        engine.answer_table(gold, ask="broken: Is it broken?", gold="known")


def test_paths_rows_and_columns_are_tables(engine: Engine, tmp_path: Path) -> None:
    """A Series needs the name of its column, and a path that of a table."""
    pd = pytest.importorskip("pandas")
    path = tmp_path / "q.csv"
    path.write_text("q\nFrance\n", encoding="utf-8")
    recipe: dict[str, Any] = {"prompt": "The capital of {{ q }}?", "params": {"max_tokens": 8}}
    rows = [{"q": "France"}]
    for table in (path, str(path), rows, pd.Series(["France"], name="q")):
        found = engine.answer_table(table, **recipe)
        assert found.column("q").to_pylist() == ["France"]
        assert len(found.column("text").to_pylist()) == 1
    for table, words in ((pd.Series(["x"]), "has no name"), (tmp_path / "gone", "cannot be read")):
        with pytest.raises(TidemillError, match=words):
            engine.answer_table(table, **recipe)
    with pytest.raises(TidemillError, match="requires the path of a file, not a DataFrame"):
        tidemill.run(pd.DataFrame(rows), prompt="{{ q }}")
    assert tidemill.__version__ == metadata.version("tidemill")


@pytest.fixture
def short_frames(monkeypatch: pytest.MonkeyPatch) -> pa.Table:
    """Return a table whose second request is above the limit of a frame, here 100 kB."""
    monkeypatch.setattr(frames, "MAX_PAYLOAD_BYTES", 100_000)
    prompts = ["What is the capital of France?", "x" * 100_000, "What is the capital of France?"]
    return pa.table({"id": [1, 2, 3], "q": prompts})


def test_a_request_above_the_limit_of_a_frame_has_an_error_row(
    engine: Engine, short_frames: pa.Table
) -> None:
    """A table's other rows are answered; a single request raises."""
    recipe: dict[str, Any] = {"prompt": "{{ q }}", "params": {"max_tokens": 8, "temperature": 0}}
    found = engine.answer_table(short_frames, **recipe)
    assert found.column("text").to_pylist() == ["Paris", None, "Paris"]
    first, second, third = found.column("error").to_pylist()
    assert (first, third) == (None, None)
    assert "the request is too long: a frame of 100," in second
    with pytest.raises(RequestFailed, match="the request is too long") as caught:
        asyncio.run(engine.answer({**FRANCE, "user": "x" * 100_000}))
    assert (caught.value.status_code, caught.value.code) == (413, "too_long")


@pytest.mark.parametrize("by", ["partitions", "columns", "host"])
def test_a_request_above_the_limit_of_a_frame_ends_no_dataset(
    engine: Engine, short_frames: pa.Table, by: str, tmp_path: Path
) -> None:
    """Spark answers partitions through a host, Daft and Ray batches of columns."""
    recipe = {"prompt": "{{ q }}", "id": "id", "params": {"max_tokens": 8, "temperature": 0}}
    answers = BatchAnswers(recipe, short_frames.schema)
    [batch] = short_frames.to_batches()
    if by == "columns":
        found = asyncio.run(answers.answer_columns(engine.process, batch)).to_pylist()
    elif by == "partitions":
        [answered] = answers.answered(engine.process, [batch])
        found = answered.to_pylist()
    else:
        address = str(tmp_path / "s")
        with accepting_host(engine.process, address):
            [answered] = answers.answered(HostedEngine(address, {}, {}), [batch])
            found = answered.to_pylist()
    assert [row["text"] for row in found] == ["Paris", None, "Paris"]
    assert [row["error"] is None for row in found] == [True, False, True]
    assert "too long" in found[1]["error"]


def test_a_killed_engine_is_reported() -> None:
    """Running and later requests get the error; closing then has no effect."""
    engine = Engine()

    async def killed() -> None:
        asking = asyncio.create_task(
            engine.answer(FRANCE | {"max_tokens": 1_500, "ignore_eos": True})
        )
        await asyncio.to_thread(engine.info)
        os.kill(engine.pid, signal.SIGKILL)
        await asking

    for _ in range(2):
        with pytest.raises(EngineDied, match="killed by SIGKILL"):
            asyncio.run(killed() if _ == 0 else engine.answer(FRANCE))
    engine.close()
    with pytest.raises(EngineDied, match="closed"):
        asyncio.run(engine.answer(FRANCE))


def test_closing_ends_what_waits_for_the_model() -> None:
    """At once, and with a word."""
    engine = Engine()

    async def closed() -> None:
        asking = asyncio.create_task(engine.answer(FRANCE))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(engine.close)
        await asking

    with pytest.raises(EngineDied):
        asyncio.run(closed())


def test_answers_keep_their_engine() -> None:
    """The engine lives until its answers are consumed."""
    assert [text_of(one) for one in Engine().answer_many([FRANCE] * 3)] == ["Paris"] * 3


def test_a_source_may_wait_for_answers(engine: Engine) -> None:
    """Answers arrive before the next request is read; an invalid request keeps its place."""

    async def talk() -> list[str]:
        found: list[str] = []
        is_there = asyncio.Event()

        async def requests() -> AsyncIterator[Any]:
            yield FRANCE
            await is_there.wait()
            yield {"messages": object()}

        async for one in engine.answer_many(requests()):
            found.append("no JSON" if isinstance(one, RequestFailed) else text_of(one))
            is_there.set()
        return found

    assert asyncio.run(talk()) == ["Paris", "no JSON"]
    with_bad = engine.answer_many([FRANCE, {"messages": object()}])
    assert [isinstance(one, RequestFailed) for one in with_bad] == [False, True]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_num_seq": 1}, "unknown engine option `max_num_seq`: did you mean `max_num_seqs`"),
        ({"max_num_seqs": 0}, "--max-num-seqs"),
        ({"device": "tpu"}, "--device"),
    ],
)
def test_options_are_checked_at_once(options: dict[str, Any], words: str) -> None:
    """The error comes before a process is started."""
    with pytest.raises(TidemillError, match=words):
        Engine(**options)


def test_a_missing_model_is_reported() -> None:
    """The first request gets the error."""
    with Engine("/no/model") as engine, pytest.raises(EngineDied, match="folder not found"):
        asyncio.run(engine.answer(FRANCE))


@pytest.mark.parametrize("number", with_long([signal.SIGKILL], [signal.SIGTERM]))
def test_no_process_outlives_its_parent(number: int) -> None:
    """The parent may even be killed."""
    program = (
        f"{FORKED}import tidemill, time; engine = tidemill.Engine(); engine.info();"
        "print(engine.pid, flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        watched = os.pidfd_open(int(parent.stdout.readline()))
        parent.send_signal(number)
    assert select.select([watched], [], [], 20)[0]
    os.close(watched)


def test_importing_loads_nothing() -> None:
    """Names are loaded on first use."""
    program = "import sys, tidemill; print(*sys.modules); tidemill.Engine; tidemill.nothing"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert {"pydantic", "torch", "pyarrow", "numpy"}.isdisjoint(done.stdout.split())
    assert "module 'tidemill' has no attribute 'nothing'" in done.stderr
