"""Speculative decoding: rows are the same with it and without, in fewer steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

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
from tidemill.engine.scheduling.sequence import Sampling, SequenceResult

PROMPT = [1, 2, 3, 4, 5]


def drafted(**sizes: Any) -> tuple[Rig, Guesser]:
    """Return a rig whose sequences are drafted, and the drafter."""
    made: list[Guesser] = []

    def make(table: Any) -> Guesser:
        made.append(Guesser(table))
        return made[0]

    rig = Rig(logits_of, make_drafter=make, steps_ahead=0, **sizes)
    return rig, made[0]


def test_greedy_rows_take_fewer_steps() -> None:
    """Of three drafts up to the first wrong one is taken, and the token behind it."""
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
    """Sampled by a seed, penalised, biased, scored: each token as if it had come alone."""
    others = {"min_tokens": 9, "stop_token_ids": frozenset({2})}
    asked = [request([*PROMPT, first], 24, sampling, **others) for first in range(6)]
    rig, guesser = drafted(max_num_seqs=4)
    answers, alone = rig.run(*asked), Rig(logits_of, steps_ahead=0).run(*asked)
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


@pytest.mark.parametrize("after", range(1, 9))
def test_nothing_comes_behind_a_stop(after: int) -> None:
    """Wherever in a draft it is: no token, no event, no score."""
    rig, _ = drafted()
    sampling = replace(GREEDY, logprobs=1)
    asked = request(PROMPT, 24, sampling, stop_text=Ending(after), is_streamed=True)
    sequence = rig.work.add(asked)
    events = rig.finish()
    answer = sequence.result()
    assert answer.token_ids == greedy(PROMPT, after)
    assert [token for event in events for token in event.new_token_ids] == answer.token_ids
    assert answer.logprobs is not None
    check_scores(list(answer.logprobs), PROMPT + answer.token_ids, 1)
    assert [event.is_finished for event in events] == [False] * (len(events) - 1) + [True]


def test_drafts_take_no_page_that_is_needed() -> None:
    """With a pool that is nearly full nothing is drafted, and nobody gives way for a draft."""
    rig, guesser = drafted(num_pages=8, max_num_seqs=2)
    answers = rig.run(request(PROMPT, 10), request([7, *PROMPT], 10))
    assert [one.token_ids for one in answers if isinstance(one, SequenceResult)] == [
        greedy(PROMPT, 10),
        greedy([7, *PROMPT], 10),
    ]
    assert rig.work.stats().preemptions == 0
    assert guesser.num_accepted + guesser.num_wrong < 20
