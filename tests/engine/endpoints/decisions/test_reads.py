"""Decisions and generative scoring read the same probabilities of the same prompt."""

from __future__ import annotations

import asyncio
import math
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.engine.scripted_model import METADATA
from tidemill import demo
from tidemill.engine.config import EngineConfig
from tidemill.engine.endpoints.decisions import chat_reader
from tidemill.engine.endpoints.decisions.endpoints import Decisions
from tidemill.engine.endpoints.dispatcher import Dispatcher
from tidemill.engine.load import load_served
from tidemill.engine.tasks.generation import endpoints_without_weights
from tidemill.protocol.contract import Reply
from tidemill.protocol.errors import RequestError

pytestmark = pytest.mark.usefixtures("proved")

CONFIG = EngineConfig(str(demo.MODEL_PATH), dtype="float32", max_num_seqs=8)
QUESTIONS: list[dict[str, Any]] = [
    {"type": "predicate", "instructions": "Is a city named?"},
    {
        "type": "choice",
        "instructions": "Which kind of place?",
        "choices": [{"value": "city"}, {"value": "river"}, {"value": True}],
    },
    {"type": "score", "instructions": "How big?", "levels": [{"label": "a"}, {"label": "b"}]},
]
BODY = {"input": "The Seine flows through Paris.", "questions": QUESTIONS}


@pytest.fixture(scope="module", name="served")
def fixture_served() -> Iterator[Dispatcher]:
    """Return the demo model in fp32."""
    with closing(load_served(CONFIG, served_names=("m",), chat_template=None)) as served:
        assert isinstance(served, Dispatcher)
        yield served


async def next_token_probabilities(
    served: Dispatcher, prompt: list[int], tokens: list[int]
) -> dict[int, float]:
    """Return the probability of each token after a prompt, by generative scoring."""
    found: dict[int, float] = {}
    for start in range(0, len(tokens), 128):
        some = tokens[start : start + 128]
        body = {
            "query": prompt[:-1],
            "items": [prompt[-1:]],
            "label_token_ids": some,
            "apply_softmax": False,
        }
        reply = await served.respond("/v1/generative_scoring", body, "req_1", 0)
        assert reply.status_code == 200, reply.body
        found |= dict(zip(some, reply.body["scores"][0], strict=True))
    return found


@pytest.mark.parametrize("layout", ["row_first", "questions_first"])
async def test_a_decision_is_the_sum_over_all_paths_of_generative_scoring(
    served: Dispatcher, layout: str
) -> None:
    """It holds for labels of one token and of several, in fp32."""
    body = BODY | {"question_layout": layout}
    [decisions] = [e for e in endpoints_without_weights(CONFIG, None) if isinstance(e, Decisions)]
    prepared = decisions.prepare(body, METADATA)
    reply = await served.respond("/v1/decisions", body, "req_1", 0)
    for number, answer in enumerate(reply.body["answers"]):
        read, prompt = prepared.context.reads[number], prepared.requests[number].prompt_ids
        probability = {(): 1.0}
        for path in sorted(read.tree.next_tokens, key=len):
            tokens = [*read.tree.next_tokens[path]]
            after = await next_token_probabilities(served, [*prompt, *path], tokens)
            probability |= {(*path, token): probability[path] * after[token] for token in tokens}
        sums = [0.0] * len(read.labels)
        for path, label in read.tree.label_of.items():
            sums[label] += probability[path]
        of_options = [sums[place] for place in read.places]
        mass = math.fsum(of_options)
        shares = probabilities(answer)
        expected = [share / mass for share in of_options][: len(shares)]
        assert shares == pytest.approx(expected, abs=1e-5)
        assert reply.body["diagnostics"][number]["label_mass"] == pytest.approx(mass, rel=1e-4)


