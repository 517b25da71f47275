"""The GPU's choice of tokens: each is what the reference chooses, by the same draw."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch

from engine.kernels import sampling as reference
from engine.kernels.triton import sampling
from tests.engine.kernels.rules import Rule, joined

RULES = [
    Rule(0),
    Rule(),
    Rule(0.7, 5),
    Rule(1, 0, 0.9),
    Rule(1, 0, 1, 0.1),
    Rule(0.7, 50, 0.8, 0.01),
    Rule(0, repetition=1.3, presence=1, frequency=0.5, prompt=[1, 2, 3], generated=[4, 5, 5, 499]),
    Rule(bias={5: 6.0, 499: 2.0}, bans=[31, 98], mask=[5, 31, 40, 98, 400]),
]


def check_choice(module: ModuleType) -> None:
    """Hold choices to the reference's."""
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(0, 3, (len(RULES), 500))).half()
    rules = joined(RULES, rng.random(len(RULES)))
    chosen, expected = module.choose(logits, rules), reference.choose(logits.double(), rules)
    assert chosen.token_ids.tolist() == expected.token_ids.tolist()
    assert not chosen.is_broken.any()


@pytest.mark.long
def test_a_choice_is_the_references() -> None:
    """Greedy, random, cut and shaped, of the same draw."""
    check_choice(sampling)


@pytest.mark.parametrize("top", [0, 4])
def test_log_probabilities_are_those_of_the_whole_softmax(top: int) -> None:
    """Of any rows in any order, the best first."""
    logits = torch.randn(4, 500, generator=torch.Generator().manual_seed(0)) * 5
    rows, chosen = np.array([3, 0, 3]), torch.tensor([0, 499, 250])
    scores = sampling.log_probabilities(logits, rows, chosen, top)
    expected = reference.log_probabilities(logits.double(), rows, chosen, top)
    torch.testing.assert_close(scores.logprobs, expected.logprobs)
    torch.testing.assert_close(scores.top_logprobs, expected.top_logprobs)
    assert scores.top_ids.tolist() == expected.top_ids.tolist()
