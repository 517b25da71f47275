"""Text completions from body to body, with a generator that follows a script."""

from __future__ import annotations

import re
from typing import Any

import pytest
from openai.types import Completion

from tests.engine.scripted_model import (
    CREATED,
    MAX_MODEL_LEN,
    TURN_END,
    Scene,
    sentencepiece_tokenizer,
    text_model_of,
)

PROMPT = "The capital"


def test_the_answer_is_openais_text_completion() -> None:
    """It validates as the SDK's type; ids and times come from the line and the job."""
    body = Scene().complete(PROMPT, model="tiny", logprobs=2)
    answer = Completion.model_validate(body)
    assert answer.id == "cmpl-0123"
    assert (answer.created, answer.model) == (CREATED, "tiny")
    assert answer.choices[0].text == " Paris."
    assert answer.choices[0].finish_reason == "stop"


def test_the_four_forms_of_a_prompt_run_the_same_tokens() -> None:
    """A text and its tokens are the same prompt."""
    scene = Scene()
    ids = scene.tokenizer.encode(PROMPT, add_special_tokens=True)
    for prompt in (PROMPT, [PROMPT], ids, [ids]):
        body = scene.complete(prompt)
        assert scene.last().prompt_ids == ids
        assert [choice["text"] for choice in body["choices"]] == [" Paris."]


def test_choices_are_numbered_by_prompt_and_then_by_choice() -> None:
    """Two prompts with two choices each make four; each prompt is counted once."""
    scene = Scene()
    body = scene.complete([PROMPT, "the"], n=2, echo=True)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    texts = [choice["text"] for choice in body["choices"]]
    assert texts == [f"{PROMPT} Paris."] * 2 + ["the Paris."] * 2
    lengths = [len(request.prompt_ids) for request in scene.generator.requests]
    assert body["usage"]["prompt_tokens"] == lengths[0] + lengths[2]
    assert body["usage"]["completion_tokens"] == 4 * len(scene.generator.token_ids)


def test_a_seed_gives_each_prompt_of_a_list_what_it_gives_alone() -> None:
    """With a seed a list of prompts equals separate rows; without one all differ."""
    scene = Scene()
    scene.complete(PROMPT, seed=5)
    scene.complete([PROMPT, PROMPT], seed=5)
    scene.complete([PROMPT, PROMPT])
    alone, first, second, *unseeded = [r.sampling.seed for r in scene.generator.requests]
    assert alone == first == second
    assert len({alone, *unseeded}) == 3


def test_sixteen_tokens_are_generated_by_default() -> None:
    """It is OpenAI's default, or the rest of the context if that is less."""
    scene = Scene()
    scene.complete(PROMPT)
    assert scene.last().max_tokens == 16
    scene.complete([5] * (MAX_MODEL_LEN - 3))
    assert scene.last().max_tokens == 3


def test_echo_is_exact() -> None:
    """The prompt's own characters precede the completion, with or without tokens."""
    scene = Scene()
    prompt = "The  capital é\n"
    assert scene.complete(prompt, echo=True)["choices"][0]["text"] == f"{prompt} Paris."
    assert scene.last().prompt_logprobs is None
    ids = scene.tokenizer.encode(prompt, add_special_tokens=False)
    assert scene.complete(ids, echo=True)["choices"][0]["text"] == f"{prompt} Paris."


def test_log_probabilities_point_into_the_text() -> None:
    """Every token's text is in the choice's text at its offset."""
    scene = Scene()
    choice = scene.complete(PROMPT, logprobs=1)["choices"][0]
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == len(scene.generator.token_ids)
    assert logprobs["tokens"][-1] == TURN_END
    for token, offset in zip(logprobs["tokens"][:-1], logprobs["text_offset"], strict=False):
        assert choice["text"].startswith(token, offset)
    expected = [-i / 100 for i in scene.generator.token_ids]
    assert logprobs["token_logprobs"] == pytest.approx(expected)


def test_top_logprobs_include_the_sampled_token() -> None:
    """There may be one more than requested; with 0 there is only the token itself."""
    scene = Scene()
    two = scene.complete(PROMPT, logprobs=2)["choices"][0]["logprobs"]
    first = two["tokens"][0]
    assert list(two["top_logprobs"][0]) == [first, "<|endoftext|>", "<|im_start|>"]
    none = scene.complete(PROMPT, logprobs=0)["choices"][0]["logprobs"]
    assert list(none["top_logprobs"][0]) == [first]
    assert scene.complete(PROMPT)["choices"][0]["logprobs"] is None


def test_echo_with_log_probabilities_scores_the_prompt() -> None:
    """Nothing predicts the first token; the others have their values, then the completion's."""
    scene = Scene()
    choice = scene.complete(PROMPT, echo=True, logprobs=1)["choices"][0]
    prompt_ids = scene.last().prompt_ids
    ids = [*prompt_ids, *scene.generator.token_ids]
    logprobs = choice["logprobs"]
    assert scene.last().prompt_logprobs == 1
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:] == pytest.approx([-i / 100 for i in ids[1:]])
    assert logprobs["top_logprobs"][0] is None
    assert "".join(logprobs["tokens"]) == f"{PROMPT} Paris.{TURN_END}"
    for token, offset in zip(logprobs["tokens"][:-1], logprobs["text_offset"], strict=False):
        assert choice["text"].startswith(token, offset)