@pytest.mark.parametrize("way", ["file", "serve"])
@pytest.mark.parametrize("layout", ["row_first", "questions_first"])
async def test_questions_compute_their_common_tokens_once(
    served: Dispatcher, layout: str, way: str
) -> None:
    """Reads branch within a page of the KV cache; answers are those of each question alone."""
    text = f"The ferries leave Dover at noon, {layout} {way}. " * 9
    questions = [
        {**question, "instructions": f"{question['instructions']} {number}"}
        for number in range(3)
        for question in QUESTIONS
    ]
    body = {"input": text, "questions": questions, "question_layout": layout}
    run = served.respond if way == "file" else served.answer
    before = served.stats().prefilled_tokens
    reply = await run("/v1/decisions", body, "req_1", 0)
    assert isinstance(reply, Reply)
    num_computed = served.stats().prefilled_tokens - before
    # Of a page with several branches only the first one is copied, perhaps from an earlier test.
    num_new = reply.usage.prompt_tokens - reply.usage.cached_tokens
    assert num_new - 16 < num_computed <= 1.02 * num_new
    if layout == "row_first":
        for question, answer in zip(questions, reply.body["answers"], strict=True):
            alone = await run("/v1/decisions", body | {"questions": [question]}, "req_2", 0)
            assert isinstance(alone, Reply)
            [expected] = alone.body["answers"]
            assert probabilities(answer) == pytest.approx(probabilities(expected), abs=1e-5)


def probabilities(answer: dict[str, Any]) -> list[float]:
    """Return the probabilities of an answer."""
    if answer["type"] == "predicate":
        return [answer["probability"]]
    return [each["probability"] for each in answer["probabilities"]]


def test_probabilities_of_a_bf16_model_are_finer_than_its_logits() -> None:
    """Logits of labels are computed in fp32: bf16 has steps of 1/16 or more above 8."""
    config = EngineConfig(str(demo.MODEL_PATH), dtype="bfloat16", max_num_seqs=8)
    with closing(load_served(config, served_names=("m",), chat_template=None)) as served:
        reply = asyncio.run(served.respond("/v1/decisions", BODY, "req_1", 1))
    [_, choice, _] = reply.body["answers"]
    first, second, third = (each["probability"] for each in choice["probabilities"])
    odds = [math.log(first / second), math.log(first / third), math.log(second / third)]
    assert not any((64 * each).is_integer() for each in (round(one, 9) for one in odds))


