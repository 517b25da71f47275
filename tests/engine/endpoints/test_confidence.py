"""Confidence of constrained answers, compared with a brute-force sum by transformers."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.families import build
from tests.engine.scripted_model import (
    pretrained_tokenizer,
    text_model_of,
)
from tests.engine.structured_output.constrained import allowed, grammars_of
from tidemill.engine.config import EngineConfig
from tidemill.engine.endpoints.dispatcher import Dispatcher
from tidemill.engine.endpoints.endpoint import RequestMetadata
from tidemill.engine.load import load_served
from tidemill.engine.scheduling.sequence import ConstraintState
from tidemill.protocol.chat import ChatCompletionRequest
from tidemill.protocol.contract import Reply, StreamedReply

pytestmark = pytest.mark.usefixtures("proved")

PRETRAINED = pretrained_tokenizer()
MODEL = text_model_of(PRETRAINED)
CHATS = "/v1/chat/completions"
PROMPT = "the capital of Norway"
TOPICS = ["Paris", "Par is", "Oslo", "of"]
SCHEMA = {
    "type": "object",
    "properties": {
        "topic": {"enum": [*TOPICS, None, 1, 12]},
        "urgent": {"type": "boolean"},
        "unit": {"enum": [" a", "a", "an"]},
        "kind": {"const": "order"},
        "city": {"type": "string", "maxLength": 3},
        "tags": {"type": "array", "items": {"enum": ["a", "an"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["topic", "urgent", "unit", "kind", "city", "tags"],
}


class Scored:
    """A tiny random model, served and by transformers."""

    def __init__(self, folder: Path) -> None:
        sizes = {"vocab_size": len(PRETRAINED), "eos_token_id": PRETRAINED.eos_token_id}
        network: Any = build("Qwen3Config", **sizes)
        with torch.no_grad():  # so that the probabilities of tokens differ
            network.lm_head.weight.mul_(4)
        network.save_pretrained(folder)
        PRETRAINED.save_pretrained(folder)
        template = "{{ messages[0].content }}{% if tools %} of{% endif %}"
        (folder / "chat_template.jinja").write_text(template)
        config = EngineConfig(
            str(folder), dtype="float32", device="cpu", max_num_batched_tokens=64, max_num_seqs=4
        )
        self.network = network
        self.logits = cache(self._logits)
        self.prompt_ids = PRETRAINED(PROMPT)["input_ids"]
        self.dispatcher: Dispatcher = load_served(config, served_names=("tiny",))

    async def ask(self, *bodies: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the first choices of the answers to completions."""
        common = {"prompt": PROMPT, "max_tokens": 90, "confidence": True, "return_token_ids": True}
        replies = await asyncio.gather(
            *(
                self.dispatcher.respond("/v1/completions", {**common, **body}, f"req_{place}", 0)
                for place, body in enumerate(bodies)
            )
        )
        assert all(reply.status_code == 200 for reply in replies), replies
        return [reply.body["choices"][0] for reply in replies]

    def shares(self, state: ConstraintState, token_ids: list[int]) -> dict[int, float]:
        """Return the probabilities of the next tokens among those that a constraint allows."""
        ids = allowed(state, MODEL)
        logits = self.logits(tuple(token_ids))
        return dict(zip(ids, logits[ids].double().softmax(-1).tolist(), strict=True))

    def _logits(self, token_ids: tuple[int, ...]) -> torch.Tensor:
        with torch.inference_mode():
            row: torch.Tensor = self.network(torch.tensor([[*self.prompt_ids, *token_ids]])).logits
        return row[0, -1]

    def enumerated(
        self, state: ConstraintState, token_ids: list[int], ends: tuple[bytes, ...]
    ) -> Iterator[tuple[bytes, float]]:
        """Yield all texts up to one of `ends`, or to the end of the output, and their masses."""
        for token_id, share in self.shares(state, token_ids).items():
            piece, onward = MODEL.tokenizer.piece(token_id), state.fork()
            if MODEL.tokenizer.is_special(token_id):
                yield b"", share
            elif onward.push(token_id) or piece.endswith(ends):
                yield piece, share
            else:
                for text, mass in self.enumerated(onward, [*token_ids, token_id], ends):
                    yield piece + text, share * mass


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scored]:
    """Serve a tiny model."""
    model = Scored(tmp_path_factory.mktemp("scored"))
    yield model
    model.dispatcher.close()


