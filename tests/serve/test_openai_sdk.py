"""OpenAI's Python client against our server: the use cases of its documentation."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.decision import (
    AnswerAnswerResourceChoice,
    AnswerAnswerResourcePredicate,
    AnswerAnswerResourceScore,
)

from bench.server.served import Place
from tests.serve.conftest import KEY
from tidemill import demo

MESSAGES: list[Any] = [{"role": "user", "content": "What is 7 plus 5?"}]
CHAT: dict[str, Any] = {
    "model": demo.NAME,
    "messages": MESSAGES,
    "max_tokens": 24,
    "temperature": 0,
}


def texts(chunks: list[ChatCompletionChunk]) -> dict[int, str]:
    """Return the joined deltas of each choice."""
    joined: dict[int, str] = defaultdict(str)
    for chunk in chunks:
        for choice in chunk.choices:
            joined[choice.index] += choice.delta.content or ""
    return dict(joined)


def test_a_chat_is_answered(client: openai.OpenAI) -> None:
    """The reply has the requested content and its usage."""
    answer = client.chat.completions.create(**CHAT)
    assert "12" in (answer.choices[0].message.content or "")
    assert answer.model == demo.NAME
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_adds_up_to_the_whole_reply(client: openai.OpenAI, n: int) -> None:
    """Text, finish reasons, log-probabilities and usage of each choice are equal."""
    fields = {**CHAT, "n": n, "temperature": 1, "seed": 5, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**fields)
    with client.chat.completions.create(
        **fields, stream=True, stream_options={"include_usage": True}
    ) as stream:
        *chunks, last = stream
    assert texts(chunks) == {choice.index: choice.message.content for choice in whole.choices}
    reasons = [
        (choice.index, choice.finish_reason)
        for chunk in chunks
        for choice in chunk.choices
        if choice.finish_reason
    ]
    assert sorted(reasons) == [(choice.index, choice.finish_reason) for choice in whole.choices]
    scores: dict[int, list[Any]] = defaultdict(list)
    for chunk in chunks:
        for choice in chunk.choices:
            scores[choice.index] += (choice.logprobs and choice.logprobs.content) or []
    assert all(
        choice.logprobs is not None and scores[choice.index] == choice.logprobs.content
        for choice in whole.choices
    )
    assert last.choices == []
    assert last.usage == whole.usage
    assert {chunk.id for chunk in chunks} == {last.id}


def test_the_clients_stream_helper_ends_with_the_whole_reply(client: openai.OpenAI) -> None:
    """The client assembles the events into a completion."""
    whole = client.chat.completions.create(**CHAT)
    with client.chat.completions.stream(**CHAT) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= set(kinds)
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason


def test_many_concurrent_requests_of_the_async_client(place: Place) -> None:
    """Each one, whole or streamed, gets its own reply."""

    async def ask(client: openai.AsyncOpenAI, left: int, *, streams: bool) -> str:
        messages: list[Any] = [{"role": "user", "content": f"What is {left} plus 5?"}]
        fields = {**CHAT, "messages": messages}
        if not streams:
            answer: ChatCompletion = await client.chat.completions.create(**fields)
            return answer.choices[0].message.content or ""
        chunks = await client.chat.completions.create(**fields, stream=True)
        return texts([chunk async for chunk in chunks])[0]

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{place.url}/v1", api_key=KEY, max_retries=0
        ) as client:
            return await asyncio.gather(
                *(ask(client, left, streams=streams) for left in range(8) for streams in (0, 1))
            )

    replies = asyncio.run(ask_all())
    assert replies[0::2] == replies[1::2]
    assert len(set(replies)) == 8


def test_text_completions_are_answered_whole_and_streamed(client: openai.OpenAI) -> None:
    """Several prompts are sent, with echo."""
    fields: dict[str, Any] = {
        "model": demo.NAME,
        "prompt": ["The tide", "The mill"],
        "max_tokens": 8,
        "temperature": 0,
        "echo": True,
    }
    whole = client.completions.create(**fields)
    joined: dict[int, str] = defaultdict(str)
    for chunk in client.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            joined[choice.index] += choice.text
    assert joined == {choice.index: choice.text for choice in whole.choices}
    assert [choice.text[:8] for choice in whole.choices] == ["The tide", "The mill"]


def test_a_client_that_leaves_a_stream_leaves_nothing_behind(client: openai.OpenAI) -> None:
    """The next request is answered as usual."""
    fields = {**CHAT, "max_tokens": 400, "extra_body": {"ignore_eos": True}}
    with client.chat.completions.create(**fields, stream=True) as stream:
        assert next(iter(stream)).object == "chat.completion.chunk"
    assert client.chat.completions.create(**CHAT).choices


def test_raw_responses_have_their_headers(client: openai.OpenAI) -> None:
    """`with_raw_response` and `with_streaming_response` show status, headers and body."""
    raw = client.chat.completions.with_raw_response.create(**CHAT)
    assert raw.status_code == 200
    assert raw.headers["content-type"].startswith("application/json")
    assert raw.parse().object == "chat.completion"
    with client.chat.completions.with_streaming_response.create(**CHAT, stream=True) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"


DECISION: dict[str, Any] = {
    "model": demo.NAME,
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Paris is a city."}]},
        {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "It is."},
    ],
    "questions": [
        {"type": "predicate", "instructions": "Is a city named?", "name": "city"},
        {
            "type": "choice",
            "instructions": [{"type": "input_text", "text": "Which?"}],
            "choices": [{"value": True}, {"value": "true", "description": "a word"}],
        },
        {"type": "score", "instructions": "How?", "levels": [{"label": "a"}, {"label": "b"}]},
    ],
}


def test_a_decision_has_typed_answers(client: openai.OpenAI) -> None:
    """They are in the order of the questions; a boolean is not a string."""
    decision = client.decisions.create(
        **DECISION, safety_identifier="x", prompt_cache_key="y", prompt_cache_options={}
    )
    assert decision.model == demo.NAME
    predicate, choice, score = decision.answers
    assert isinstance(predicate, AnswerAnswerResourcePredicate)
    assert isinstance(choice, AnswerAnswerResourceChoice)
    assert isinstance(score, AnswerAnswerResourceScore)
    assert (predicate.name, choice.name) == ("city", None)
    assert [each.value for each in choice.probabilities] == [True, "true"]
    assert choice.confidence == max(each.probability for each in choice.probabilities)
    assert sum(each.probability for each in choice.probabilities) == pytest.approx(1)
    assert score.score == pytest.approx(score.probabilities[1].probability)
    assert [each.label for each in score.probabilities] == ["a", "b"]
    assert decision.usage.total_tokens == decision.usage.input_tokens > 0
    with pytest.raises(openai.BadRequestError) as caught:
        client.decisions.create(**{**DECISION, "questions": []})
    assert caught.value.param == "questions"


def test_system_one_answers_in_vllms_form(place: Place) -> None:
    """The fields are those of vLLM's documentation, by the names of the questions."""
    questions = {
        "team": {
            "type": "choice",
            "instructions": "Which team?",
            "criteria": {"billing": "payments", "shipping": None},
        },
        "urgent": {"type": "noul", "instructions": "Urgent?", "criteria": {"true": "money"}},
        "tone": {"type": "score", "instructions": "How?", "criteria": ["calm", "furious"]},
    }
    state, off = {"ticket": "My card was charged twice."}, {"enable_thinking": False}
    body = {"state": state, "questions": questions, "chat_template_kwargs": off}
    reply = httpx.post(
        f"{place.url}/v1/systemone",
        json={"model": demo.NAME, **body},
        headers={"authorization": f"Bearer {KEY}"},
        timeout=60,
    ).json()
    assert {*reply} == {"id", "object", "created", "model", "answers", "usage", "diagnostics"}
    assert (reply["id"][:9], reply["object"]) == ("decision-", "structured_decision")
    assert [*reply["answers"]] == [*reply["diagnostics"]] == [*questions]
    team, urgent, tone = reply["answers"].values()
    assert [*team] == ["type", "choice", "probabilities", "confidence"]
    assert [*urgent] == ["type", "noul", "probabilities", "confidence"]
    assert {*tone} == {"type", "score", "legend", "probabilities", "confidence"}
    assert {*team["probabilities"]} == {"billing", "shipping"}
    assert urgent["probabilities"] == {
        "yes": urgent["noul"],
        "no": pytest.approx(1 - urgent["noul"]),
    }
    assert tone["legend"] == {"0": "calm", "1": "furious"}
    for answer, diagnostics in zip(
        (team, urgent, tone), reply["diagnostics"].values(), strict=True
    ):
        assert {*diagnostics} == {"label_mass", "argmax_is_label"}
        most = max(answer["probabilities"].values())
        assert answer["confidence"] == pytest.approx(most * diagnostics["label_mass"])


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"max_tokens": 10**6}, openai.BadRequestError, "max_tokens"),
        ({"extra_body": {"suffix": "x"}}, openai.BadRequestError, "suffix"),
        ({"model": "another"}, openai.NotFoundError, "model"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_error_raises_the_clients_exception(
    client: openai.OpenAI,
    *,
    fields: dict[str, Any],
    kind: type[openai.APIStatusError],
    param: str,
    stream: bool,
) -> None:
    """It has the right class, parameter and message, also for a stream."""
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**{**CHAT, **fields, "stream": stream})
    assert caught.value.param == param
    assert caught.value.body is not None


def test_a_missing_key_raises_the_clients_exception(place: Place) -> None:
    """The health route needs no key."""
    with (
        openai.OpenAI(base_url=f"{place.url}/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()
    assert place.get("/health")


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    """They are listed under the names that requests use."""
    assert [model.id for model in client.models.list()] == [demo.NAME]
    assert client.models.retrieve(demo.NAME).object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")