async def test_a_chat_decides_with_the_confidence_of_its_constrained_answer(
    served: Dispatcher,
) -> None:
    """The probabilities are those of a chat with this message, and the tokens are counted."""
    body = BODY | {"decide_by": "chat", "instructions": "Decide."}
    reply = await served.respond("/v1/decisions", body, "req_1", 0)
    listed = "Question {}: {}\n- {}\n- {}"
    questions = [
        listed.format(1, "Is a city named?", "Yes", "No"),
        listed.format(2, "Which kind of place?", "city", "river") + "\n- true",
        listed.format(3, "How big?", "a", "b"),
    ]
    asks = "Answer with a JSON object that has the text of one option for each question number."
    message = "\n\n".join(["Decide.", str(BODY["input"]), *questions, asks])
    texts = [["Yes", "No"], ["city", "river", "true"], ["a", "b"]]
    schema = {
        "type": "object",
        "properties": {str(number): {"enum": each} for number, each in enumerate(texts, 1)},
        "required": ["1", "2", "3"],
    }
    chat = {
        "messages": [{"role": "user", "content": message}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
        "temperature": 0,
        "confidence": True,
    }
    expected = (await served.respond("/v1/chat/completions", chat, "req_2", 0)).body
    fields = expected["choices"][0]["confidence"]
    shares = [[each["probability"] for each in fields[f"/{n}"]["probabilities"]] for n in (1, 2, 3)]
    yes, choice, score = reply.body["answers"]
    assert yes["probability"] == pytest.approx(shares[0][0], abs=1e-3)
    for answer, found in zip((choice, score), shares[1:], strict=True):
        own = [each["probability"] for each in answer["probabilities"]]
        assert sum(own) == pytest.approx(1)
        assert own == pytest.approx(found, abs=1e-3)
    assert choice["choice"] in {"city", "river", True}
    usage = reply.body["usage"]
    assert usage["input_tokens"] == expected["usage"]["prompt_tokens"]
    assert usage["output_tokens"] == expected["usage"]["completion_tokens"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert reply.body["diagnostics"] == [{"name": None}] * 3


async def test_a_chat_decides_questions_of_system_one(served: Dispatcher) -> None:
    """The only option of a question is certain, and both kinds of tokens are counted."""
    questions = {
        "city": {"type": "noul", "instructions": "Is a city named?"},
        "sole": {"type": "choice", "instructions": "Which?", "criteria": {"a": None}},
    }
    body = {"state": BODY["input"], "questions": questions, "decide_by": "chat"}
    reply = await served.respond("/v1/systemone", body, "req_1", 0)
    city, sole = reply.body["answers"].values()
    assert city["confidence"] == pytest.approx(max(city["noul"], 1 - city["noul"]), abs=1e-12)
    assert (sole["choice"], sole["confidence"]) == ("a", 1)
    assert reply.body["usage"]["output_tokens"] > 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"debias": 2}, '`debias` is not supported with `decide_by: "chat"`'),
        ({"max_completion_tokens": 3}, "The answer reached the token limit before it was complete"),
        ({"decide_by": "reading"}, "`decide_by` must be 'decision' or 'chat'"),
        ({"input": "x " * 40_000}, "maximum context length"),
    ],
)
async def test_an_unsuitable_chat_is_refused(
    served: Dispatcher, change: dict[str, Any], words: str
) -> None:
    """The error is one sentence that names the field."""
    body = BODY | {"decide_by": "chat"} | change
    reply = await served.respond("/v1/decisions", body, "req_1", 0)
    assert reply.status_code == 400
    assert words in reply.body["error"]["message"]
    assert reply.body["error"]["param"] == next(iter(change))


@pytest.mark.parametrize("budget", [0, 7])
async def test_a_chat_whose_template_opens_the_reasoning_decides_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    """Without an effort it is closed at once; its tokens are counted."""
    monkeypatch.setattr(chat_reader, "CLOSED_BUDGET", budget)
    folder = tmp_path / "model"
    shutil.copytree(demo.MODEL_PATH, folder)
    template = folder / "chat_template.jinja"
    start = "<|im_start|>assistant\\n"
    template.write_text(template.read_text().replace(start, f"{start}<think>\\n"))
    config = EngineConfig(str(folder), dtype="float32", max_num_seqs=8)
    with closing(load_served(config, served_names=("m",), chat_template=None)) as served:
        assert isinstance(served, Dispatcher)
        body = {"decide_by": "chat", "reasoning_effort": "none", "max_completion_tokens": 80}
        reply = await served.respond("/v1/decisions", BODY | body, "req_1", 0)
    assert reply.status_code == 200, reply.body
    shares = [each["probability"] for each in reply.body["answers"][1]["probabilities"]]
    assert sum(shares) == pytest.approx(1)
    assert reply.body["usage"]["output_tokens_details"]["reasoning_tokens"] >= budget


def test_a_model_without_a_template_decides_only_by_its_next_token(tmp_path: Path) -> None:
    """A chat is refused with the name of its field."""
    folder = tmp_path / "model"
    shutil.copytree(demo.MODEL_PATH, folder, ignore=shutil.ignore_patterns("*.jinja"))
    endpoints = endpoints_without_weights(EngineConfig(str(folder)), None)
    [decisions] = [each for each in endpoints if isinstance(each, Decisions)]
    assert decisions.prepare(BODY, METADATA).requests
    with pytest.raises(RequestError, match="or omit `decide_by`") as error:
        decisions.prepare(BODY | {"decide_by": "chat"}, METADATA)
    assert (error.value.param, error.value.code) == ("decide_by", "chat_template_missing")
