"""Choosing tokens: thresholds against a plain definition, randomness by its frequencies.

All of it holds for the reference and for the CPU's kernels.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.engine.kernels.rules import Rule, joined
from tidemill.engine.kernels import sampling as reference
from tidemill.engine.kernels.cpu import sampling as of_cpu
from tidemill.engine.kernels.cpu.top_p import NUM_FEW
from tidemill.engine.kernels.sampling import TILE, SamplingOps, uniform_draws

Row = NDArray[np.float32]

either = pytest.mark.parametrize("kernels", [reference, of_cpu], ids=["reference", "cpu"])


def choose(
    kernels: SamplingOps, logits: Row, metadata: list[Rule], draws: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Choose with a rule for each row."""
    chosen = kernels.sample(torch.from_numpy(np.ascontiguousarray(logits)), joined(metadata, draws))
    ids: NDArray[np.int64] = chosen.token_ids.numpy()
    return ids


def scaled(row: Row, rule: Rule) -> Row:
    """Return the logits at the rule's temperature, rounded as the engine rounds them."""
    return row * (1 / np.float32(rule.temperature))


def allowed(row: Row, rule: Rule, slack: float = 0.0) -> NDArray[np.bool_]:
    """Return the tokens that a rule leaves, by sorting; `slack` widens the share of the nucleus.

    Top-k and min-p first, each from the whole row, then top-p of the mass that they leave. Tied
    tokens stay or go together.
    """
    logits = scaled(row, rule)
    order = np.sort(logits)[::-1]
    left = logits >= order[min(rule.top_k or len(row), len(row)) - 1]
    left &= logits >= order[0] + (np.log(np.float32(rule.min_p)) if rule.min_p else -np.inf)
    if rule.top_p < 1:
        kept = np.sort(logits[left])[::-1]
        covered = np.exp(kept.astype(np.float64) - kept[0]).cumsum()
        goal = covered[-1] * np.float32(rule.top_p) * (1 + slack)
        left &= logits >= kept[min((covered < goal).sum(), len(kept) - 1)]
    return left


def check_draw(row: Row, rule: Rule, draw: float, chosen: int) -> None:
    """Assert that the chosen token is left by the rule, and is the one at `draw`."""
    most, least = allowed(row, rule, 3e-6), allowed(row, rule, -3e-6)
    assert most[chosen]
    logits = scaled(row, rule).astype(np.float64)
    covered = (np.exp(logits - logits.max()) * most).cumsum()
    covered /= covered[-1]
    # Where rounding decides who is in, the place of a draw is as uncertain.
    slack = 1e-6 + 1 - least.sum() / most.sum()
    assert covered[chosen] >= draw - slack
    assert (covered[chosen - 1] if chosen else 0.0) <= draw + slack


RULES = st.builds(
    Rule,
    st.sampled_from([0.05, 0.7, 1.0, 2.5]),
    st.sampled_from([0, 0, 1, 2, 7, 50, 10**9]),
    st.sampled_from([1.0, 1.0, 1e-6, 0.3, 0.9, 0.999]),
    st.sampled_from([0.0, 0.0, 1e-4, 0.1, 0.6, 1.0]),
)


