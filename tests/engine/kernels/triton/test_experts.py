"""A mixture of experts on a GPU, against the reference in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.kernels.triton.mutating import Mutation, assert_found, each_of
from tidemill.engine.kernels import backends
from tidemill.engine.kernels import elementwise as reference_blocks
from tidemill.engine.kernels import experts as reference
from tidemill.engine.kernels.elementwise import Gate
from tidemill.engine.kernels.experts import ExpertWeights
from tidemill.engine.kernels.linear import LinearFactory
from tidemill.engine.kernels.quantised import Quantised, as_tensor, pack_int4
from tidemill.engine.kernels.triton import elementwise, experts, linear
from tidemill.engine.kernels.triton.grouped_gemm import grouped_quantised

BOUND = {torch.float32: 1e-4, torch.float16: 1e-2}


def assert_near(got: Tensor, expected: Tensor) -> None:
    """Compare numbers with exact ones, up to intermediate roundings to their dtype."""
    bound = BOUND[got.dtype]
    torch.testing.assert_close(got.double(), expected.double(), atol=bound, rtol=bound)


def check_choice(module: ModuleType) -> None:
    """Compare experts and shares with torch's, where no two scores are the same."""
    for count, chosen in ((5, 3), (1, 1), (4, 4), (33, 2)):
        scores = torch.stack([torch.randperm(count) for _ in range(2)]) / 2 - 1
        for among, renormalised in ((True, False), (False, True), (False, False)):
            how = {"among_chosen": among, "is_renormalised": renormalised}
            got, shares = module.select_experts(scores, chosen, **how)
            wanted, exact = reference.select_experts(scores, chosen, **how)
            assert torch.equal(got.long(), wanted)
            torch.testing.assert_close(shares, exact)


def check_sort(module: ModuleType) -> None:
    """Compare the order with torch's stable one, over more rows than one pass sorts."""
    for tokens, count, num_experts in ((1, 1, 1), (3, 2, 5), (1100, 2, 3), (2100, 2, 2)):
        chosen = torch.randint(0, num_experts, (tokens, count))
        chosen[-1, -1] = 0
        rows = module.sort_by_expert(chosen, num_experts)
        order = chosen.flatten().argsort(stable=True)
        assert torch.equal(rows.tokens.long(), order // count)
        assert torch.equal(rows.places.long(), order.argsort())
        counts = chosen.flatten().bincount(minlength=num_experts)
        assert torch.equal(rows.stops.long(), counts.cumsum(0))


def check_sums(module: ModuleType) -> None:
    """Compare each token's sum with float64."""
    for width, count in ((1, 1), (17, 3), (1030, 2)):
        rows, shares = torch.randn(4 * count, width), torch.rand(4, count)
        places = torch.randperm(4 * count).int()
        own = rows[places].double().view(4, count, width)
        expected = (own * shares[..., None]).sum(1)
        assert_near(module.combine_experts(rows, places, shares), expected)


@pytest.mark.parametrize("has_biases", [True, False])
@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_each_token_goes_through_its_own_experts(dtype: torch.dtype, *, has_biases: bool) -> None:
    """Routing, sort, products and sum are tested together."""
    inner, width, count = 24, 40, 5
    gate_up, down = torch.randn(count, 2 * inner, width) / 5, torch.randn(count, width, inner) / 5
    biases = (torch.randn(count, 2 * inner), torch.randn(count, width)) if has_biases else ()
    own = [numbers.to(dtype) for numbers in (gate_up, down, *biases)]
    x, scores = torch.randn(19, width).to(dtype), torch.randn(19, count)
    how = {"among_chosen": False, "is_renormalised": True}
    chosen = experts.select_experts(scores, 2, **how)
    got = experts.apply_experts(
        x, *chosen, ExpertWeights(*own, *(() if biases else (None, None))), Gate(), elementwise
    )
    exact = ExpertWeights(*(numbers.double() for numbers in own), *(() if biases else (None, None)))
    wanted = torch.zeros(19, width, dtype=torch.float64)
    for token, (ids, shares) in enumerate(
        zip(*reference.select_experts(scores, 2, **how), strict=True)
    ):
        for expert, share in zip(ids, shares, strict=True):
            both = exact.gate_up[expert] @ x[token].double()
            both += exact.gate_up_bias[expert] if exact.gate_up_bias is not None else 0
            out = exact.down[expert] @ reference_blocks.act_and_mul(both[None], Gate())[0]
            out += exact.down_bias[expert] if exact.down_bias is not None else 0
            wanted[token] += share * out
    assert got.dtype == dtype
    assert_near(got, wanted)


def test_experts_without_a_gate_are_activated() -> None:
    """Up, squared where it is positive, and down."""
    up, down = torch.randn(3, 24, 40) / 5, torch.randn(3, 40, 24) / 5
    weights = ExpertWeights(up, down, None, None)
    x, chosen, shares = torch.randn(9, 40), torch.randint(0, 3, (9, 2)), torch.rand(9, 2)
    got = experts.apply_experts(x, chosen, shares, weights, "relu2", elementwise)
    expected = sum(
        shares[:, place, None]
        * (
            (x[:, None] @ up[chosen[:, place]].mT).relu().square() @ down[chosen[:, place]].mT
        ).squeeze(1)
        for place in range(2)
    )
    assert_near(got, torch.as_tensor(expected))


def test_experts_are_chosen_as_torch_chooses_them() -> None:
    """Routing is a softmax of all or of the chosen ones."""
    check_choice(experts)


def test_of_equal_scores_the_first_are_chosen() -> None:
    """Each is chosen once, even if no score is finite."""
    for score in (0.0, -torch.inf):
        chosen, _ = experts.select_experts(
            torch.full((1, 5), score), 3, among_chosen=True, is_renormalised=False
        )
        assert chosen.tolist() == [[0, 1, 2]]


def test_nan_does_not_get_a_share_of_one() -> None:
    """The chosen experts exist."""
    scores = torch.tensor([[1.0, torch.nan, 2.0], [torch.nan] * 3])
    chosen, shares = experts.select_experts(scores, 2, among_chosen=True, is_renormalised=False)
    assert chosen.tolist() == [[1, 2], [0, 1]]
    assert shares.isnan().any(dim=1).all()


def test_rows_are_sorted_by_expert() -> None:
    """Stably, also where an expert has none."""
    check_sort(experts)


def of_few_bits(order: Tensor | None = None) -> ExpertWeights:
    """Return three experts of four bits."""
    gate_up, down = (
        Quantised(
            pack_int4(torch.randint(0, 16, (3, outputs, 32), dtype=torch.uint8)),
            torch.rand(3, outputs, 1) / 20,
            torch.full((3, outputs, 1), 8, dtype=torch.uint8),
            *(32, 32, torch.float32, order),
        )
        for outputs in (64, 32)
    )
    return ExpertWeights(gate_up, down, torch.randn(3, 64), torch.randn(3, 32))


@pytest.mark.parametrize("order", [None, torch.arange(32).flip(0)], ids=["as it is", "sorted"])
@pytest.mark.parametrize("most", [64, 0], ids=["few rows", "many rows"])
def test_a_quantised_mixture_agrees_with_the_dequantised_one(
    monkeypatch: pytest.MonkeyPatch, order: Tensor | None, most: int
) -> None:
    """Weights are quantised or dequantised; the reference agrees, too."""
    monkeypatch.setattr(linear, "most_rows", lambda _: most)
    few = of_few_bits(order)
    x, scores = torch.randn(4, 32), torch.randn(4, 3)
    chosen = experts.select_experts(scores, 2, among_chosen=True, is_renormalised=True)
    biases = few.gate_up_bias, few.down_bias
    plain = ExpertWeights(as_tensor(few.gate_up), as_tensor(few.down), *biases)
    expected = reference.apply_experts(x, *chosen, plain, Gate(), reference_blocks)
    for mix in (experts.apply_experts, reference.apply_experts):
        got = mix(x, *chosen, few, Gate(), reference_blocks)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("is_off", [False, True])
def test_a_kernel_of_few_bits_that_is_off_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, *, is_off: bool
) -> None:
    """It is compared with torch before the first request, for few rows and for many."""
    calls = []

    def grouped(x: Tensor, tokens: Tensor | None, *others: Any) -> Tensor:
        calls.append(len(x))
        out = grouped_quantised(x, tokens, *others)
        return out * 1.1 if is_off and len(x) > 200 else out

    monkeypatch.setattr(backends, "TRITON_TYPES", {"cpu"})
    monkeypatch.setattr(experts, "grouped_quantised", grouped)
    factory = LinearFactory(reference_blocks, [])
    mix = backends.make_experts(of_few_bits(), 1, Gate(), reference_blocks, factory)
    before = len(calls)
    mix(torch.randn(4, 32), torch.zeros(4, 1, dtype=torch.int32), torch.ones(4, 1))
    assert len(calls) == before + (0 if is_off else 2)