def state_of(body: dict[str, Any]) -> ConstraintState:
    """Return the state of a body's constraint at its beginning."""
    from tidemill.protocol.completions import CompletionRequest

    requested = CompletionRequest.model_validate({"prompt": PROMPT, **body}).output_constraint
    assert requested is not None
    return grammars_of(MODEL).constraint(requested).start_state()


async def test_the_distribution_of_choices_is_the_sum_over_all_tokenizations(
    scored: Scored,
) -> None:
    """A choice that begins another one ends with the end token; rows run next to each other."""
    bodies = [
        {"guided_choice": [*TOPICS, "Oslo is", "is Oslo"], "temperature": temperature, "seed": seed}
        for seed, temperature in enumerate((0, 1, 1, 1))
    ]
    expected = dict.fromkeys(bodies[0]["guided_choice"], 0.0)  # type: ignore[call-overload]
    for text, mass in scored.enumerated(state_of(bodies[0]), [], (b"\0",)):
        expected[text.decode()] += mass
    assert sum(expected.values()) == pytest.approx(1)
    for choice in await scored.ask(*bodies):
        field = choice["confidence"][""]
        found = {one["value"]: one["probability"] for one in field["probabilities"]}
        assert found == pytest.approx(expected, abs=1e-4)
        assert field["confidence"] == found[choice["text"]]
        assert "undecided" not in field


async def test_fields_of_json_have_the_probabilities_of_their_tokens(scored: Scored) -> None:
    """Finite fields have the sum over all tokenizations, and a constant has no confidence."""
    body = {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}
    bodies = [{**body, "temperature": 1.0, "seed": seed} for seed in range(3)]
    for choice in await scored.ask(*bodies):
        confidence = choice["confidence"]
        names = ["", "/topic", "/urgent", "/unit", "/kind", "/city", "/tags", "/tags/0"]
        assert [name for name in confidence if name != "/tags/1"] == names
        assert confidence["/kind"] == {"confidence": None}
        values = [one["value"] for one in confidence["/topic"]["probabilities"]]
        assert values == SCHEMA["properties"]["topic"]["enum"]  # type: ignore[index]
        state, text, num_checked = state_of(body), b"", 0
        shares: list[tuple[int, float]] = []  # by the number of bytes before the token
        for place, token_id in enumerate(choice["token_ids"]):
            if text.endswith((b'"topic":', b'"urgent":', b'"unit":')):
                name = text.rpartition(b",")[2].strip(b'{":').decode()
                check_finite(scored, state, choice["token_ids"][:place], confidence[f"/{name}"])
                num_checked += 1
            share = scored.shares(state, choice["token_ids"][:place])[token_id]
            shares.append((len(text), share))
            state.push(token_id)
            text += MODEL.tokenizer.piece(token_id)
        assert num_checked == 3
        whole = math.prod(share for _, share in shares)
        assert confidence[""]["confidence"] == pytest.approx(whole, rel=1e-3)
        start = text.index(b'"city":"') + len('"city":"')
        end = text.index(b'"', start) + 1
        city = math.prod(share for offset, share in shares if start <= offset < end)
        assert confidence["/city"]["confidence"] == pytest.approx(city, abs=1e-4)
        answer = json.loads(choice["text"])
        place = values.index(answer["topic"])
        topic = confidence["/topic"]
        assert topic["confidence"] == topic["probabilities"][place]["probability"]