@either
@given(
    vocabulary=st.sampled_from([1, 2, 5, 60, TILE - 1, TILE, TILE + 1, 3 * TILE + 7]),
    metadata=st.lists(RULES, min_size=1, max_size=4),
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(["spread", "tied", "flat", "banned"]),
    draws=st.lists(st.sampled_from([0.0, 0.5, 1 - 2.0**-53]) | st.floats(0, 0.999), min_size=4),
)
def test_a_draw_falls_where_the_thresholds_put_it(
    *,
    kernels: SamplingOps,
    vocabulary: int,
    metadata: list[Rule],
    seed: int,
    kind: str,
    draws: list[float],
) -> None:
    """Temperature, top-k, top-p and min-p in any mixture, with ties and with banned tokens."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (len(metadata), vocabulary)).astype(np.float32)
    if kind == "tied":
        logits = logits.round()
    elif kind == "flat":
        logits[:] = 2.5
    elif kind == "banned":
        logits[:, rng.random(vocabulary) < 0.5] = -np.inf
        logits[:, rng.integers(vocabulary)] = 1.0
    numbers = np.array(draws[: len(metadata)])
    chosen = choose(kernels, logits, metadata, numbers)
    assert chosen.shape == (len(metadata),)
    for row, rule, draw, token in zip(logits, metadata, numbers, chosen.tolist(), strict=True):
        check_draw(row, rule, draw, token)


@either
@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])
@pytest.mark.parametrize(
    "rule",
    [
        Rule(),
        Rule(top_p=0.95),
        Rule(top_p=0.999999),
        Rule(top_k=40, top_p=0.9),
        Rule(top_k=5000, top_p=0.99),
        Rule(0.6, 200, 0.8, 0.05),
    ],
    ids=str,
)
def test_a_large_vocabulary_is_cut_at_the_same_token_as_a_small_one(
    kernels: SamplingOps, rule: Rule, spread: float
) -> None:
    """One nucleus is wider than the first candidates."""
    vocabulary = 4 * NUM_FEW + 5
    rng = np.random.default_rng(4)
    logits = np.tile(rng.normal(0, spread, vocabulary).astype(np.float32), (6, 1))
    draws = np.array([0.0, 0.2, 0.5, 0.9, 0.9999, 1 - 2.0**-53])
    for row, draw, token in zip(
        logits, draws, choose(kernels, logits, [rule] * 6, draws), strict=True
    ):
        check_draw(row, rule, draw, int(token))


@either
def test_the_ends_of_the_range_choose_the_first_and_the_last_token_with_mass(
    kernels: SamplingOps,
) -> None:
    """A token of no mass never comes, be it first, last, or a whole tile."""
    for vocabulary in (3, TILE, 4 * TILE + 3):
        logits = np.full((2, vocabulary), -np.inf, np.float32)
        logits[:, 1] = logits[:, vocabulary // 2] = 0
        chosen = choose(kernels, logits, [Rule(), Rule()], np.array([0.0, 1 - 2.0**-53]))
        assert chosen.tolist() == [1, max(1, vocabulary // 2)]


@either
def test_rounding_never_steps_past_the_last_token_with_mass(kernels: SamplingOps) -> None:
    """The total of a tile and its running sum are not added up in the same order."""
    rows = 2000
    # Only masses of very different sizes are rounded at all when they are added in float64.
    logits = np.random.default_rng(6).normal(0, 12, (rows, TILE)).astype(np.float32)
    logits[:, -10:] = -np.inf
    chosen = choose(kernels, logits, [Rule()] * rows, np.full(rows, 1 - 2.0**-53))
    assert chosen.max() < TILE - 10


@either
def test_a_nucleus_ends_with_the_token_that_reaches_it(kernels: SamplingOps) -> None:
    """Masses 4, 2 and 2: half of them is the first token, and not one more."""
    half = float(np.float32(-np.log(2)))
    logits = np.tile(np.array([0, half, half], np.float32), (20, 1))
    draws = np.linspace(0, 0.999, 20)
    assert set(choose(kernels, logits, [Rule(top_p=0.5)] * 20, draws).tolist()) == {0}
    assert set(choose(kernels, logits, [Rule(top_p=0.501)] * 20, draws).tolist()) == {0, 1, 2}


@either
def test_tied_tokens_at_a_threshold_all_stay(kernels: SamplingOps) -> None:
    """Their scores are equal."""
    logits = np.array([[3, 1, 2, 2, 2, 0]], np.float32)
    for rule in (Rule(top_k=2), Rule(top_p=0.6), Rule(min_p=float(np.exp(np.float32(-1))))):
        draws = np.linspace(0, 0.999, 40)
        chosen = choose(kernels, np.repeat(logits, 40, axis=0), [rule] * 40, draws)
        assert set(chosen.tolist()) == {0, 2, 3, 4}


@either
def test_top_k_of_one_is_greedy(kernels: SamplingOps) -> None:
    """Neither the draw nor the temperature matters."""
    logits = np.random.default_rng(0).normal(size=(50, 700)).astype(np.float32)
    metadata = [Rule(5.0, 1)] * 50
    assert (choose(kernels, logits, metadata, np.linspace(0, 0.999, 50)) == logits.argmax(1)).all()


@either
def test_a_cold_temperature_is_greedy_and_a_hot_one_is_even(kernels: SamplingOps) -> None:
    """The temperatures are the limits that the endpoints allow."""
    logits = np.random.default_rng(0).normal(0, 20, size=(50, 40)).astype(np.float32)
    draws = np.linspace(0, 0.999, 50)
    assert (choose(kernels, logits, [Rule(1e-5)] * 50, draws) == logits.argmax(1)).all()
    assert (choose(kernels, logits, [Rule(1e4)] * 50, draws) - draws * 40 < 1.1).all()
    assert len(set(choose(kernels, logits, [Rule(1e4)] * 50, draws).tolist())) > 35


@either
@pytest.mark.parametrize(
    "rule",
    [Rule(), Rule(0.5), Rule(1.7, 12), Rule(1, 0, 0.8), Rule(1, 0, 1, 0.1), Rule(0.9, 20, 0.9)],
    ids=str,
)
def test_tokens_come_as_often_as_they_should(kernels: SamplingOps, rule: Rule) -> None:
    """20,000 seeds: the chi-square statistic stays within five standard deviations."""
    count, vocabulary = 20_000, 50
    row = np.random.default_rng(11).normal(0, 1.5, vocabulary).astype(np.float32)
    draws = uniform_draws(np.arange(count, dtype=np.uint64), np.full(count, 3))
    chosen = choose(kernels, np.tile(row, (count, 1)), [rule] * count, draws)
    mass = np.exp(row.astype(np.float64) / rule.temperature) * allowed(row, rule)
    expected = mass / mass.sum() * count
    seen = np.bincount(chosen, minlength=vocabulary)
    assert not seen[expected == 0].any()
    possible = expected > 0
    statistic = ((seen - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = possible.sum() - 1
    assert abs(statistic - freedom) < 5 * np.sqrt(2 * freedom)


@either
def test_a_row_is_chosen_as_if_it_were_alone(kernels: SamplingOps) -> None:
    """Neighbours with other rules change no row, and neither does the order."""
    rng = np.random.default_rng(5)
    rows, vocabulary = 24, 2 * NUM_FEW
    logits = rng.normal(0, rng.uniform(0.1, 6, (rows, 1)), (rows, vocabulary)).astype(np.float32)
    kinds = [
        Rule(),
        Rule(0.8, 50),
        Rule(1, 0, 0.9),
        Rule(1, 0, 1, 0.2),
        Rule(2, 3000, 0.999, 0.001),
    ]
    metadata = [kinds[row % len(kinds)] for row in range(rows)]
    draws = rng.random(rows)
    together = choose(kernels, logits, metadata, draws)
    alone = [choose(kernels, logits[[i]], [metadata[i]], draws[[i]])[0] for i in range(rows)]
    assert together.tolist() == alone
    assert choose(kernels, logits[::-1], metadata[::-1], draws[::-1].copy()).tolist() == alone[::-1]


def test_uniform_numbers_are_in_the_half_open_unit_interval() -> None:
    """At every seed and position, the ends of both ranges too."""
    seeds = np.array([0, 1, 2**63 - 1, 2**64 - 1], np.uint64).repeat(1000)
    numbers = uniform_draws(seeds, np.tile(np.arange(1000), 4))
    assert numbers.dtype == np.float64
    assert (numbers >= 0).all()
    assert (numbers < 1).all()
    assert len(np.unique(numbers)) == 4000


@pytest.mark.parametrize("axis", ["seeds", "positions"])
def test_uniform_numbers_are_even_and_unrelated(axis: str) -> None:
    """Mean, spread and correlation are tested over neighbouring seeds and positions."""
    count = 100_000
    steps = np.arange(count)
    if axis == "seeds":
        numbers = uniform_draws(steps.astype(np.uint64), np.full(count, 7))
    else:
        numbers = uniform_draws(np.full(count, 7, np.uint64), steps)
    shares = np.bincount((numbers * 64).astype(int), minlength=64) / count * 64
    assert abs(numbers.mean() - 0.5) < 5 * np.sqrt(1 / 12 / count)
    assert np.abs(shares - 1).max() < 5 * np.sqrt(64 / count)
    for lag in (1, 2, 16):
        assert abs(np.corrcoef(numbers[:-lag], numbers[lag:])[0, 1]) < 5 / np.sqrt(count)


def test_uniform_numbers_depend_on_seed_and_position_alone() -> None:
    """Whatever other rows are drawn in the same call."""
    seeds = np.array([5, 6, 2**63], np.uint64)
    positions = np.array([0, 3, 100])
    together = uniform_draws(seeds, positions)
    alone = [uniform_draws(seeds[[i]], positions[[i]])[0] for i in range(3)]
    assert together.tolist() == alone


@either
def test_greedy_takes_the_first_of_the_likeliest(kernels: SamplingOps) -> None:
    """Every dtype of a model is tested; plus and minus zero tie, too."""
    rows = [[0.0, 2.0, 2.0], [1.0, 0.0, -torch.inf], [-0.0, 0.0, -3.0], [-5.0, -4.0, -4.0]]
    for dtype in (torch.float32, torch.bfloat16):
        for sizes in (1, 2000):
            logits = torch.tensor(rows, dtype=dtype).repeat(1, sizes)
            chosen = kernels.sample(logits, joined([Rule(0)] * 4, np.zeros(4)))
            assert chosen.token_ids.tolist() == [1, 0, 0, 1]
            assert not chosen.is_broken.any()


@either
@pytest.mark.parametrize(
    "rule", [Rule(0), Rule(0, repetition=1.1), Rule(), Rule(1, 5, 0.5)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_that_is_not_finite_is_broken(
    kernels: SamplingOps, dtype: torch.dtype, rule: Rule
) -> None:
    """A NaN of either sign anywhere in a row, an infinity, or nothing but minus infinity."""
    nan = torch.tensor([torch.nan]).abs()
    for bad in (nan, -nan, torch.tensor([torch.inf])):
        for place in (0, 77, 299):
            logits = torch.linspace(-3, 3, 1200).view(4, 300).to(dtype)
            logits[1, place] = bad
            logits[3] = -torch.inf
            logits[2, 5:] = -torch.inf
            chosen = kernels.sample(logits, joined([rule] * 4, np.zeros(4)))
            assert chosen.is_broken.tolist() == [False, True, False, True]
            assert ((chosen.token_ids >= 0) & (chosen.token_ids < 300)).all()


@either
@pytest.mark.parametrize("top", [0, 9, 20, 65])
def test_log_probabilities_are_those_of_the_whole_softmax(kernels: SamplingOps, top: int) -> None:
    """They have the logits' dtype, computed in fp32, best first, for any rows in any order."""
    logits = torch.randn(50, 2400, generator=torch.Generator().manual_seed(0)) * 5
    chosen = torch.tensor([0, 2399, *range(5, 43)])
    rows = np.random.default_rng(0).permutation(50)[:40]
    for dtype in (torch.float32, torch.bfloat16):
        expected = logits.to(dtype).double().log_softmax(-1)[rows]
        scores = kernels.compute_logprobs(logits.to(dtype), rows, chosen, top)
        best = expected.sort(dim=-1, descending=True, stable=True).values[:, :top]
        exact = expected[range(40), chosen]
        torch.testing.assert_close(scores.logprobs.double(), exact, atol=2e-5, rtol=0)
        torch.testing.assert_close(scores.top_logprobs.double(), best, atol=2e-5, rtol=0)
        torch.testing.assert_close(expected.gather(1, scores.top_ids), best, atol=2e-5, rtol=0)
        assert all(len(set(ids)) == top for ids in scores.top_ids.tolist())


