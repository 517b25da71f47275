"""Choices of constrained tokens: their probabilities among the tokens that were allowed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.engine.loop.generation_rig import (
    GREEDY,
    VOCABULARY,
    Rig,
    logits_of,
    logprobs_of,
    only,
    request,
)
from tests.engine.loop.test_constraints import Places
from tidemill.engine.scheduling.sequence import Sampling
from tidemill.engine.scheduling.token_choices import TokenChoice

pytestmark = pytest.mark.usefixtures("steps_ahead")

PLACES = Places(((4, 7), (6,), (2, 5, 8), (), (1, 9)))
READ = replace(GREEDY, reads_confidence=True)


@pytest.mark.parametrize(
    "sampling", [READ, Sampling(temperature=2.0, seed=4, top_k=2, logit_bias={8: 3.0})]
)
@pytest.mark.parametrize("most", [2, 4096])
def test_a_choice_is_normalized_over_the_allowed_tokens(
    monkeypatch: pytest.MonkeyPatch, sampling: Sampling, most: int
) -> None:
    """A forced token has no probability; bias, cuts and temperature do not matter."""
    monkeypatch.setattr("tidemill.engine.loop.confidence.MAX_ALTERNATIVES", most)
    sampling = replace(sampling, reads_confidence=True)
    answers = [only(Rig(logits_of), request(sampling=sampling, constraint=PLACES))]
    plain, *answers[1:] = Rig(logits_of).run(
        request(constraint=PLACES), request(sampling=sampling, constraint=PLACES)
    )
    assert plain.token_choices == ()  # type: ignore[union-attr]
    for answer in answers:
        assert len(answer.token_choices) == len(answer.token_ids) == 5
        for place, (choice, ids) in enumerate(zip(answer.token_choices, PLACES.ids, strict=True)):
            allowed = np.array(ids or range(VOCABULARY))
            expected = logprobs_of((1, 2, 3, *answer.token_ids[:place]))[allowed]
            expected -= np.log(np.exp(expected).sum())
            if len(allowed) == 1:
                assert choice == TokenChoice(None)
                continue
            own = allowed.tolist().index(answer.token_ids[place])
            assert choice.logprob == pytest.approx(expected[own], abs=1e-5)
            are_stored = len(allowed) <= most
            assert choice.ids.tolist() == (allowed.tolist() if are_stored else [])
            assert choice.logprobs == pytest.approx(expected if are_stored else [], abs=1e-5)
