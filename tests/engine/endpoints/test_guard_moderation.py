"""Moderation by guard models: answers in the published formats, as OpenAI's categories."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai.types import ModerationCreateResponse

from tests.engine.scripted_model import METADATA, Scene, text_model
from tidemill.engine.config import EngineConfig
from tidemill.engine.endpoints import request_bounds, text_endpoints
from tidemill.engine.endpoints.guard_moderation import GuardModerations
from tidemill.engine.model.endpoint_names import endpoints_of
from tidemill.engine.parsers.guards import guard_format
from tidemill.engine.scheduling.sequence import SequenceRequest, SequenceResult
from tidemill.engine.scheduling.token_logprobs import TokenLogprobs, pack_logprobs
from tidemill.protocol.contract import Reply
from tidemill.protocol.errors import RequestError
from tidemill.protocol.moderation import CATEGORIES
from tidemill.protocol.routes import MODERATIONS

_TEXT = "{{ messages[0].content }}"
TEMPLATES = {
    "llama": f"Task: {_TEXT}\n - First line must read 'safe' or 'unsafe'.",
    "qwen": f"{_TEXT} The first line is 'Safety: Safe' or 'Safety: Controversial'.<think></think>",
    "shield": f"{_TEXT} Our safety principle is defined in the below: {{{{ guideline }}}}",
    "granite": f"{{{{ guardian_config['criteria_id'] }}}}: {_TEXT}",
    "older granite": f"{{{{ guardian_config['risk_name'] }}}}: {_TEXT}",
}
BODY = {"input": ["Hello", "Bye"]}


def moderations_of(template: str) -> Any:
    """Return the endpoint of a model with a chat template, None without one."""
    model = replace(text_model(chat_template=template), max_model_len=512)
    endpoints = {each.route: each for each in text_endpoints(model, seed=0)}
    return endpoints.get(MODERATIONS)


def result_of(
    request: SequenceRequest, answer: str, verdict: str, probs: dict[str, float]
) -> SequenceResult:
    """Return an answer whose tokens are sure, except the one that begins the verdict."""
    tokenizer = text_model().tokenizer
    before, _, after = answer.partition(verdict)

    def ids_of(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    head, word, tail = ids_of(before), ids_of(verdict), ids_of(after)
    token_ids = (head + word + tail)[: request.max_tokens]
    num_top = request.sampling.logprobs or 0
    top = {ids_of(text)[0]: math.log(prob) for text, prob in probs.items()}
    others = [(0, -50.0)] * num_top
    rows = TokenLogprobs(num_top)
    for place, token_id in enumerate(token_ids):
        is_verdict = place == len(head)
        pairs = [*top.items(), *others][:num_top] if is_verdict else others
        top_ids, logprobs = zip(*pairs, strict=True)
        own = top[token_id] if is_verdict else 0.0
        arrays = [np.array([each]) for each in (token_id, own, top_ids, logprobs)]
        rows.append(pack_logprobs(*arrays).tobytes())
    return SequenceResult(token_ids, "stop", logprobs=rows)


def reply_of(template: str, *answers: tuple[str, str, dict[str, float]]) -> Reply:
    """Return the reply of a guard model that gives these answers in turn."""
    endpoint = moderations_of(TEMPLATES[template])
    prepared = endpoint.prepare(BODY, METADATA)
    assert len(prepared.requests) == len(answers)
    pairs = zip(prepared.requests, answers, strict=True)
    reply: Reply = endpoint.finish(prepared, [result_of(one, *answer) for one, answer in pairs])
    ModerationCreateResponse.model_validate(reply.body)
    return reply


def scores_of(result: dict[str, Any]) -> dict[str, float]:
    """Return the scores above 0, rounded."""
    return {name: round(x, 3) for name, x in result["category_scores"].items() if x > 0}


def test_llama_guard_lists_codes() -> None:
    """Its second line has the violated categories; a safe text has the probability of harm."""
    sure, unsure = {"u": 0.9, "s": 0.1}, {"u": 0.2, "s": 0.6}
    reply = reply_of("llama", ("\n\nunsafe\nS1,S10", "unsafe", sure), ("safe", "safe", unsure))
    harmful, harmless = reply.body["results"]
    named = ("unsafe", "violence", "illicit/violent", "hate")
    assert scores_of(harmful) == dict.fromkeys(named, 0.9)
    assert {name for name, flag in harmful["categories"].items() if flag} == {*named}
    assert harmful["flagged"]
    assert harmful["category_applied_input_types"]["sexual"] == ["text"]
    assert harmful["category_applied_input_types"]["harassment"] == []
    assert scores_of(harmless) == {"unsafe": 0.25}
    assert not harmless["flagged"]
    assert {*CATEGORIES, "privacy"} <= harmless["categories"].keys()
    assert reply.usage.completion_tokens > 5
    assert reply.usage.prompt_tokens > 50


def test_qwen3guard_has_three_verdicts() -> None:
    """A controversial text has half the score, and an unsafe one names its categories."""
    probs = {"S": 0.1, "U": 0.6, "C": 0.3}
    names = "\nCategories: Suicide & Self-Harm, PII"
    reply = reply_of(
        "qwen",
        (f"Safety: Unsafe{names}", "Unsafe", probs),
        ("Safety: Controversial\nCategories: Violent", "Controversial", {"C": 1.0}),
    )
    unsafe, controversial = reply.body["results"]
    assert scores_of(unsafe) == dict.fromkeys(("unsafe", "self-harm", "pii"), 0.75)
    assert scores_of(controversial) == dict.fromkeys(("unsafe", "violence"), 0.5)


def test_shieldgemma_answers_each_guideline() -> None:
    """There is a prompt for each of four categories."""
    yes, no = ("Yes", "Yes", {"Y": 0.7, "No": 0.3}), ("No", "No", {"Y": 0.2, "No": 0.8})
    first, second = reply_of("shield", no, yes, no, no, no, no, no, yes).body["results"]
    assert {name for name, flag in first["categories"].items() if flag} == {"harassment"}
    assert scores_of(second) == {
        "illicit/violent": 0.2,
        "harassment": 0.2,
        "hate": 0.2,
        "sexual": 0.7,
    }


@pytest.mark.parametrize("template", ["granite", "older granite"])
def test_granite_guardian_answers_each_risk(template: str) -> None:
    """The risk is a variable of its template; tags around the verdict do not matter."""
    endpoint = moderations_of(TEMPLATES[template])
    prompts = [
        text_model().tokenizer.text(each.prompt_ids)
        for each in endpoint.prepare(BODY, METADATA).requests
    ]
    assert prompts[:2] == ["harm: Hello", "social_bias: Hello"]
    assert prompts[7] == "harm: Bye"
    no, yes = ("No", "No", {"No": 1.0}), ("<score> yes", "yes", {"y": 0.9, "n": 0.1})
    first, second = reply_of(template, *[no] * 8, yes, *[no] * 5).body["results"]
    assert not first["flagged"]
    assert scores_of(second) == {"hate": 0.9}


@pytest.mark.parametrize(
    ("template", "num_others", "answer"),
    [
        ("llama", 1, "Paris"),
        ("llama", 1, "This is not safe"),
        ("qwen", 1, "Safe"),
        ("shield", 7, "I say no"),
        ("granite", 13, "<think> No harm"),
    ],
)
def test_an_answer_without_a_verdict_is_an_error_of_its_row(
    template: str, num_others: int, answer: str
) -> None:
    """It is never taken for a harmless text, whatever words it contains."""
    known = ("safe", "safe", {"s": 1.0})
    none = (answer, answer[0], {answer[0]: 1.0})
    with pytest.raises(RequestError, match="answer to text 1 of `input` has no verdict") as raised:
        reply_of(template, none, *[known] * num_others)
    assert raised.value.code == "verdict_missing"


def test_a_verdict_may_follow_closed_reasoning() -> None:
    """Words of the reasoning do not count."""
    guard = guard_format([TEMPLATES["granite"]])
    assert guard is not None
    verdict = guard.verdict.search("<think>\nNo\n</think>\n<score> yes </score>")
    assert verdict is not None
    assert verdict[1] == "yes"


def test_the_servers_default_does_not_truncate_instructions() -> None:
    """Without them a model answers something else."""
    model = text_model(chat_template=TEMPLATES["llama"])
    model = replace(model, max_model_len=512, truncate_prompt_tokens=5)
    [endpoint] = [one for one in text_endpoints(model, seed=0) if one.route is MODERATIONS]
    [request] = endpoint.prepare({"input": "Hi"}, METADATA).requests
    prompt = model.tokenizer.text(request.prompt_ids)
    assert prompt == "Task: Hi\n - First line must read 'safe' or 'unsafe'."


def test_all_prompts_of_a_body_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text counts once for each question."""
    monkeypatch.setattr(request_bounds, "MAX_PROMPT_TOKENS", 30)
    with pytest.raises(RequestError, match="maximum is 30") as raised:
        moderations_of(TEMPLATES["granite"]).prepare({"input": "Hi"}, METADATA)
    assert raised.value.param == "input"


