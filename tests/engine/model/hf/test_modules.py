"""Modules that are replaced by faster ones, and those that stay."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch

from tests.engine.families import build
from tidemill.engine.model.hf import modules as transformers_modules

# Norms and gates as most classes have them, as Gemma's do, and behind attention.
FAMILIES = ("LlamaConfig", "GemmaConfig", "Gemma3TextConfig", "GptOssConfig", "Olmo2Config")
HALVES = [torch.bfloat16, torch.float16]


def with_spread_norms(family: str, dtype: torch.dtype) -> Any:
    """Return a family's model whose norms' weights need all the digits that the dtype has."""
    network: Any = build(family)
    for name, parameter in network.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 0.0 if "Gemma" in family else 1.0, 0.3)
    return network.to(dtype)


def distance(output: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the relative L2 distance."""
    return float((output.float() - exact).norm() / exact.norm())


def test_swaps_replace_matching_modules_and_leave_the_rest() -> None:
    """Every norm and gate of a Llama is swapped; a norm that differs stays what it was."""
    network: Any = build("LlamaConfig")
    original = network.model.layers[2].input_layernorm

    class OddRMSNorm(type(original)):  # type: ignore[misc]
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden) * 1.5  # type: ignore[no-any-return]

    odd = OddRMSNorm(64)
    network.model.layers[2].input_layernorm = odd
    assert transformers_modules.apply(network) == 4 * 3 + 1 - 1
    assert network.model.layers[2].input_layernorm is odd
    assert isinstance(network.model.norm, transformers_modules.FusedRMSNorm)
    assert isinstance(network.model.layers[0].mlp, transformers_modules.FusedGatedMLP)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_swap_is_at_least_as_exact_as_the_original_module(
    family: str, dtype: torch.dtype
) -> None:
    """Every norm and gate of every family, against transformers' module in fp32.

    Gemma adds one to the weight after widening it: there the two are equal to the bit.
    """
    own = with_spread_norms(family, dtype)
    swapped = deepcopy(own)
    assert transformers_modules.apply(swapped) > 0
    modules = dict(own.named_modules())
    random = torch.Generator().manual_seed(1)
    num_compared = 0
    for name, module in swapped.named_modules():
        if not isinstance(
            module, (transformers_modules.FusedRMSNorm, transformers_modules.FusedGatedMLP)
        ):
            continue
        hidden = torch.randn(64, module.weight.shape[-1], generator=random).to(dtype)
        expected, got = modules[name](hidden), module(hidden)
        exact = deepcopy(modules[name]).float()(hidden.float())
        assert distance(got, exact) <= 1.02 * distance(expected, exact), name
        if "Gemma" in family:
            assert (got == expected).float().mean() > 0.999, name
        num_compared += 1
    norms = [name for name in modules if name.endswith("norm")]
    assert num_compared >= len(norms)


def test_a_norm_whose_weight_is_rounded_too_often_is_not_swapped_in() -> None:
    """Its outputs are within any tolerance of the dtype, and still further away than they were."""
    own = with_spread_norms("Gemma3TextConfig", torch.bfloat16).model.norm
    assert transformers_modules._agrees(
        own, transformers_modules.FusedRMSNorm(own.weight, own.eps, offset=1.0)
    )
    assert not transformers_modules._agrees(
        own, transformers_modules.FusedRMSNorm(own.weight + 1, own.eps)
    )