def check_finite(
    scored: Scored, state: ConstraintState, token_ids: list[int], field: dict[str, Any]
) -> None:
    """Compare a field's distribution with the enumeration of its values."""
    expected: dict[str, float] = {}
    for text, mass in scored.enumerated(state.fork(), token_ids, (b",",)):
        value = json.dumps(json.loads(text.removesuffix(b",")))
        expected[value] = expected.get(value, 0.0) + mass
    found = {json.dumps(one["value"]): one["probability"] for one in field["probabilities"]}
    assert sum(found.values()) == pytest.approx(1, abs=1e-4)
    assert found == pytest.approx(expected, abs=1e-4)


async def test_a_regex_has_the_probability_of_its_text(scored: Scored) -> None:
    """The end token counts if the text could go on."""
    body = {"regex": "[a-c]{1,3}", "temperature": 1.0, "seed": 4}
    [choice] = await scored.ask(body)
    state, logprob = state_of(body), 0.0
    for place, token_id in enumerate(choice["token_ids"]):
        logprob += math.log(scored.shares(state, choice["token_ids"][:place])[token_id])
        state.push(token_id)
    assert list(choice["confidence"]) == [""]
    assert choice["confidence"][""]["confidence"] == pytest.approx(math.exp(logprob), abs=1e-4)


async def test_each_choice_of_a_chat_has_its_confidence(scored: Scored) -> None:
    """The tokens and the usage are those of a chat without it."""
    body = {
        "messages": [{"role": "user", "content": PROMPT}],
        "guided_choice": ["Paris", "Par is", "Oslo"],
        "n": 2,
        "seed": 2,
    }
    plain, reply = [
        await scored.dispatcher.respond(
            "/v1/chat/completions", {**body, "confidence": is_on}, "req_1", 0
        )
        for is_on in (False, True)
    ]
    assert reply.usage == plain.usage
    for choice, other in zip(reply.body["choices"], plain.body["choices"], strict=True):
        field = choice.pop("confidence")[""]
        assert choice == other
        shares = {one["value"]: one["probability"] for one in field["probabilities"]}
        assert sum(shares.values()) == pytest.approx(1, abs=1e-4)
        assert shares[choice["message"]["content"]] == field["confidence"]


async def test_an_answer_that_is_cut_off_has_no_confidence(scored: Scored) -> None:
    """Neither has one that a stop string ends."""
    body = {"structured_outputs": {"json": SCHEMA}, "temperature": 0}
    cut, stopped = await scored.ask({**body, "max_tokens": 9}, {**body, "stop": "topic"})
    assert cut["confidence"] is stopped["confidence"] is None


