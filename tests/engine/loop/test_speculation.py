"""Speculative decoding: rows are the same with it and without, in fewer steps."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.engine.loop.generation_rig import (
    GREEDY,
    Ending,
    Guesser,
    Rig,
    check_scores,
    greedy,
    logits_of,
    only,
    request,
)
from tests.engine.loop.test_constraints import Places
from tidemill.engine.scheduling.sequence import Sampling, SequenceResult

PROMPT = [1, 2, 3, 4, 5]


def drafted(**sizes: Any) -> tuple[Rig, Guesser]:
    """Return a rig whose sequences are drafted, and the drafter."""
    guessers: list[Guesser] = []

    def make(table: Any) -> Guesser:
        guessers.append(Guesser(table))
        return guessers[0]

    rig = Rig(logits_of, make_drafter=make, steps_ahead=0, **sizes)
    return rig, guessers[0]


def test_greedy_rows_take_fewer_steps() -> None:
    """The drafts before the first wrong one are accepted, and so is the next token."""
    rig, guesser = drafted()
    answer = only(rig, request(PROMPT, 24))
    assert answer.token_ids == greedy(PROMPT, 24)
    assert guesser.num_accepted > 10
    assert guesser.num_wrong > 0
    assert rig.work.stats().steps < 16
    assert rig.work.stats().prefilled_tokens == len(PROMPT)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0, seed=5),
        Sampling(temperature=0.7, top_p=0.9, top_k=6, min_p=0.02, seed=6),
        Sampling(temperature=0, presence_penalty=1.5, frequency_penalty=0.5),
        Sampling(temperature=1.2, repetition_penalty=1.3, seed=7, logprobs=2),
        Sampling(temperature=0, logit_bias={4: 3.0}, logprobs=0, logprob_token_ids=(3, 1)),
    ],
)
def test_rows_are_those_without_drafts(sampling: Sampling) -> None:
    """Sampled, penalized, biased and scored tokens are the same as without drafts."""
    others = {"min_tokens": 9, "stop_token_ids": frozenset({2})}
    requests = [request([*PROMPT, first], 24, sampling, **others) for first in range(6)]
    rig, guesser = drafted(max_num_seqs=4)
    answers, alone = rig.run(*requests), Rig(logits_of, steps_ahead=0).run(*requests)
    for answer, expected in zip(answers, alone, strict=True):
        assert isinstance(answer, SequenceResult)
        assert isinstance(expected, SequenceResult)
        assert answer.token_ids == expected.token_ids
        assert answer.finish_reason == expected.finish_reason
        assert [one and one.token_id for one in answer.logprobs or ()] == [
            one and one.token_id for one in expected.logprobs or ()
        ]
    assert guesser.num_accepted
    assert rig.work.stats().output_tokens == sum(
        len(one.token_ids) for one in answers if isinstance(one, SequenceResult)
    )


def test_drafts_are_verified_under_their_constraints() -> None:
    """Each position has its own mask; drafts end where the grammar forbids or completes."""
    logits = [np.argsort(logits_of((*PROMPT, place)))[::-1].tolist() for place in range(12)]
    free = greedy(PROMPT, 12)
    ways = (
        Places(tuple((token, *tokens[:2]) for token, tokens in zip(free, logits, strict=True))),
        Places(tuple((token,) for token in free[:5])),
        Places(((), (), (free[2],), (), (1, 2), (3,), ())),
    )
    requests = [request(PROMPT, 24, constraint=places) for places in ways]
    rig, guesser = drafted()
    for result, one in zip(rig.run(*requests), requests, strict=True):
        alone = only(Rig(logits_of, steps_ahead=0), one)
        assert isinstance(result, SequenceResult)
        assert (result.token_ids, result.finish_reason) == (alone.token_ids, alone.finish_reason)
    assert guesser.num_accepted > 5


@pytest.mark.parametrize("after", range(1, 9))
def test_nothing_follows_a_stop(after: int) -> None:
    """At any position of a draft, no token, event or score follows."""
    rig, _ = drafted()
    sampling = replace(GREEDY, logprobs=1)
    streamed = request(PROMPT, 24, sampling, stop_text=Ending(after), is_streamed=True)
    sequence = rig.work.add(streamed)
    events = rig.finish()
    answer = sequence.result()
    assert answer.token_ids == greedy(PROMPT, after)
    assert [token for event in events for token in event.new_token_ids] == answer.token_ids
    assert answer.logprobs is not None
    check_scores(list(answer.logprobs), PROMPT + answer.token_ids, 1)
    assert [event.is_finished for event in events] == [False] * (len(events) - 1) + [True]


def test_drafts_take_no_page_that_is_needed() -> None:
    """With a nearly full pool nothing is drafted, and no sequence is preempted for a draft."""
    rig, guesser = drafted(num_pages=8, max_num_seqs=2)
    answers = rig.run(request(PROMPT, 10), request([7, *PROMPT], 10))
    assert [one.token_ids for one in answers if isinstance(one, SequenceResult)] == [
        greedy(PROMPT, 10),
        greedy([7, *PROMPT], 10),
    ]
    assert rig.work.stats().preemptions == 0
    assert guesser.num_accepted + guesser.num_wrong < 20


@pytest.mark.long
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.6, top_p=0.9),
        Sampling(temperature=1.5, top_k=5),
        Sampling(temperature=1.0, min_p=0.05, presence_penalty=1.0),
        Sampling(temperature=0.8, repetition_penalty=1.3, logit_bias={4: 1.0}),
    ],
)
def test_drafts_do_not_change_the_distribution(sampling: Sampling) -> None:
    """χ² compares 12,000 draws with drafts and 12,000 with other seeds without."""
    rig, guesser = drafted(max_num_seqs=128, num_pages=4096, budget=1024)
    ours = third_tokens(rig, sampling, 0)
    theirs = third_tokens(Rig(logits_of, steps_ahead=0, max_num_seqs=128), sampling, 1)
    tokens = [token for token in ours | theirs if ours[token] + theirs[token] >= 10]
    assert len(tokens) > 3
    chi2 = sum(
        (ours[token] - theirs[token]) ** 2 / (ours[token] + theirs[token]) for token in tokens
    )
    df = len(tokens) - 1
    deviation = ((chi2 / df) ** (1 / 3) - (1 - 2 / (9 * df))) / (2 / (9 * df)) ** 0.5
    assert deviation < 3.5, (chi2, df)  # as a normal variable's (Wilson and Hilferty)
    assert guesser.num_accepted > 1000
    assert guesser.num_wrong > 1000


def third_tokens(rig: Rig, sampling: Sampling, first_seed: int) -> Counter[int]:
    """Return the counts of the third token in 12,000 answers to one prompt."""
    requests = [
        request(PROMPT, 5, replace(sampling, seed=first_seed + 2 * number))
        for number in range(12_000)
    ]
    counts = Counter[int]()
    for start in range(0, len(requests), 2_000):
        for answer in rig.run(*requests[start : start + 2_000]):
            assert isinstance(answer, SequenceResult)
            counts[answer.token_ids[2]] += 1
    return counts
