"""The GPU's choice of tokens: each is what the reference chooses, by the same draw."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import TypeVar
from unittest.mock import patch

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.engine.kernels.rules import Rule, joined
from tests.engine.kernels.test_sampling import check_draw
from tests.engine.kernels.triton.mutating import Mutation, assert_found
from tidemill.engine.kernels import sampling as reference
from tidemill.engine.kernels.sampling import PagedTokenIds, Sampled, SamplingMetadata
from tidemill.engine.kernels.triton import (
    logit_groups,
    logits_processors,
    logprobs,
    sampling,
    sampling_inputs,
)
from tidemill.engine.kernels.triton.logit_groups import GROUP

Result = TypeVar("Result")

CUTS = [
    Rule(0.7, 5),
    Rule(),
    Rule(2, 0, 0.9),
    Rule(1.3, 0, 1, 0.1),
    Rule(1, 1),
    Rule(2, 50, 0.8, 0.01),
]


def draws(count: int) -> NDArray[np.float64]:
    """Return draws, every other one the first that there is, and one the last."""
    numbers = torch.rand(count, dtype=torch.float64).numpy()
    numbers[::2] = 0
    numbers[1:2] = 1 - 2.0**-53
    return numbers


def check_cuts(
    module: ModuleType,
    vocabulary: int = 2 * GROUP + 3,
    scale: float = 4,
    metadata: list[Rule] = CUTS,
) -> None:
    """Compare choices with sorting; the last group has few tokens, one of them the likeliest."""
    logits = (torch.randn(len(metadata), vocabulary) * scale).half()
    logits[:, -1] = logits.amax(1) + scale / 2
    numbers = draws(len(metadata))
    choose = module.sample if hasattr(module, "_choose") else sampling.sample
    chosen = with_module(module, lambda: choose(logits, joined(metadata, numbers)))
    assert not chosen.is_broken.any()
    tokens = chosen.token_ids.tolist()
    assert max(tokens) < vocabulary
    for row, rule, draw, token in zip(
        logits.float().numpy(), metadata, numbers, tokens, strict=True
    ):
        if rule.temperature == 0:
            assert token == row.argmax()
        else:
            check_draw(row, rule, float(draw), token)


@pytest.mark.parametrize("vocabulary", [1, GROUP, 3000])
def test_a_draw_falls_where_the_thresholds_put_it(vocabulary: int) -> None:
    """Draws fall within a group, at its end, and where groups are searched in turns."""
    check_cuts(sampling, vocabulary)


@pytest.mark.parametrize("scale", [0.0, 0.01])
def test_a_flat_row_is_cut_as_any(scale: float) -> None:
    """Ties stay together, and no group can be left out."""
    check_cuts(sampling, scale=scale)


def check_top_k(module: ModuleType) -> None:
    """Compare the result with the last numbers of a rising row: the first draw is its first."""
    counts = [1, 2, 3, 5, 40, 300]
    logits = torch.arange(2 * GROUP + 3).expand(len(counts), -1) / 64
    metadata = joined([Rule(9, count) for count in counts], np.zeros(len(counts)))
    chosen = module.sample(logits, metadata).token_ids
    assert (logits.shape[1] - chosen).tolist() == counts


def test_exactly_the_requested_number_is_left() -> None:
    """No more are left, however many groups they are in."""
    check_top_k(sampling)


def test_a_nucleus_ends_with_the_token_that_reaches_it() -> None:
    """Masses 4, 2 and 2: half of them is the first token, and not one more."""
    half = -float(np.float32(np.log(2)))
    logits = torch.full((2, GROUP + 2), -torch.inf)
    logits[:, [7, 9, GROUP]] = torch.tensor([0, half, half])
    metadata = [Rule(top_p=0.5), Rule(top_p=0.501)]
    assert sampling.sample(logits, joined(metadata, np.full(2, 0.999))).token_ids.tolist() == [
        7,
        GROUP,
    ]


SHAPED = [
    Rule(0, repetition=1.8, prompt=[0, 31, 32, 599], generated=[64]),
    Rule(0, repetition=0.6, presence=2.5, prompt=[1], generated=[31, 32, 600, 600]),
    Rule(0, frequency=1.1, prompt=[5, 5], generated=[63, 64, 64, 64, 599, 600]),
    Rule(0, bias={0: 3.0, 600: 5.5}, bans=[31, 599]),
    Rule(0, mask=[31, 32, 599, 600]),
    Rule(1, 3, bias={0: 4.0}, mask=[0, 31, 40, 600], prompt=[1], generated=[2], presence=-1),
    Rule(0),
]


def check_shaped(module: ModuleType, times: int = 1) -> None:
    """Compare choices with the reference's, on logits where every processor matters."""
    touched = [0, 1, 31, 32, 63, 64, 599, 600]
    logits = torch.randn(times * len(SHAPED), 601) * 0.3
    logits[:, touched] += 2 + torch.rand(len(logits), len(touched))
    metadata = joined(SHAPED * times, draws(len(logits)))
    assert_same(with_module(module, lambda: sampling.sample(logits, metadata)), logits, metadata)