@either
def test_a_rank_counts_likelier_tokens(kernels: SamplingOps) -> None:
    """Ranks start at 1, and tied tokens have the same rank."""
    logits = torch.randn(9, 2400, generator=torch.Generator().manual_seed(1))
    logits[0], logits[1, 7] = 0.5, -torch.inf
    chosen = torch.tensor([5, 7, *range(2, 9)])
    for dtype in (torch.float32, torch.bfloat16):
        converted = logits.to(dtype)
        expected = (converted > converted[range(9), chosen, None]).sum(dim=1) + 1
        assert kernels.compute_ranks(converted, chosen).tolist() == expected.tolist()
    assert expected[:2].tolist() == [1, 2400]


@either
def test_log_probabilities_bear_huge_logits_and_more_places_than_tokens(
    kernels: SamplingOps,
) -> None:
    """Nothing overflows, and a banned token has minus infinity."""
    logits = torch.tensor([[1e30, -1e30, 0.0], [4e4, 4e4, -torch.inf]])
    scores = kernels.compute_logprobs(logits, np.arange(2), torch.tensor([0, 2]), 20)
    assert scores.logprobs.tolist() == [0, -torch.inf]
    assert scores.top_logprobs.shape == scores.top_ids.shape == (2, 3)
    halves = [-np.log(2), -np.log(2), -np.inf]
    assert scores.top_logprobs[1].tolist() == pytest.approx(halves, abs=1e-2)


