"""Sequences of requests: seeds, and the parameters of every sequence."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from tests.engine.scripted_model import (
    MAX_MODEL_LEN,
    METADATA,
    TURN,
    TURN_END,
    Scene,
    sentencepiece_tokenizer,
    text_model,
    text_model_of,
)
from tidemill.engine.endpoints.generation_requests import seed_of_choice
from tidemill.engine.endpoints.request_bounds import MAX_VALUES
from tidemill.engine.scheduling.repetition import Repetition
from tidemill.engine.structured_output.constraint import GrammarConstraint
from tidemill.engine.structured_output.token_constraints import AllOf, AllowedTokens, BadWords

LONG = Scene(model=replace(text_model(), max_model_len=2**20))


def seed(request_seed: int | None = None, **changes: object) -> int:
    """Return the seed of the first choice of a request with changes."""
    parameters = {"engine_seed": 0, "request_id": "req_1", "prompt": 0, "choice": 0} | changes
    return seed_of_choice(request_seed, **parameters)  # type: ignore[arg-type]


def test_a_requests_seed_and_the_number_of_the_choice_alone_decide() -> None:
    """The row, the engine's seed and the place in a list of prompts do not matter."""
    assert seed(5) == seed(5, engine_seed=1, request_id="req_2", prompt=3)
    assert seed(5) != seed(6)
    assert seed(5) != seed(5, choice=1)


def test_without_a_seed_each_choice_draws_its_own() -> None:
    """The same row of the same job draws the same tokens again; everything else differs."""
    changes: list[dict[str, object]] = [
        {},
        {"engine_seed": 1},
        {"request_id": "req_2"},
        {"prompt": 1},
        {"choice": 1},
    ]
    assert len({seed(**change) for change in changes}) == len(changes)
    assert seed() == seed()


def test_a_seed_fits_a_signed_integer_of_64_bits() -> None:
    """It holds for every client's seed, including negative ones."""
    for request_seed in (-(2**63), -1, 0, 2**63 - 1, None):
        assert 0 <= seed(request_seed) < 2**63


def test_a_salt_reaches_every_sequence_of_its_request() -> None:
    """It holds for both endpoints; without a salt, and with null, all share pages."""
    scene = Scene()
    scene.chat(cache_salt="one", n=2)
    scene.complete(["a", "b"], cache_salt="two")
    scene.chat(cache_salt=None)
    scene.complete()
    salts = [request.cache_salt for request in scene.generator.requests]
    assert salts == ["one", "one", "two", "two", "", ""]


def test_a_prompt_is_truncated_at_its_beginning_by_default() -> None:
    """Texts and token ids are truncated alike; a shorter prompt does not change."""
    scene = Scene()
    whole = scene.tokenizer.encode("The capital of France", add_special_tokens=True)
    for prompt in ("The capital of France", whole):
        scene.complete(prompt, truncate_prompt_tokens=3)
        assert scene.last().prompt_ids == whole[-3:]
        scene.complete(prompt, truncate_prompt_tokens=3, truncation_side="right")
        assert scene.last().prompt_ids == whole[:3]
        scene.complete(prompt, truncate_prompt_tokens=60)
        assert scene.last().prompt_ids == whole
    scene.chat("Hi " * 30, truncate_prompt_tokens=7)
    text = scene.tokenizer.text(scene.last().prompt_ids, skip_special_tokens=False)
    assert len(scene.last().prompt_ids) == 7
    assert text.endswith(f"{TURN_END}\n{TURN}assistant\n")


def test_the_engines_truncation_is_the_default_of_requests() -> None:
    """It holds for chats and completions; a request's own value takes precedence."""
    scene = Scene(model=replace(text_model(), truncate_prompt_tokens=3))
    for send in (scene.complete, scene.chat):
        send("The capital of France")
        assert len(scene.last().prompt_ids) == 3
        send("The capital of France", truncate_prompt_tokens=4)
        assert len(scene.last().prompt_ids) == 4
    text = scene.complete("The capital of France", echo=True)["choices"][0]["text"]
    assert not text.startswith("The capital")


def test_special_tokens_around_a_text_are_not_cut_off() -> None:
    """The model's opening token stays in front."""
    scene = Scene(model=text_model_of(sentencepiece_tokenizer()))
    scene.complete("ab b a", truncate_prompt_tokens=3)
    begin, *rest = scene.last().prompt_ids
    assert begin == 1
    assert rest == scene.tokenizer.encode("ab b a", add_special_tokens=False)[-2:]


def test_a_prompt_is_truncated_to_the_context() -> None:
    """-1 leaves room for the completion, regardless of the text's length."""
    scene = Scene()
    scene.complete("the capital " * 10_000, truncate_prompt_tokens=-1, max_tokens=10)
    assert len(scene.last().prompt_ids) == MAX_MODEL_LEN - 10
    scene.chat("the capital " * 1_000, truncate_prompt_tokens=-1)
    assert (len(scene.last().prompt_ids), scene.last().max_tokens) == (MAX_MODEL_LEN - 1, 1)