def assert_same(chosen: Sampled, logits: Tensor, metadata: SamplingMetadata) -> None:
    """Compare choices with the reference's."""
    expected = reference.sample(logits, metadata)
    assert chosen.token_ids.tolist() == expected.token_ids.tolist()
    assert chosen.is_broken.tolist() == expected.is_broken.tolist()


def with_module(module: ModuleType, call: Callable[[], Result]) -> Result:
    """Call a function with a module's functions in place of imported ones."""
    with ExitStack() as patches:
        for other in (sampling, logprobs, logit_groups):
            for name in (
                {"shaped", "prepare_processors", "measure_groups"}
                & vars(module).keys()
                & vars(other).keys()
            ):
                patches.enter_context(patch.object(other, name, getattr(module, name)))
        return call()


def test_logits_are_shaped_as_the_references() -> None:
    """All processors are tested, at the ends of words and of rows."""
    check_shaped(logits_processors, 4)


def test_rows_that_add_more_than_there_is_room_for_are_run_in_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each row finds its own numbers."""
    monkeypatch.setattr(sampling_inputs, "MOST_ADDS", 2 * 601)
    assert (
        len(
            sampling_inputs._chunks(
                sampling_inputs.default_records(5), joined(SHAPED[3:4] * 5, draws(5)), 601
            )[0]
        )
        == 3
    )
    check_shaped(logits_processors)


def test_a_history_is_found_in_pages_of_the_device() -> None:
    """Pages are in any order, up to an id that the host does not know."""
    vocabulary, size, lengths = 700, 4, [1, 4, 1030, 7]
    pages = torch.randperm(2000).numpy().astype(np.int32)[: 4 * 300].reshape(4, 300)
    ids = torch.randint(vocabulary, (2000 * size,), dtype=torch.int32)
    kept = PagedTokenIds(ids, pages, size)
    metadata = [Rule(0, repetition=5.0, presence=1.5, frequency=0.5)] * 4
    logits = torch.rand(4, vocabulary) + 1
    requested = joined(metadata, draws(4))._replace(
        num_prompt=np.array([0, 2, 500, 7]), num_known=np.array(lengths), paged_ids=kept
    )
    chosen = sampling.sample(logits, requested)
    assert_same(chosen, logits, requested)
    known = np.zeros((4, 1100), np.int32)
    for slot, row in enumerate(pages):
        known[slot] = ids.view(-1, size)[row].flatten()[:1100]
    assert_same(chosen, logits, requested._replace(paged_ids=None, tokens=known))


@pytest.mark.parametrize("rule", [Rule(0), Rule(1, 5, 0.5)], ids=str)
def test_a_row_that_is_not_finite_is_broken(rule: Rule) -> None:
    """A NaN or an infinity anywhere, or nothing but minus infinity; one that is banned is not."""
    logits = torch.linspace(-3, 3, 5 * 300).view(5, 300)
    logits[0, 299] = torch.nan
    logits[1, 0] = torch.inf
    logits[2] = -torch.inf
    logits[3, 5:] = -torch.inf
    barred = Rule(rule.temperature, mask=[])
    chosen = sampling.sample(logits, joined([rule] * 4 + [barred], draws(5)))
    assert chosen.is_broken.tolist() == [True, True, True, False, False]
    assert ((chosen.token_ids >= 0) & (chosen.token_ids < 300)).all()


def check_scores(module: ModuleType) -> None:
    """Compare scores with the whole softmax, for any rows in any order; first of ties."""
    logits = (torch.randn(3, 2 * GROUP + 5) * 3).round()
    logits[:, [3, 5, GROUP, -1]] = logits.amax()
    rows, chosen = np.array([2, 0, 2]), torch.tensor([0, 2 * GROUP + 4, 40])
    score = getattr(module, "compute_logprobs", logprobs.compute_logprobs)
    scores = with_module(module, lambda: score(logits, rows, chosen, 6))
    expected = logits.double().log_softmax(-1)[rows]
    best = expected.sort(dim=-1, descending=True, stable=True)
    assert torch.allclose(scores.logprobs.double(), expected[range(3), chosen], atol=2e-5)
    assert torch.allclose(scores.top_logprobs.double(), best.values[:, :6], atol=2e-5)
    assert scores.top_ids.tolist() == best.indices[:, :6].tolist()


def test_log_probabilities_are_those_of_the_whole_softmax() -> None:
    """The best first, over groups."""
    check_scores(logprobs)


def test_log_probabilities_bear_huge_logits_and_more_places_than_tokens() -> None:
    """Nothing overflows, and a banned token has minus infinity."""
    logits = torch.tensor([[1e30, -1e30, 0.0], [4e4, 4e4, -torch.inf]])
    scores = sampling.compute_logprobs(logits, np.arange(2), torch.tensor([0, 2]), 20)
    assert scores.logprobs.tolist() == [0, -torch.inf]
    assert scores.top_ids.tolist() == [[0, 2, 1], [0, 1, 2]]
    halves = [-np.log(2), -np.log(2), -np.inf]
    assert scores.top_logprobs[1].tolist() == pytest.approx(halves, abs=1e-2)
    none = sampling.compute_logprobs(logits, np.arange(2), torch.zeros(2).long(), 0)
    assert none.top_ids.shape == (2, 0)


def check_few_cuts(module: ModuleType) -> None:
    """Compare choices that need the whole search."""
    check_cuts(module, metadata=[Rule(0), Rule(50), Rule(9, 3), Rule(3, 0, 0.7)])


MISTAKES = [
    (check_few_cuts, logit_groups, "is_there = columns < vocabulary", "is_there = columns < 514"),
    (
        check_few_cuts,
        logit_groups,
        "is_group = groups * GROUP <",
        "is_group = groups * GROUP + 3 <",
    ),
    (check_few_cuts, sampling, "is_there = columns < vocabulary", "is_there = columns < 514"),
    (check_few_cuts, sampling, "is_group = groups * GROUP <", "is_group = groups * GROUP + 3 <"),
    (check_top_k, sampling, "is_listed = places < count", "is_listed = places < count - 1"),
    (check_few_cuts, sampling, "= tl.max(covered, 0) * draw", "= draw"),
    (check_top_k, sampling, "tl.sum(of_third) >= goal", "tl.sum(of_third) > goal"),
    (check_top_k, sampling, "highest + 1)", "highest)"),
    (
        check_shaped,
        logits_processors,
        "is_known = places < num_known",
        "is_known = places < num_known - 1",
    ),
    (check_shaped, logits_processors, "places >= tl.load(", "places > tl.load("),
    (
        check_shaped,
        logits_processors,
        "is_there = entries < count",
        "is_there = entries < count - 1",
    ),
    (check_shaped, logits_processors, "(columns % 32)) & 1", "(columns % 31)) & 1"),
    (check_shaped, logits_processors, "seen + token // 32", "seen + token // 33"),
    (check_scores, logprobs, "is_group = groups * GROUP <", "is_group = groups * GROUP + 5 <"),
    (check_scores, logprobs, "(columns > after)", "(columns >= after)"),
    (check_scores, logprobs, "(columns > token)", "(columns >= token)"),
]


@pytest.mark.long  # holds the tests above to what they can find
@pytest.mark.parametrize("place", range(len(MISTAKES)))
def test_a_mistake_is_found(place: int, tmp_path: Path) -> None:
    """A bound that is off by one, in each place that has one; in numbers that show it."""
    check, module, right, wrong = MISTAKES[place]

    def check_seeded(module: ModuleType) -> None:
        torch.manual_seed(1)
        check(module)

    assert_found(check_seeded, module, Mutation(right, wrong), tmp_path)