def test_a_space_that_a_tokenizer_adds_is_not_echoed() -> None:
    """Llama 2's tokenizer begins every text with one; the prompt is returned as sent."""
    scene = Scene(" a", model=text_model_of(sentencepiece_tokenizer()))
    choice = scene.complete("ab a", echo=True, logprobs=0)["choices"][0]
    assert choice["text"].startswith("ab a")
    assert choice["logprobs"]["tokens"][:3] == ["<s>", " ab", " a"]
    assert choice["logprobs"]["text_offset"][:4] == [0, 0, 2, 4]


def test_a_prompt_gets_its_opening_special_tokens() -> None:
    """It follows vLLM; `add_special_tokens: false` omits them."""
    scene = Scene("a", model=text_model_of(sentencepiece_tokenizer()))
    scene.complete("ab")
    with_start = scene.last().prompt_ids
    scene.complete("ab", add_special_tokens=False)
    assert with_start == [1, *scene.last().prompt_ids]


def test_a_prompt_is_scored_without_a_new_token() -> None:
    """`max_tokens: 0` with `echo` and `logprobs` returns only the prompt's own values."""
    scene = Scene()
    body = scene.complete(PROMPT, echo=True, logprobs=0, max_tokens=0)
    choice = body["choices"][0]
    assert choice["text"] == PROMPT
    assert choice["finish_reason"] == "length"
    assert "".join(choice["logprobs"]["tokens"]) == PROMPT
    assert body["usage"]["completion_tokens"] == 0
    scene.complete([5] * MAX_MODEL_LEN, echo=True, logprobs=0, max_tokens=0)
    assert scene.last().max_tokens == 0


def test_prompt_log_probabilities_go_with_each_choice() -> None:
    """They have vLLM's format, with the requested number of alternatives."""
    scene = Scene()
    body = scene.complete(PROMPT, prompt_logprobs=1, echo=True, logprobs=3, return_token_ids=True)
    choice = body["choices"][0]
    assert scene.last().prompt_logprobs == 3
    assert choice["prompt_logprobs"][0] is None
    assert len(choice["prompt_logprobs"][1]) == 2
    assert len(choice["logprobs"]["top_logprobs"][1]) == 4
    assert choice["prompt_token_ids"] == scene.last().prompt_ids
    assert choice["token_ids"] == scene.generator.token_ids


def test_the_choices_of_a_prompt_share_one_scoring() -> None:
    """Each shows the scores; only the first one requests them."""
    scene = Scene()
    body = scene.complete([PROMPT, "the"], n=3, prompt_logprobs=1)
    requested = [request.prompt_logprobs for request in scene.generator.requests]
    assert requested == [1, None, None] * 2
    shown = [choice["prompt_logprobs"] for choice in body["choices"]]
    assert shown[0] == shown[1] == shown[2] != shown[3]
    assert shown[3] == shown[4] == shown[5]


def test_a_token_inside_a_character_is_written_as_bytes() -> None:
    """Both halves of a character have the character's offset; their keys do not collide."""
    scene = Scene("aé!")
    logprobs = scene.complete(PROMPT, logprobs=0)["choices"][0]["logprobs"]
    assert logprobs["tokens"][:4] == ["a", "bytes:\\xc3", "bytes:\\xa9", "!"]
    assert logprobs["text_offset"][:4] == [0, 1, 1, 2]


@pytest.mark.parametrize("endpoint", ["chats", "completions"])
def test_a_text_that_is_too_long_by_its_bytes_is_not_tokenized(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokenizing takes 160 times its memory; the error is based on the bytes."""
    scene = Scene()
    monkeypatch.setattr(scene.tokenizer, "encode", None)
    text = "the " * 10_000
    body = {"prompt": text, "messages": [{"role": "user", "content": text}]}
    error = scene.fault(getattr(scene, endpoint), body)
    assert error.code == "context_length_exceeded"
    assert re.search(r"the prompt has at least \d+ tokens\.", error.message)


def test_the_first_too_long_prompt_of_many_ends_the_work() -> None:
    """Later prompts are never tokenized, and use no memory."""
    scene = Scene()
    tokenized: list[str] = []
    encode = scene.tokenizer.encode

    def noted(text: str, *, add_special_tokens: bool) -> list[int]:
        tokenized.append(text)
        return encode(text, add_special_tokens=add_special_tokens)

    scene.tokenizer.encode = noted  # type: ignore[method-assign]
    long = "z" * (MAX_MODEL_LEN + 1)
    error = scene.completion_fault(prompt=["a", long, "b"])
    assert (error.code, error.param) == ("context_length_exceeded", "prompt")
    assert tokenized == ["a", long]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": [300]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [[5], [10**30]]}, "prompt"),
        ({"prompt": [5] * MAX_MODEL_LEN}, "prompt"),
        ({"prompt": [5] * (MAX_MODEL_LEN + 1), "max_tokens": 0, "echo": True}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**9}, "max_tokens"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2}, "best_of"),
    ],
)
def test_unsupported_parameters_are_rejected_by_name(fields: dict[str, Any], param: str) -> None:
    """Nothing of such a request reaches the generator."""
    scene = Scene()
    assert scene.completion_fault(**fields).param == param
    assert scene.generator.requests == []
