"""Probabilities of decisions are those of a sum over every tokenization, by transformers."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.endpoints.decisions.spelled_labels import (
    Spellings,
    byte_level,
    save_model,
    sentencepiece,
)
from tests.engine.scripted_model import METADATA, text_model
from tests.engine.tasks.pooled import serving
from tidemill.engine.endpoints.decisions.next_token import NextTokenReader, _likely_beginnings
from tidemill.engine.endpoints.decisions.prompts import Read
from tidemill.engine.endpoints.dispatcher import Dispatcher
from tidemill.engine.endpoints.endpoint import RequestMetadata
from tidemill.engine.parsers.registry import select_parsers
from tidemill.engine.scheduling.sequence import SequenceRequest
from tidemill.engine.text.label_tokens import LabelTokens, Path
from tidemill.protocol.contract import Reply
from tidemill.protocol.decisions.openai_body import DecisionRequest
from tidemill.protocol.errors import RequestError

pytestmark = pytest.mark.usefixtures("proved")

URL, CHAT_URL = "/v1/decisions", "/v1/chat/completions"
TOLERANCE = 1e-5
# Of recurrent layers, which transformers computes in other chunks.
RECURRENT_TOLERANCE = 3e-5
# Prompts are computed in chunks of this size, next to each other.
TOKENS_A_STEP = 96
# A page has 16 tokens of 4 layers with 2 heads of 16 keys and values each, in fp32.
PAGE_BYTES = 16 * 4 * 2 * 2 * 16 * 4
FAMILIES = {
    "SentencePiece, windows": ("MistralConfig", sentencepiece),
    "byte-level": ("LlamaConfig", byte_level),
    "SentencePiece, Mamba": ("BambaConfig", sentencepiece),
    "byte-level, near and far": ("Gemma3, near and far", byte_level),
    "byte-level, DeltaNet": ("Qwen3_5TextConfig", byte_level),
    "SentencePiece, experts and sinks": ("GptOssConfig", sentencepiece),
    "byte-level, convolutions": ("Lfm2Config", byte_level),
    "SentencePiece, latents": ("DeepseekV3Config", sentencepiece),
}
RECURRENT = ("BambaConfig", "Qwen3_5TextConfig")


class Scene(NamedTuple):
    """A model behind its endpoints, and the sums by transformers."""

    served: Dispatcher
    spellings: Spellings
    tolerance: float


@pytest.fixture(scope="module", params=FAMILIES)
def scene(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scene]:
    """Return a tiny model of a family, whose steps have few tokens."""
    family, make_tokenizer = FAMILIES[request.param]
    folder, tokenizer = tmp_path_factory.mktemp("model"), make_tokenizer()
    network = save_model(folder, family, tokenizer)
    with serving() as load:
        served = load(folder, max_num_batched_tokens=TOKENS_A_STEP)
        is_recurrent = family in RECURRENT
        tolerance = RECURRENT_TOLERANCE if is_recurrent else TOLERANCE
        yield Scene(served, Spellings(network, tokenizer), tolerance)


def options(count: int) -> list[str]:
    """Return short texts of choices."""
    return [f"o{number}" for number in range(count)]


def question(kind: str, count: int) -> dict[str, Any]:
    """Return a question of a kind, with `count` options unless it is a predicate."""
    body: dict[str, Any] = {"type": kind, "instructions": f"Which of {count}?"}
    if kind == "choice":
        body["choices"] = [{"value": text} for text in options(count)]
    if kind == "score":
        body["levels"] = [{"label": text} for text in options(count)]
    return body


COUNTS = st.one_of(st.integers(2, 12), st.integers(27, 40))
QUESTIONS = st.builds(question, st.sampled_from(["predicate", "choice", "score"]), COUNTS)
BODIES = st.fixed_dictionaries(
    {
        "input": st.sampled_from(["It rains.", "It rains. " * 20, "It rains. " * 19 + "Not here."]),
        "questions": st.lists(QUESTIONS, min_size=1, max_size=2),
        "question_layout": st.sampled_from(["row_first", "questions_first"]),
        "debias": st.sampled_from([None, 2]),
        "cache_salt": st.sampled_from([None, "a"]),
    }
)


def ask(
    served: Dispatcher, bodies: Sequence[dict[str, Any]], num_chats: int = 0, chat_tokens: int = 24
) -> list[Reply]:
    """Return the replies to decisions that run at once, next to chats that generate."""

    async def together() -> list[Reply]:
        chats = [
            {
                "messages": [{"role": "user", "content": f"Chat {number}. " * 12}],
                "max_tokens": chat_tokens,
                "ignore_eos": True,
            }
            for number in range(num_chats)
        ]
        lines = [(CHAT_URL, chat) for chat in chats] + [(URL, body) for body in bodies]
        return await asyncio.gather(
            *(served.respond(url, body, f"r{i}", 0) for i, (url, body) in enumerate(lines))
        )

    replies = asyncio.run(together())
    assert [reply.status_code for reply in replies] == [200] * len(replies), replies
    return replies[num_chats:]


def check(scene: Scene, body: dict[str, Any], reply: Reply) -> None:
    """Compare the probabilities of an answer with the sums over every tokenization."""
    endpoint = scene.served._endpoints.find(URL)
    prepared = endpoint.prepare(body, RequestMetadata("tiny", "r", 0))
    expected: dict[int, list[np.ndarray[Any, Any]]] = {}
    for request, read in zip(prepared.requests, prepared.context.reads, strict=True):
        expected.setdefault(read.question, []).append(_expected(scene, request.prompt_ids, read))
    for number, answer in enumerate(reply.body["answers"]):
        own = np.mean(expected[number], axis=0)
        assert _probabilities(answer) == pytest.approx(own.tolist(), abs=scene.tolerance)


def _expected(scene: Scene, prompt: Sequence[int], read: Read) -> np.ndarray[Any, Any]:
    labels = [read.label(option) for option in range(len(read.order))]
    masses = np.array(scene.spellings.masses(prompt, labels))
    share: np.ndarray[Any, Any] = masses / masses.sum()
    return share


def _probabilities(answer: dict[str, Any]) -> list[float]:
    if answer["type"] == "predicate":
        return [answer["probability"], 1 - answer["probability"]]
    return [option["probability"] for option in answer["probabilities"]]


@given(st.lists(BODIES, min_size=1, max_size=3), st.integers(0, 3))
@settings(max_examples=max(3, settings().max_examples // 10))
def test_each_option_has_the_sum_over_every_tokenization(
    scene: Scene, bodies: list[dict[str, Any]], num_chats: int
) -> None:
    """It holds for prefixes that are shared, prompts in chunks, and steps that also generate."""
    for body, reply in zip(bodies, ask(scene.served, bodies, num_chats), strict=True):
        check(scene, body, reply)


@pytest.mark.parametrize("count", [27, 255])
def test_codes_of_many_options_are_summed_too(scene: Scene, count: int) -> None:
    """Most of the two-letter codes are several tokens."""
    body = {"input": "It rains.", "questions": [question("choice", count)]}
    check(scene, body, *ask(scene.served, [body]))


@given(st.integers(0, 2**32), st.sampled_from([2, 12, 40]), st.sampled_from([0.0, -2_000.0]))
def test_beginnings_that_are_not_followed_have_a_negligible_share(
    seed: int, count: int, offset: float
) -> None:
    """All label paths that end in them have at most 1e-7 of the probability of the others."""
    tokens, rng = LabelTokens(text_model()), random.Random(seed)
    labels = tokens.letters(count)
    tree = tokens.tree(labels)
    read = Read(0, tuple(range(count)), labels, tuple(range(count)), tree)
    logprobs: dict[Path, float] = {(): 0.0}
    for path, following in sorted(tree.next_tokens.items(), key=lambda item: len(item[0])):
        weights = [-rng.choice((1, 10, 40)) * rng.random() for _ in following]
        total = math.log(sum(map(math.exp, weights)))
        for token, weight in zip(following, weights, strict=True):
            logprobs[*path, token] = logprobs[path] + weight - total + (0 if path else offset)
    known: dict[Path, float] = {(): 0.0}
    paths: list[Path] = [()]
    while paths:
        for path in paths:
            for token in tree.next_tokens[path]:
                known[*path, token] = logprobs[*path, token]
        paths = _likely_beginnings(read, known)
    shares = {path: math.exp(logprobs[path] - offset) for path in tree.label_of}
    left_out = sum(share for path, share in shares.items() if path not in known)
    assert left_out <= 1e-7 * sum(share for path, share in shares.items() if path in known)


def test_a_prompt_leaves_room_for_all_tokens_of_a_label() -> None:
    """Otherwise options that need more than one token would have no probability, without a word."""
    model = text_model()
    body = {"input": "a", "questions": [question("choice", 30)]}

    def prepare(max_model_len: int) -> Sequence[SequenceRequest]:
        reader = NextTokenReader(replace(model, max_model_len=max_model_len), select_parsers(None))
        return reader.prepare(
            DecisionRequest.model_validate(body), "input", METADATA, body
        ).requests

    [request] = prepare(10_000)
    # A label is two letters.
    assert prepare(len(request.prompt_ids) + 2)
    with pytest.raises(RequestError, match="leaves no room"):
        prepare(len(request.prompt_ids) + 1)


def test_rows_that_are_preempted_have_the_same_sums(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Chats that grow take the pages of reads that are half computed."""
    folder, tokenizer = tmp_path_factory.mktemp("model"), byte_level()
    network = save_model(folder, "LlamaConfig", tokenizer)
    bodies = [
        {"input": f"Row {number}. " * 24, "questions": [question("predicate", 2)]}
        for number in range(4)
    ]
    with serving() as load:
        served = load(
            folder,
            max_num_batched_tokens=TOKENS_A_STEP,
            max_model_len=512,
            kv_cache_memory=36 * PAGE_BYTES,
            max_num_seqs=8,
        )
        replies = ask(served, bodies, num_chats=6, chat_tokens=150)
        assert served.stats().preemptions > 0
        for body, reply in zip(bodies, replies, strict=True):
            check(Scene(served, Spellings(network, tokenizer), TOLERANCE), body, reply)
