"""From logits to tokens: penalties, bias, bans, seeds, and broken rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tidemill.engine.kernels.sampling import ROWS_AT_ONCE, Sampled
from tidemill.engine.loop.sampler import Sampler
from tidemill.engine.scheduling.sequence import Sampling, Sequence, SequenceRequest
from tidemill.engine.scheduling.table import SequenceTable

GREEDY = Sampling(temperature=0)
BAD = [float("nan"), float("inf")]


class Desk:
    """A table of sequences in the middle of their generation, and a sampler over it."""

    def __init__(self) -> None:
        self.table = SequenceTable(100, 64, 4)
        self.sampler = Sampler(self.table)

    def place(
        self,
        sampling: Sampling = GREEDY,
        *,
        prompt: tuple[int, ...] = (0,),
        generated: tuple[int, ...] = (),
        **request: Any,
    ) -> int:
        """Put a sequence with some generated tokens into a slot."""
        sequence_request = SequenceRequest(list(prompt), 50, sampling, **request)
        sequence = Sequence(sequence_request, 0)
        sequence.generated = list(generated)
        return self.table.place(sequence, 0)

    def choose(self, slots: list[int], logits: torch.Tensor | list[list[float]]) -> Sampled:
        """Choose a token for each slot."""
        rows = torch.as_tensor(logits)
        metadata = self.sampler.metadata(np.array(slots, np.int64), rows.shape[1])
        return self.sampler.sample(rows, metadata)


def choose(
    logits: list[float],
    sampling: Sampling = GREEDY,
    *,
    prompt: tuple[int, ...] = (0,),
    generated: tuple[int, ...] = (),
    **request: Any,
) -> int:
    """Return the token that one sequence gets."""
    desk = Desk()
    slot = desk.place(sampling, prompt=prompt, generated=generated, **request)
    return int(desk.choose([slot], [logits]).token_ids[0])


def test_a_greedy_row_gets_its_most_likely_token() -> None:
    """The logits have the model's dtype."""
    desk = Desk()
    slots = [desk.place(), desk.place()]
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.tensor([[0, 3, 2], [5, 1, 2]], dtype=dtype)
        assert desk.choose(slots, logits).token_ids.tolist() == [1, 0]


def test_no_rows_yield_no_tokens() -> None:
    """A step of unfinished prompts samples nothing."""
    chosen = Desk().choose([], torch.empty(0, 5))
    assert chosen.token_ids.tolist() == chosen.is_broken.tolist() == []


def test_the_presence_penalty_applies_once_per_generated_token() -> None:
    """It does not apply to prompt tokens."""
    sampling = Sampling(temperature=0, presence_penalty=1)
    assert choose([2.5, 3, 0], sampling, generated=(1, 1, 1, 1)) == 0
    assert choose([1.5, 3, 0], sampling, generated=(1, 1, 1, 1)) == 1
    assert choose([2.5, 3, 0], sampling, prompt=(1, 1)) == 1


def test_the_frequency_penalty_applies_each_time() -> None:
    """A token that came four times is penalized four times."""
    sampling = Sampling(temperature=0, frequency_penalty=0.5)
    assert choose([1.5, 3, 0], sampling, generated=(1, 1, 1, 1)) == 0
    assert choose([1.5, 3, 0], sampling, generated=(1, 1)) == 1
    assert choose([1.5, 3, 0], sampling, prompt=(1, 1, 1, 1)) == 1


def test_a_negative_penalty_rewards() -> None:
    """The API allows negative penalties."""
    sampling = Sampling(temperature=0, presence_penalty=-2, frequency_penalty=-0.1)
    assert choose([3, 1, 0], sampling, generated=(1,)) == 1