def test_an_echo_shows_the_truncated_prompt() -> None:
    """Its text is that of the remaining tokens."""
    choice = Scene().complete("The capital of France", truncate_prompt_tokens=3, echo=True)
    text = choice["choices"][0]["text"]
    assert text.endswith(" Paris.")
    assert "The capital of France".endswith(text.removesuffix(" Paris."))
    assert not text.startswith("The capital")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": MAX_MODEL_LEN + 1}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": MAX_MODEL_LEN}, "prompt"),
        ({"truncation_side": "middle"}, "truncation_side"),
        ({"repetition_detection": {"max_pattern_size": 3}}, "repetition_detection"),
        (
            {"repetition_detection": {"max_pattern_size": 1, "min_pattern_size": 2}},
            "repetition_detection",
        ),
        ({"repetition_detection": {"size": 3}}, "repetition_detection.size"),
        ({"repetition_detection": 3}, "repetition_detection"),
    ],
)
def test_invalid_truncation_and_repetition_are_named(fields: dict[str, Any], param: str) -> None:
    """The error names the parameter."""
    assert Scene().completion_fault(**{"prompt": "the capital " * 99, **fields}).param == param


def test_a_huge_number_of_copies_never_ends_a_sequence() -> None:
    """The number exceeds every context."""
    scene = Scene()
    scene.complete(repetition_detection={"max_pattern_size": 1_000, "min_count": 10**30})
    repetition = scene.last().repetition
    assert repetition is not None
    watch = repetition.watch()
    assert not any(watch.push(1) for _ in range(100))


def test_repetition_parameters_reach_the_sequence() -> None:
    """They are the request's values; no object, or a pattern of 0 tokens, detects nothing."""
    scene = Scene()
    detection = {"max_pattern_size": 4, "min_count": 3}
    scene.chat(repetition_detection=detection)
    assert scene.last().repetition == Repetition(1, 4, 3)
    scene.complete(repetition_detection={**detection, "min_pattern_size": 2})
    assert scene.last().repetition == Repetition(2, 4, 3)
    for nothing in (None, {}, {"max_pattern_size": 0, "min_count": 3}):
        scene.chat(repetition_detection=nothing)
        assert scene.last().repetition is None


def test_tokens_are_shown_as_ids_on_request() -> None:
    """Both endpoints use vLLM's format; the bytes are the token's own."""
    scene = Scene()
    first = scene.generator.token_ids[0]
    chat = scene.chat(logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True)
    shown = chat["choices"][0]["logprobs"]["content"][0]
    assert shown["token"] == f"token_id:{first}"
    assert bytes(shown["bytes"]) == scene.tokenizer.piece(first)
    assert shown["top_logprobs"][0]["token"] == "token_id:0"
    text = scene.complete(logprobs=1, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]
    assert text["tokens"][0] == f"token_id:{first}"
    assert set(text["top_logprobs"][0]) == {f"token_id:{first}", "token_id:0"}


def test_alternatives_are_bounded_by_the_engine() -> None:
    """20 by default; -1 is the whole vocabulary, for a request and for the engine."""
    scene, size = Scene(), text_model().vocab_size
    assert scene.chat_fault(logprobs=True, top_logprobs=21).param == "top_logprobs"
    assert "the maximum is 20 (--max-logprobs)" in scene.completion_fault(logprobs=-1).message
    assert scene.completion_fault(prompt_logprobs=21).param == "prompt_logprobs"
    free = Scene(model=replace(text_model(), max_logprobs=-1))
    free.complete(logprobs=-1, prompt_logprobs=2 * size)
    sequence = free.last()
    assert (sequence.sampling.logprobs, sequence.prompt_logprobs) == (size, size)
    choice = free.complete(echo=True, logprobs=-1, max_tokens=0)["choices"][0]
    assert len(choice["logprobs"]["top_logprobs"][1]) == size


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 128, "logprobs": 20, "max_tokens": 1_500}, "logprobs"),
        ({"n": 2, "logprobs": 0, "max_tokens": MAX_VALUES // 2 + 1}, "logprobs"),
        ({"logprobs": 0, "logprob_token_ids": [1] * 7 + [2], "max_tokens": 2**17}, "logprobs"),
        ({"prompt": [[1]] * 100, "n": 64, "max_tokens": 30, "logprobs": 5}, "logprobs"),
        ({"prompt": [[1] * 2**17] * 8, "n": 128}, "prompt"),
        ({"prompt": [[1] * 600] * 100, "n": 20, "echo": True}, "n"),
        ({"prompt": [[1] * 600] * 100, "n": 20, "return_token_ids": True}, "n"),
        ({"prompt": [[1] * 600] * 100, "n": 3, "prompt_logprobs": 5}, "n"),
    ],
)
def test_an_answer_of_too_many_values_is_refused(fields: dict[str, Any], param: str) -> None:
    """Log-probabilities, repeated prompts and their choices count, for any body size."""
    error = LONG.completion_fault(**fields)
    assert (error.code, error.param) == ("invalid_request", param)
    assert re.search(r"the maximum is (1,048,576 log-prob|16,777,216\.)", error.message)