def tool(name: str, **strict: bool) -> dict[str, Any]:
    """Return a tool with finite arguments."""
    schema = {
        "type": "object",
        "properties": {
            "unit": {"enum": ["a", "an", "ans"]},
            "urgent": {"type": "boolean"},
            "kind": {"const": "order"},
        },
        "required": ["unit", "urgent", "kind"],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": schema, **strict}}


CALL = "/tool_calls/0/function"
FORCED = {
    "messages": [{"role": "user", "content": PROMPT}],
    "tools": [tool("of"), tool("often"), tool("Oslo")],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_tokens": 300,
    "confidence": True,
    "return_token_ids": True,
}


async def test_a_forced_call_has_the_probabilities_of_its_name_and_arguments(
    scored: Scored, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are the sums over all tokenizations, given the text before the value."""
    metadata = RequestMetadata("tiny", "req_1", 0)
    prepared = scored.dispatcher._endpoints.find(CHATS).prepare(FORCED, metadata)
    monkeypatch.setattr(scored, "prompt_ids", prepared.requests[0].prompt_ids)
    reply = await scored.dispatcher.respond(CHATS, {**FORCED, "seed": 1}, "req_1", 0)
    [choice] = reply.body["choices"]
    confidence, ids = choice["confidence"], choice["token_ids"]
    assert confidence[f"{CALL}/arguments/kind"] == {"confidence": None}
    state, text, left = prepared.requests[0].constraint.start_state(), b"", dict(BEFORE)
    for place, token_id in enumerate(ids):
        for name, before in BEFORE.items():
            if re.search(before, text):
                check_value(scored, state, ids[:place], confidence[CALL + name])
                del left[name]
        if not left:
            break
        allowed(state, MODEL)  # a state accepts a token only after its mask
        state.push(token_id)
        text += MODEL.tokenizer.piece(token_id)
    assert not left
    called, name = (
        choice["message"]["tool_calls"][0]["function"]["name"],
        confidence[f"{CALL}/name"],
    )
    shares = {one["value"]: one["probability"] for one in name["probabilities"]}
    assert name["confidence"] == shares[called]


BEFORE = {
    "/name": rb'"name": "$',
    "/arguments/unit": rb'"unit":\s*"$',
}


def check_value(
    scored: Scored, state: ConstraintState, token_ids: list[int], field: dict[str, Any]
) -> None:
    """Compare a field's distribution with the enumeration of the texts up to its end."""
    expected = dict.fromkeys((str(one["value"]).lower() for one in field["probabilities"]), 0.0)
    ends = (b'"', b",", b"}", b" ", b"\n")
    for text, mass in scored.enumerated(state.fork(), token_ids, ends):
        if text.strip():  # the whitespace before the value is given
            expected[re.split(rb'[",}\s]', text)[0].decode().lower()] += mass
    expected = {value: mass / sum(expected.values()) for value, mass in expected.items()}
    found = {str(one["value"]).lower(): one["probability"] for one in field["probabilities"]}
    assert found == pytest.approx(expected, abs=1e-4)


async def test_a_stream_has_the_confidence_in_the_last_chunk_of_a_choice(scored: Scored) -> None:
    """Each choice has that of the answer without a stream, also of a tool call."""
    choice_of = {"guided_choice": [*TOPICS, "Oslo is"], "n": 2, "seed": 3, "confidence": True}
    for url, whole in (
        ("/v1/completions", {"prompt": [PROMPT, PROMPT], **choice_of}),
        (CHATS, {"messages": FORCED["messages"], **choice_of}),
        (CHATS, {**FORCED, "seed": 1}),
    ):
        reply = await scored.dispatcher.respond(url, whole, "req_1", 0)
        streamed = await scored.dispatcher.answer(url, {**whole, "stream": True}, "req_1", 0)
        assert isinstance(streamed, StreamedReply)
        chunks = [choice async for chunk in streamed.chunks for choice in chunk.get("choices", ())]
        last = {each["index"]: each for each in chunks if each["finish_reason"]}
        assert sum("confidence" in each for each in chunks) == len(reply.body["choices"])
        for choice in reply.body["choices"]:
            found = last[choice["index"]]["confidence"]
            assert found
            assert found.keys() == choice["confidence"].keys()
            for pointer, field in choice["confidence"].items():
                shares = [one["probability"] for one in field.get("probabilities", ())]
                others = [one["probability"] for one in found[pointer].get("probabilities", ())]
                assert others == pytest.approx(shares, abs=1e-4)
                assert found[pointer]["confidence"] == pytest.approx(field["confidence"], abs=1e-4)


async def test_free_answers_are_refused(scored: Scored) -> None:
    """The error names the parameter; strict tools suffice."""
    free = {**FORCED, "tool_choice": "auto"}
    for url, body in (("/v1/completions", {"prompt": PROMPT, "confidence": True}), (CHATS, free)):
        reply = await scored.dispatcher.answer(url, body, "req_1", 0)
        assert isinstance(reply, Reply)
        assert (reply.status_code, reply.body["error"]["param"]) == (400, "confidence")
    strict = {"tools": [tool("of", strict=True)]}
    assert ChatCompletionRequest.model_validate(free | strict).is_constrained