def test_the_repetition_penalty_applies_to_prompt_and_output() -> None:
    """A positive logit is divided, a negative one multiplied."""
    sampling = Sampling(temperature=0, repetition_penalty=2)
    assert choose([3, 2, 0], sampling, prompt=(0, 0, 0)) == 1
    assert choose([3, 2, 0], sampling, prompt=(2,), generated=(0,)) == 1
    assert choose([3, 1, 0], sampling, prompt=(0, 0, 0)) == 0
    assert choose([-1, -1.5, -9], sampling, prompt=(0,)) == 1


def test_a_bias_is_added() -> None:
    """-100 bans a token, and 100 selects it."""
    assert choose([3, 2, 0], Sampling(temperature=0, logit_bias={0: -100})) == 1
    assert choose([3, 2, 0], Sampling(temperature=0, logit_bias={2: 100, 0: -1})) == 2
    assert choose([3, 2, 0], Sampling(temperature=0, logit_bias={1: 0.5})) == 0


def test_stop_tokens_are_banned_until_there_are_enough_tokens() -> None:
    """They are allowed after `min_tokens` tokens."""
    stops = frozenset({0, 1})
    for count, token in ((0, 2), (1, 2), (2, 2), (3, 0)):
        generated = (2,) * count
        assert choose([9, 8, 0], generated=generated, min_tokens=3, stop_token_ids=stops) == token


def test_a_minimum_needs_no_stop_token() -> None:
    """With `ignore_eos` there is none to ban."""
    assert choose([3, 2, 0], min_tokens=5) == 0
    assert choose([3, 2, 0], Sampling(seed=1, top_k=1), min_tokens=5) == 0


@pytest.mark.parametrize("stops", [{99}, {3}, {-1}, {1, 2**40}])
def test_a_stop_token_that_the_model_does_not_have_bans_nothing(stops: set[int]) -> None:
    """Configs name end tokens that the vocabulary lacks."""
    assert choose([1, 2, 9], min_tokens=5, stop_token_ids=frozenset(stops)) == 2


def test_banning_every_token_still_chooses_one() -> None:
    """There is no valid token, but the row is not broken and nothing raises."""
    desk = Desk()
    everything = frozenset({0, 1, 2})
    slots = [
        desk.place(sampling, min_tokens=5, stop_token_ids=everything)
        for sampling in (GREEDY, Sampling(seed=4), Sampling(seed=4, top_k=2, top_p=0.5, min_p=0.1))
    ]
    chosen = desk.choose(slots, [[1.0, 2.0, 3.0]] * 3)
    assert set(chosen.token_ids.tolist()) <= everything
    assert not chosen.is_broken.any()


def shaped(
    row: NDArray[np.float64], sampling: Sampling, prompt: list[int], generated: list[int]
) -> NDArray[np.float64]:
    """Return logits after penalties and bias, one token at a time."""
    row = row.copy()
    for token in range(len(row)):
        if token in prompt or token in generated:
            factor = sampling.repetition_penalty
            row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
        times = generated.count(token)
        row[token] -= sampling.presence_penalty * (times > 0) + sampling.frequency_penalty * times
        row[token] += sampling.logit_bias.get(token, 0.0)
    return row


TOKENS = st.lists(st.integers(0, 9), max_size=12)
PENALTY = st.sampled_from([0.0, 0.7, -1.3, 2.0])


@given(
    st.integers(0, 2**32 - 1),
    TOKENS,
    TOKENS,
    st.builds(
        Sampling,
        temperature=st.just(0.0),
        presence_penalty=PENALTY,
        frequency_penalty=PENALTY,
        repetition_penalty=st.sampled_from([1.0, 0.6, 1.9]),
        logit_bias=st.dictionaries(st.integers(0, 9), st.sampled_from([-100.0, -1.1, 2.3])),
    ),
)
def test_penalties_and_bias_add_up_as_written(
    seed: int, prompt: list[int], generated: list[int], sampling: Sampling
) -> None:
    """Any combination is compared with one token at a time."""
    row = np.random.default_rng(seed).normal(0, 3, 10).astype(np.float32).astype(np.float64)
    prompt = [0, *prompt]
    chosen = choose(row.tolist(), sampling, prompt=tuple(prompt), generated=tuple(generated))
    expected = shaped(row, sampling, prompt, generated)
    assert expected[chosen] == pytest.approx(expected.max(), abs=1e-5)