def test_an_answer_without_a_maximum_has_as_many_tokens_as_may_be_shown() -> None:
    """A chat may be as long as the context only where that many log-probabilities are served."""
    body = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 19}
    prepared = LONG.chats.prepare(body | {"n": 8}, METADATA)
    assert {request.max_tokens for request in prepared.requests} == {MAX_VALUES // (8 * 20)}
    for n, prompt_logprobs, max_tokens in ((128, 1, 400), (1, 20, 50_000)):
        fields = {"n": n, "prompt_logprobs": prompt_logprobs, "max_tokens": max_tokens}
        assert LONG.chats.prepare(body | fields, METADATA).requests[0].max_tokens == max_tokens
    free = Scene(model=replace(LONG.model, max_logprobs=-1))
    error = free.chat_fault(n=128, logprobs=True, top_logprobs=-1)
    assert (error.param, "has no `max_tokens`" in error.message) == ("top_logprobs", True)


def test_a_prompt_is_scored_from_the_requested_token() -> None:
    """Earlier tokens are null at both endpoints; -1 scores nothing."""
    scene = Scene()
    body = scene.complete("a b c d", echo=True, logprobs=0, prompt_logprobs=1, logprob_start_len=3)
    choice = body["choices"][0]
    num_tokens = len(scene.last().prompt_ids)
    assert choice["logprobs"]["token_logprobs"][:4].count(None) == 3
    assert [entry is None for entry in choice["prompt_logprobs"][:4]] == [True] * 3 + [False]
    none = scene.complete("a b c d", prompt_logprobs=1, logprob_start_len=-1)["choices"][0]
    assert none["prompt_logprobs"] == [None] * num_tokens


def test_named_tokens_replace_the_most_likely_ones() -> None:
    """It holds for both endpoints and any number of alternatives; each is included once."""
    scene = Scene()
    fields = {"logprob_token_ids": [9, 5, 9], "return_tokens_as_token_ids": True}
    chat = scene.chat(logprobs=True, top_logprobs=3, **fields)["choices"][0]
    top = chat["logprobs"]["content"][0]["top_logprobs"]
    assert [one["token"] for one in top] == ["token_id:5", "token_id:9"]
    assert [one["logprob"] for one in top] == pytest.approx([-0.05, -0.09])
    text = scene.complete(logprobs=3, **fields)["choices"][0]["logprobs"]
    came = scene.generator.token_ids[0]
    assert set(text["top_logprobs"][0]) == {f"token_id:{i}" for i in (came, 5, 9)}


@pytest.mark.parametrize("ids", [[10**6], [-1], list(range(129)), [5]])
def test_tokens_that_cannot_be_scored_are_refused(ids: list[int]) -> None:
    """They are unknown to the model, too many, or named without requesting scores."""
    asks = ids != [5]
    scene = Scene()
    chat_fault = scene.chat_fault(logprobs=asks, logprob_token_ids=ids)
    fault = scene.completion_fault(logprobs=0 if asks else None, logprob_token_ids=ids)
    assert (chat_fault.param or "").startswith("logprob_token_ids")
    assert (fault.param or "").startswith("logprob_token_ids")


def test_named_tokens_and_words_constrain_an_output() -> None:
    """Each is a constraint, and both together are one; without them there is none."""
    scene = Scene()
    [paris] = [scene.tokenizer.encode(" Paris", add_special_tokens=False)]
    bare = scene.tokenizer.encode("Paris", add_special_tokens=False)
    scene.chat(allowed_token_ids=[5, 9, 5])
    assert scene.last().constraint == AllowedTokens(frozenset({5, 9}))
    scene.complete(bad_words=["Paris"])
    words = BadWords(frozenset({tuple(bare), *([tuple(paris)] if len(paris) == len(bare) else [])}))
    assert scene.last().constraint == words
    scene.chat(allowed_token_ids=[5, 9], bad_words=["Paris"], n=2)
    assert scene.last().constraint == AllOf((AllowedTokens(frozenset({5, 9})), words))
    for nothing in (None, []):
        scene.chat(allowed_token_ids=nothing, bad_words=nothing)
        assert scene.last().constraint is None


def test_a_grammar_precedes_token_constraints() -> None:
    """If both leave no token, the answer still follows its grammar."""
    scene = Scene()
    scene.chat(regex="[ab]+", bad_words=["a"])
    held = scene.last().constraint
    assert isinstance(held, AllOf)
    assert isinstance(held.constraints[0], GrammarConstraint)
    assert isinstance(held.constraints[1], BadWords)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids.0"),
        ({"allowed_token_ids": "a"}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words.0"),
        ({"bad_words": ["  "]}, "bad_words"),
        ({"bad_words": ["a"] * 1_001}, "bad_words"),
    ],
)
def test_invalid_token_constraints_are_named(fields: dict[str, Any], param: str) -> None:
    """The tokens or words do not exist."""
    assert Scene().chat_fault(**fields).param == param
