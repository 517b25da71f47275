"""Whisper's rules mask the same tokens as transformers' logits processors, for every text."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tidemill.engine.loop.whisper_rules import Chosen, DecodingState, WhisperRules, WrittenTokens
from tidemill.engine.model.speech.architecture import WhisperTokens
from tidemill.engine.scheduling.sequence import Sampling

END, NO_TIMES, VOCABULARY = 40, 48, 90
ZERO = NO_TIMES + 1
STEERING = WhisperTokens(
    start=41,
    end=END,
    no_timestamps=NO_TIMES,
    prompt_start=45,
    suppressed=(1, 2, 44),
    suppressed_at_begin=(3, END),
    max_initial_timestamp=5,
)
# Outputs: nothing, a start, text, a single timestamp, a pair, text after a pair.
WRITTEN = (
    [],
    [ZERO],
    [ZERO + 2, 7],
    [ZERO + 2, 7, ZERO + 9],
    [ZERO + 2, 7, ZERO + 9, ZERO + 9],
    [ZERO + 2, 7, ZERO + 9, ZERO + 9, 8],
    [7, 8],
    [ZERO, ZERO + 40],
)


def place(
    written: list[int],
    *,
    has_times: bool,
    temperature: float = 0.0,
    number: int = 0,
    **parameters: Any,
) -> DecodingState:
    """Return the decoding state of a text."""
    sampling = Sampling(temperature=temperature, seed=5, **parameters)
    return DecodingState(0, len(written), has_times, sampling, number, written)


def choose(rules: WhisperRules, logits: torch.Tensor, places: list[DecodingState]) -> Chosen:
    """Return the next tokens of texts, each in its own slot, whose tokens were added one by one."""
    last_ids = torch.full((len(places),), ZERO + 7, dtype=torch.int32)  # of earlier texts
    texts = WrittenTokens(last_ids, STEERING.first_timestamp)
    for slot, state in enumerate(places):
        for number, token in enumerate(state.written):
            texts.add(torch.tensor([slot]), torch.tensor([number == 0]), torch.tensor([token]))
    before = last_ids.tolist()
    chosen = rules.choose(
        logits, [state._replace(slot=slot) for slot, state in enumerate(places)], texts
    )
    assert [state.written[-1] for state in places if state.written] == [
        token for token, state in zip(before, places, strict=True) if state.written
    ]
    assert last_ids.tolist() == chosen.token_ids.tolist()
    return chosen


def allowed_by_transformers(logits: torch.Tensor, written: list[int]) -> torch.Tensor:
    """Return logits `[1, V]` after transformers' processors, in its order."""
    from transformers import (
        SuppressTokensAtBeginLogitsProcessor,
        SuppressTokensLogitsProcessor,
        WhisperTimeStampLogitsProcessor,
    )

    ids = torch.tensor([[STEERING.start, *written]])
    config = SimpleNamespace(
        no_timestamps_token_id=NO_TIMES, eos_token_id=END, max_initial_timestamp_index=5
    )
    scores = SuppressTokensAtBeginLogitsProcessor(STEERING.suppressed_at_begin, 1)(ids, logits)
    scores = SuppressTokensLogitsProcessor(STEERING.suppressed)(ids, scores)
    left: torch.Tensor = WhisperTimeStampLogitsProcessor(config, begin_index=1)(ids, scores)
    return left


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_most_likely_token_equals_that_of_transformers(dtype: torch.dtype) -> None:
    """So does its log-probability, for timestamps as likely as text and far less likely."""
    rules = WhisperRules(STEERING, torch.device("cpu"))
    chosen_times = 0
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        logits = 3 * torch.randn(len(WRITTEN), VOCABULARY, generator=generator)
        logits[:, ZERO:] -= 3.0 * (seed % 3)
        logits = logits.to(dtype)
        places = [place(written, has_times=True) for written in WRITTEN]
        got = choose(rules, logits, places)
        left = torch.cat(
            [
                allowed_by_transformers(row[None].float(), written)
                for row, written in zip(logits, WRITTEN, strict=True)
            ]
        )
        best = left.log_softmax(dim=-1).max(dim=-1)
        np.testing.assert_array_equal(got.token_ids, best.indices)
        np.testing.assert_allclose(got.logprobs, best.values, atol=1e-5)
        assert not got.is_broken.any()
        chosen_times += int((got.token_ids >= ZERO).sum())
    assert 0 < chosen_times < 20 * len(WRITTEN)


def test_without_times_only_suppressed_tokens_are_masked() -> None:
    """More tokens are suppressed at the beginning than later."""
    rules = WhisperRules(STEERING, torch.device("cpu"))
    logits = torch.zeros(2, VOCABULARY)
    logits[:, 1], logits[:, 3], logits[:, 9] = 5, 4, 3
    got = choose(rules, logits, [place([], has_times=False), place([9], has_times=False)])
    assert got.token_ids.tolist() == [9, 3]


def test_draws_follow_the_rules() -> None:
    """A seed and a number determine a token; no suppressed token is ever drawn."""
    rules = WhisperRules(STEERING, torch.device("cpu"))
    logits = torch.zeros(200, VOCABULARY)
    places = [place([7], has_times=False, temperature=1.0, number=number) for number in range(200)]
    got = choose(rules, logits, places).token_ids
    assert (choose(rules, logits, places).token_ids == got).all()
    assert len(set(got.tolist())) > 50
    assert not set(got.tolist()) & set(STEERING.suppressed)


def test_penalties_are_over_the_text_of_the_window() -> None:
    """They exclude its timestamps, which come in pairs, and other rows' output."""
    rules = WhisperRules(STEERING, torch.device("cpu"))
    logits = torch.zeros(3, VOCABULARY)
    logits[:, 7], logits[:, 8], logits[:, 9] = 4.0, 3.0, 2.0
    penalties = ({"repetition_penalty": 3.0}, {"presence_penalty": 1.5}, {"frequency_penalty": 0.6})
    for penalty in penalties:
        places = [
            place([7, 7], has_times=False, **penalty),
            place([7, 8], has_times=False),
            place([], has_times=False, **penalty),
        ]
        assert choose(rules, logits, places).token_ids.tolist() == [8, 7, 7], penalty
    pair = torch.full((1, VOCABULARY), -9.0)
    pair[:, ZERO + 9], pair[:, ZERO + 10] = 5.0, 4.9
    ended = place([ZERO + 2, 7, ZERO + 9], has_times=True, repetition_penalty=5.0)
    assert choose(rules, pair, [ended]).token_ids.tolist() == [ZERO + 9]


@pytest.mark.parametrize("parameters", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_a_draw_from_one_token_is_the_most_likely(parameters: dict[str, Any]) -> None:
    """It holds for every limit; a limit above the vocabulary has no effect."""
    rules = WhisperRules(STEERING, torch.device("cpu"))
    logits = torch.randn(50, VOCABULARY, generator=torch.Generator().manual_seed(1))

    def chosen(**parameters: Any) -> list[int]:
        places = [place([7], has_times=False, number=n, **parameters) for n in range(len(logits))]
        return choose(rules, logits, places).token_ids.tolist()

    assert chosen(temperature=1.0, **parameters) == chosen() != chosen(temperature=1.0)
    assert chosen(temperature=1.0, top_k=10**30) == chosen(temperature=1.0)
