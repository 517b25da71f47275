"""A mixture of experts, against each token's own experts one by one."""

from __future__ import annotations

import pytest
import torch

from tidemill.engine.kernels import elementwise
from tidemill.engine.kernels.backends import choose_linear, make_experts
from tidemill.engine.kernels.cpu import elementwise as cpu_ops
from tidemill.engine.kernels.elementwise import Gate
from tidemill.engine.kernels.experts import ExpertWeights, apply_experts, select_experts


def random_weights(*, has_biases: bool, width: int = 16) -> ExpertWeights:
    """Return five experts over tokens of width 8."""
    generator = torch.Generator().manual_seed(4)
    return ExpertWeights(
        gate_up=torch.randn(5, 2 * width, 8, generator=generator),
        down=torch.randn(5, 8, width, generator=generator),
        gate_up_bias=torch.randn(5, 2 * width, generator=generator) if has_biases else None,
        down_bias=torch.randn(5, 8, generator=generator) if has_biases else None,
    )


@pytest.mark.parametrize("tokens", [1, 2, 33])
@pytest.mark.parametrize("has_biases", [True, False])
@pytest.mark.parametrize("width", [16, 13])
def test_each_token_goes_through_its_own_experts(
    tokens: int, width: int, *, has_biases: bool
) -> None:
    """Other tokens do not matter, some experts have no token at all, and widths vary.

    The reference and a CPU's packed weights are tested.
    """
    generator = torch.Generator().manual_seed(tokens)
    weights, gate = random_weights(has_biases=has_biases, width=width), Gate()
    x = torch.randn(tokens, 8, generator=generator)
    experts = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(tokens)])
    shares = torch.rand(tokens, 2, generator=generator)
    cpu = make_experts(weights, 2, gate, cpu_ops, choose_linear(cpu_ops, torch.device("cpu")))
    got = apply_experts(x, experts, shares, weights, gate, elementwise)
    packed = cpu(x, experts, shares)
    for token in range(tokens):
        expected = torch.zeros(8)
        for expert, share in zip(experts[token].tolist(), shares[token], strict=True):
            both, out = weights.gate_up[expert] @ x[token], weights.down[expert]
            if weights.gate_up_bias is not None and weights.down_bias is not None:
                both = both + weights.gate_up_bias[expert]
            mixed = out @ elementwise.act_and_mul(both[None], gate)[0]
            if weights.down_bias is not None:
                mixed = mixed + weights.down_bias[expert]
            expected += share * mixed
        torch.testing.assert_close(got[token], expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(packed[token], expected, rtol=1e-4, atol=1e-4)


def test_shares_are_a_softmax_of_all_or_of_the_chosen() -> None:
    """They are unchanged, or renormalised to sum to one; the best comes first."""
    scores = torch.tensor([[1.0, 3.0, 2.0, -1.0]])
    every = scores.softmax(-1)[0]
    experts, shares = select_experts(scores, 2, among_chosen=False, is_renormalised=False)
    assert experts.tolist() == [[1, 2]]
    torch.testing.assert_close(shares[0], every[[1, 2]])
    _, summed = select_experts(scores, 2, among_chosen=False, is_renormalised=True)
    torch.testing.assert_close(summed[0], every[[1, 2]] / every[[1, 2]].sum())
    _, among = select_experts(scores, 2, among_chosen=True, is_renormalised=False)
    torch.testing.assert_close(among, summed)
    assert select_experts(scores.bfloat16(), 2, among_chosen=True, is_renormalised=True)[
        1
    ].dtype == (torch.float32)


def test_of_halves_the_sum_is_rounded_once() -> None:
    """Shares are fp32, and so is what is summed."""
    weights = random_weights(has_biases=True)
    narrow = ExpertWeights(
        weights.gate_up.bfloat16(), weights.down.bfloat16(),
        torch.zeros(5, 32).bfloat16(), torch.zeros(5, 8).bfloat16(),
    )  # fmt: skip
    x = torch.randn(1, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    experts = torch.tensor([[0, 0, 0, 0]])
    (whole,) = apply_experts(x, experts[:, :1], torch.ones(1, 1), narrow, Gate(), elementwise)
    (parts,) = apply_experts(x, experts, torch.full((1, 4), 0.25), narrow, Gate(), elementwise)
    assert torch.equal(whole, parts)
    (thirds,) = apply_experts(
        x, experts[:, :3], torch.full((1, 3), 1 / 3), narrow, Gate(), elementwise
    )
    assert torch.equal(whole, thirds)