def test_a_sum_is_rounded_once() -> None:
    """Shares are fp32, and so is what is summed."""
    check_sums(experts)
    rows = torch.randn(1, 8).half().repeat(3, 1)
    third = torch.full((1, 3), 1 / 3)
    assert torch.equal(experts.combine_experts(rows, torch.arange(3).int(), third), rows[:1])


def test_of_no_tokens_nothing_comes() -> None:
    """Steps may have none."""
    weights = ExpertWeights(torch.randn(3, 16, 8), torch.randn(3, 8, 8), None, None)
    chosen = experts.select_experts(torch.randn(0, 3), 2, among_chosen=True, is_renormalised=False)
    assert experts.apply_experts(
        torch.randn(0, 8), *chosen, weights, Gate(), elementwise
    ).shape == (0, 8)


MISTAKES = {
    check_choice: [
        Mutation("is_there = columns < num_experts", "is_there = columns < num_experts - 1"),
        Mutation("columns == expert", "columns <= expert"),
        Mutation("is_chosen = ranks < COUNT", "is_chosen = ranks < COUNT - 1"),
        Mutation("for rank in range(COUNT)", "for rank in range(COUNT - 1)"),
    ],
    check_sort: [
        Mutation("is_row = rows < num_rows", "is_row = rows < num_rows - 1"),
        Mutation("rows < num_rows, other=-1", "rows < num_rows - 1, other=-1"),
        Mutation("rows // COUNT", "rows // (COUNT + 1)"),
        Mutation("stop += tl.sum(is_own, 0)", "stop += 0"),
    ],
    check_sums: [
        Mutation("is_there = columns < width", "is_there = columns < width - 1"),
        Mutation("tl.static_range(COUNT)", "tl.static_range(COUNT - 1)"),
        Mutation("tl.load(shares + token * COUNT + rank)", "tl.load(shares + token + rank)"),
    ],
}


@pytest.mark.long  # holds the tests above to what they can find
@pytest.mark.parametrize(("check", "mistake"), each_of(MISTAKES))
def test_a_mistake_is_found(
    check: Callable[[ModuleType], None], mistake: Mutation, tmp_path: Path
) -> None:
    """A bound that is off by one, or another's place."""
    assert_found(check, experts, mistake, tmp_path)