def test_the_models_own_logits_do_not_change() -> None:
    """Log-probabilities are taken from them afterwards."""
    desk = Desk()
    slots = [
        desk.place(Sampling(temperature=0.5, seed=1, presence_penalty=2), generated=(1,)),
        desk.place(Sampling(temperature=0, logit_bias={0: -100}), generated=(1,)),
        desk.place(min_tokens=3, stop_token_ids=frozenset({1})),
        desk.place(),
    ]
    logits = torch.randn(4, 10, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    desk.choose(slots, logits)
    assert torch.equal(logits, before)


KINDS = {
    "greedy": GREEDY,
    "shaped": Sampling(temperature=0, logit_bias={0: 1.0}),
    "random": Sampling(seed=3),
    "random and cut": Sampling(seed=3, top_k=2, top_p=0.9, min_p=0.1),
    "random and shaped": Sampling(seed=3, frequency_penalty=1),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_is_not_finite_is_broken_and_its_neighbors_are_not(
    kind: str, bad: float
) -> None:
    """It holds for every sampling method; a banned token does not break a row."""
    desk = Desk()
    slots = [desk.place(KINDS[kind]) for _ in range(4)]
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0))
    logits[1, 255] = bad
    logits[2] = -torch.inf
    logits[3, :200] = -torch.inf
    chosen = desk.choose(slots, logits)
    assert chosen.is_broken.tolist() == [False, True, True, False]
    assert (chosen.token_ids >= 0).all()
    assert (chosen.token_ids < 300).all()


def test_a_row_gets_what_it_would_get_alone() -> None:
    """There are more rows of all kinds than are sampled at once, in any order."""
    desk = Desk()
    kinds = [*KINDS.values(), Sampling(temperature=1.4, seed=8), Sampling(seed=9, top_p=0.5)]
    rows = 2 * ROWS_AT_ONCE + 9
    slots = [
        desk.place(kinds[row % len(kinds)], generated=tuple(range(row % 5))) for row in range(rows)
    ]
    logits = torch.randn(rows, 600, generator=torch.Generator().manual_seed(1)) * 2
    together = desk.choose(slots, logits).token_ids.tolist()
    alone = [int(desk.choose([slots[row]], logits[row : row + 1]).token_ids) for row in range(rows)]
    assert together == alone
    assert desk.choose(slots[::-1], logits.flip(0)).token_ids.tolist() == together[::-1]


def test_a_draw_is_keyed_by_seed_and_place() -> None:
    """The same seed repeats its draw; another position or seed has another draw."""
    flat = [0.0] * 1000

    def draw(seed: int, place: int, prompt: tuple[int, ...] = (0,)) -> int:
        return choose(flat, Sampling(seed=seed), prompt=prompt, generated=(0,) * place)

    assert draw(5, 2) == draw(5, 2) == draw(5, 2, prompt=(1, 2, 3))
    assert len({draw(5, place) for place in range(20)}) > 15
    assert len({draw(seed, 2) for seed in range(20)}) > 15
    assert draw(2**63 - 1, 0) != draw(0, 0)


def test_a_random_choice_respects_bans_and_bias() -> None:
    """Forbidden tokens are never sampled."""
    desk = Desk()
    banned = frozenset(range(1, 40))
    slots = [
        desk.place(Sampling(seed=seed, logit_bias={0: -100.0}), min_tokens=1, stop_token_ids=banned)
        for seed in range(50)
    ]
    chosen = desk.choose(slots, torch.zeros(50, 42)).token_ids
    assert set(chosen.tolist()) == {40, 41}