@pytest.mark.parametrize(("template", "is_elsewhere"), [("llama", False), ("granite", True)])
async def test_many_questions_are_rendered_outside_the_loop(
    template: str, *, is_elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body of 500 bytes may have 240 texts, with seven chats each."""
    threads: list[int] = []

    def noted(*_: object) -> None:
        threads.append(threading.get_ident())
        raise RequestError("Enough.")

    monkeypatch.setattr(GuardModerations, "prepare", noted)
    served = Scene(model=text_model(chat_template=TEMPLATES[template])).served
    await served.respond(MODERATIONS.name, {"input": "Hi"}, "req_1", 0)
    await served.answer(MODERATIONS.name, {"input": ["Hi"] * 30}, "req_1", 0)
    expected = [is_elsewhere, True]
    assert [thread != threading.get_ident() for thread in threads] == expected


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": 5}, "input"),
        ({"input": "Hello" * 200}, "input"),
        ({"input": "Hello", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"input": [{"type": "image_url", "image_url": {"url": "x"}}]}, "input.0"),
    ],
)
def test_an_invalid_body_is_refused(body: dict[str, Any], param: str) -> None:
    """The error names the field of this URL."""
    with pytest.raises(RequestError) as raised:
        moderations_of(TEMPLATES["llama"]).prepare(body, METADATA)
    assert raised.value.param == param


def test_other_chat_models_do_not_moderate(tmp_path: Path) -> None:
    """Their template has no mark of a guard; a given template counts, also before a load."""
    assert moderations_of(_TEXT) is None
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "chat_template.jinja").write_text(_TEXT)
    config = EngineConfig(str(tmp_path))
    assert MODERATIONS.name not in (endpoints_of(config) or ())
    assert MODERATIONS.name in (endpoints_of(config, TEMPLATES["qwen"]) or ())
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES["shield"])
    assert MODERATIONS.name in (endpoints_of(config) or ())
    assert MODERATIONS.name not in (endpoints_of(config, _TEXT) or ())