@either
@pytest.mark.parametrize(
    "rule",
    [
        Rule(temperature=0),
        Rule(),
        Rule(temperature=0.7, top_k=3, top_p=0.8, min_p=0.01),
        Rule(temperature=0, repetition=1.3, presence=1, prompt=[0, 31, 32], generated=[63, 64, 99]),
        Rule(bias={5: 50.0, 64: 2.0}, bans=[31, 98]),
    ],
    ids=["greedy", "random", "cut", "penalised", "biased"],
)
def test_a_mask_leaves_a_row_as_if_it_had_no_other_tokens(kernels: SamplingOps, rule: Rule) -> None:
    """Masks end at word borders, in whole words, and at ties; masked tokens do not count."""
    rng = np.random.default_rng(4)
    logits = rng.normal(size=(40, 100)).round(1).astype(np.float32)
    masks = [
        sorted({0, 31, 32, 99, *rng.choice(100, rng.integers(1, 90), replace=False).tolist()})
        for _ in logits
    ]
    masks[:3] = [[*range(100)], [*range(32, 64)], [5, *range(32, 96)]]
    draws = rng.random(40)
    masked = [replace(rule, mask=mask) for mask in masks]
    barred = [replace(rule, bans=[*rule.bans, *set(range(100)) - set(mask)]) for mask in masks]
    chosen = choose(kernels, logits, masked, draws)
    assert all(token in mask for token, mask in zip(chosen.tolist(), masks, strict=True))
    assert chosen.tolist() == choose(kernels, logits, barred, draws).tolist()
    alone = [choose(kernels, logits[[i]], [masked[i]], draws[[i]])[0] for i in range(40)]
    assert chosen.tolist() == alone
