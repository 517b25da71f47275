"""Identical requests: computed once, and answered separately."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.engine.loop.generation_rig import (
    GREEDY,
    Rig,
    Watch,
    finished_in,
    logits_of,
    only,
    outcome,
    request,
)
from tests.engine.paged_model import Tokens
from tidemill.engine.scheduling.images import PromptImage
from tidemill.engine.scheduling.sequence import Sampling, Sequence, SequenceRequest, SequenceResult
from tidemill.protocol.errors import InternalError

SAMPLED = Sampling(temperature=1.0, seed=7)
SCORED = replace(GREEDY, logprobs=2)


@pytest.mark.parametrize("sampling", [GREEDY, SCORED, SAMPLED], ids=["greedy", "scored", "sampled"])
@pytest.mark.usefixtures("steps_ahead")
def test_a_duplicate_costs_no_step_and_has_the_same_result(sampling: Sampling) -> None:
    """Each has its own last event, in one step, and as many output tokens in the statistics."""
    repeated = request(list(range(9)), 5, sampling, prompt_logprobs=0)
    rig = Rig(logits_of)
    first, *repeats = [rig.work.add(repeated) for _ in range(4)]
    assert rig.work.stats().waiting == 4
    assert finished_in(rig.finish()) == [first, *repeats]
    stats = rig.work.stats()
    assert (stats.prompt_tokens, stats.output_tokens, stats.waiting) == (36, 20, 0)
    alone = only(rig := Rig(logits_of), repeated)
    assert stats.steps == rig.work.stats().steps
    for sequence in repeats:
        assert outcome(sequence) == replace(alone, num_cached_tokens=9)


@pytest.mark.parametrize(
    "other",
    [
        request([1, 2, 4]),
        request(max_tokens=7),
        request(min_tokens=1),
        request(stop_token_ids=frozenset({3})),
        request(stop_text=Watch(2)),
        request(prompt_logprobs=0),
        request(cache_salt="mine"),
        request(adapter=1),
        request(images=(PromptImage(np.zeros((1, 1, 3), np.uint8), b"a", 0, 1, 1, is_whole=True),)),
        request(is_streamed=True),
        request(sampling=SCORED),
        request(sampling=replace(GREEDY, repetition_penalty=1.1)),
        request(sampling=replace(GREEDY, logit_bias={1: 1.0})),
        request(sampling=SAMPLED),
    ],
)
def test_requests_with_any_difference_are_computed(other: SequenceRequest) -> None:
    """It includes requests whose answers might be equal."""
    rig = Rig(logits_of)
    for one in (request(), other):
        rig.work.add(one)
    rig.work.step()
    assert rig.work.stats().running == 2


def test_a_seed_matters_if_sampling_is_random() -> None:
    """Greedy requests have none."""
    for sampling, num_computed in ((GREEDY, 1), (SAMPLED, 2)):
        rig = Rig(logits_of)
        for seed in (1, 2):
            rig.work.add(request(sampling=replace(sampling, seed=seed)))
        rig.work.step()
        assert rig.work.stats().running == num_computed


@pytest.mark.usefixtures("steps_ahead")
def test_a_request_after_the_end_is_computed() -> None:
    """Finished results are not stored."""
    rig = Rig(logits_of)
    answers = [only(rig, request(list(range(9)))) for _ in range(2)]
    assert [answer.num_cached_tokens for answer in answers] == [0, 8]


@pytest.mark.usefixtures("steps_ahead")
@pytest.mark.parametrize("num_steps", [0, 3])
def test_waiting_duplicates_continue_without_the_first(num_steps: int) -> None:
    """One of them is computed; a dropped duplicate gets no event."""
    rig = Rig(logits_of)
    first, second, third, fourth = [rig.work.add(request()) for _ in range(4)]
    for _ in range(num_steps):
        rig.work.step()
    rig.work.abort({first, third})
    assert finished_in(rig.finish()) == [second, fourth]
    assert outcome(second) == only(Rig(logits_of), request())


@pytest.mark.usefixtures("steps_ahead")
def test_a_failure_is_not_repeated_but_tried_again() -> None:
    """A temporary fault costs one request, a permanent one all of them; none hangs."""
    for num_faults, num_failed in ((1, 1), (99, 3)):
        faults = [math.nan] * num_faults

        def faulty(tokens: Tokens, faults: list[float] = faults) -> NDArray[np.float32]:
            row = np.array(logits_of(tokens), np.float32)
            if len(tokens) == 5 and faults:
                row[0] = faults.pop()
            return row

        answers: list[Any] = Rig(faulty).run(*[request()] * 3)
        assert [isinstance(answer, InternalError) for answer in answers].count(True) == num_failed
        for answer in answers[num_failed:]:
            assert (
                cast("SequenceResult", answer).token_ids
                == only(Rig(logits_of), request()).token_ids
            )


def test_duplicates_share_nothing_mutable() -> None:
    """Changing one result does not affect another."""
    rig = Rig(logits_of)
    sequences: list[Sequence] = [rig.work.add(request()) for _ in range(2)]
    rig.finish()
    first, second = (sequence.result() for sequence in sequences)
    first.token_ids.clear()
    assert second.token_ids
