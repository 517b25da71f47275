"""Sampling parameters of SGLang's documentation, one after another."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai.types.chat.chat_completion import Choice

from tidemill import demo

LOOPING = {"ignore_eos": True}


def ask(client: openai.OpenAI, text: str = "What is 7 plus 5?", **fields: Any) -> list[Choice]:
    """Return the choices of a chat; parameters that OpenAI does not have are sent as they are."""
    answer = client.chat.completions.create(
        model=demo.NAME,
        messages=[{"role": "user", "content": text}],
        extra_body={"max_tokens": 16, "return_token_ids": True, **fields},
    )
    return answer.choices


def tokens(choice: Choice) -> list[int]:
    """Return the tokens of a choice."""
    ids: list[int] = choice.model_dump()["token_ids"]
    return ids


def text_of(choice: Choice) -> str:
    """Return the text of a choice."""
    return choice.message.content or ""


@pytest.mark.parametrize(
    "fields",
    [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1}, {"temperature": 0}],
    ids=["top_k", "top_p", "min_p", "temperature"],
)
def test_parameters_that_leave_one_token_are_greedy(
    client: openai.OpenAI, fields: dict[str, Any]
) -> None:
    """At any temperature the likeliest token is chosen."""
    [greedy] = ask(client, temperature=0)
    [held] = ask(client, **{"temperature": 5, "seed": 3, **fields})
    assert tokens(held) == tokens(greedy)


def test_a_seed_repeats_a_sample_and_another_seed_changes_it(client: openai.OpenAI) -> None:
    """The choices of one request differ, and the first one is the seed's own."""
    hot = {"temperature": 3, **LOOPING}
    first, second = (tokens(ask(client, seed=seed, **hot)[0]) for seed in (1, 2))
    assert first != second
    several = ask(client, seed=1, n=3, **hot)
    assert tokens(several[0]) == first
    assert len({tuple(tokens(choice)) for choice in several}) == 3


@pytest.mark.parametrize(
    "fields",
    [{"frequency_penalty": 2}, {"presence_penalty": 2}, {"repetition_penalty": 3}],
    ids=["frequency", "presence", "repetition"],
)
def test_penalties_make_repeats_rarer(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    """Sixty tokens are forced."""
    long = {"temperature": 0, "max_tokens": 60, **LOOPING}
    [free], [held] = ask(client, **long), ask(client, **long, **fields)
    assert len(set(tokens(held))) > len(set(tokens(free)))


def test_length_limits_are_observed(client: openai.OpenAI) -> None:
    """They are a maximum, a minimum, and `ignore_eos`."""
    assert [len(tokens(one)) for one in ask(client, max_tokens=1)] == [1]
    [least] = ask(client, temperature=0, min_tokens=10)
    assert len(tokens(least)) >= 10
    [past] = ask(client, temperature=0, max_tokens=12, **LOOPING)
    assert (len(tokens(past)), past.finish_reason) == (12, "length")


def test_stops_end_a_text_and_are_left_out_of_it(client: openai.OpenAI) -> None:
    """They are strings, lists, tokens and patterns; `no_stop_trim` keeps them."""
    [free] = ask(client, temperature=0)
    whole = text_of(free)
    assert len(whole) > 1
    [held] = ask(client, temperature=0, stop=["###", whole[-1]])
    assert (text_of(held), held.finish_reason) == (whole[:-1], "stop")
    [kept] = ask(client, temperature=0, stop=whole[-1], no_stop_trim=True)
    assert text_of(kept) == whole
    [by_token] = ask(client, temperature=0, stop_token_ids=tokens(free)[:1])
    assert len(tokens(by_token)) == 1
    [by_pattern] = ask(client, temperature=0, stop_regex=r"\d")
    assert text_of(by_pattern)[-1].isdigit()


def test_a_bias_bans_or_forces_a_token(client: openai.OpenAI) -> None:
    """The token is given by its ID, as a decimal text."""
    [free] = ask(client, temperature=0)
    first = tokens(free)[0]
    [barred] = ask(client, temperature=0, logit_bias={str(first): -100})
    assert first not in tokens(barred)
    [brought] = ask(client, temperature=0, max_tokens=3, logit_bias={"5": 100})
    assert tokens(brought) == [5, 5, 5]


def test_special_tokens_are_shown_on_request(client: openai.OpenAI) -> None:
    """`skip_special_tokens` false shows the token that ends a turn."""
    fields = {"temperature": 0, "include_stop_str_in_output": True}
    assert "<|im_end|>" not in text_of(ask(client, **fields)[0])
    assert "<|im_end|>" in text_of(ask(client, **fields, skip_special_tokens=False)[0])


def test_a_conversation_of_several_turns_is_rendered(client: openai.OpenAI) -> None:
    """It has system, user and assistant messages, and template variables that may be unknown."""
    answer = client.chat.completions.create(
        model=demo.NAME,
        messages=[
            {"role": "system", "content": "You answer in one word."},
            {"role": "user", "content": "What is the capital of Norway?"},
            {"role": "assistant", "content": "Oslo"},
            {"role": "user", "content": "What is the capital of France?"},
        ],
        temperature=0,
        max_tokens=16,
        top_p=0.9,
        extra_body={"chat_template_kwargs": {"enable_thinking": False}, "separate_reasoning": True},
    )
    assert "Paris" in (answer.choices[0].message.content or "")
