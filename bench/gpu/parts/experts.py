"""Mixtures of experts and quantised products by number of rows, compared with torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from bench.gpu.parts.task import Numbers, Place, Task
from tidemill.engine.kernels import experts as torchs
from tidemill.engine.kernels.backends import choose_elementwise, choose_experts, choose_linear
from tidemill.engine.kernels.elementwise import Gate
from tidemill.engine.kernels.experts import ExpertWeights
from tidemill.engine.kernels.quantised import Matrix, Quantised, pack_int4, quantise_fp8

SCALE = 0.02
GROUP = 128


@dataclass(frozen=True, slots=True)
class Mixture:
    """Sizes of a mixture: `chosen` of `count` experts of `hidden` to `inner`."""

    count: int
    chosen: int
    hidden: int
    inner: int
    gate: Gate


MIXTURES = {
    "Qwen3-30B-A3B": Mixture(128, 8, 2048, 768, Gate()),
    "gpt-oss-20b": Mixture(32, 4, 2880, 2880, Gate(alpha=1.702, limit=7.0, beta=1.0)),
}
TINY_MIXTURES = {"tiny": Mixture(4, 2, 32, 24, Gate())}
TOKENS = (16, 256, 1024, 8192)
ROWS = (1, 16, 64, 128, 256, 1024, 4096)
# Llama-3-8B's gate and up.
WEIGHT, TINY_WEIGHT = (28_672, 4096), (48, 256)


def tasks(place: Place) -> Iterator[Task]:
    """Yield each mixture in each form, and each form of a weight, by rows."""
    tiny = place.is_tiny
    for name, mixture in (TINY_MIXTURES if tiny else MIXTURES).items():
        for form in ("bf16", "fp8", "4-bit"):
            if form == "4-bit" and mixture.hidden % GROUP:
                continue  # such groups have one row each
            for tokens in TOKENS[: 1 if tiny else None]:
                called = f"experts of {name}, {form}, {tokens} tokens"
                yield Task(called, partial(apply, place, mixture, form, tokens), 2)
    for form in ("bf16", "fp8", "4-bit"):
        for rows in ROWS[: 1 if tiny else None]:
            called = f"gate and up, {form}, {rows} rows"
            yield Task(called, partial(multiply, place, form, rows), 1)


def weight_of(place: Place, form: str, *shape: int) -> Matrix:
    """Return a random weight in a form."""
    plain = SCALE * torch.randn(shape, dtype=place.dtype, device=place.device)
    if form == "bf16":
        return plain
    if form == "fp8":
        return quantise_fp8(plain)
    groups = -(-shape[-1] // GROUP)
    numbers = torch.randint(0, 16, shape, device=place.device, dtype=torch.uint8)
    zeros = torch.full((*shape[:-1], groups), 8, dtype=torch.uint8, device=place.device)
    scales = SCALE * torch.rand(zeros.shape, device=place.device)
    return Quantised(pack_int4(numbers), scales, zeros, shape[-1], GROUP, place.dtype)


def apply(place: Place, mixture: Mixture, form: str, tokens: int) -> Numbers:
    """Time a mixture: ours, and torch's grouped products of bf16 weights with its gathers."""
    both = weight_of(place, form, mixture.count, 2 * mixture.inner, mixture.hidden)
    down = weight_of(place, form, mixture.count, mixture.hidden, mixture.inner)
    weights = ExpertWeights(both, down, None, None)
    x = torch.randn(tokens, mixture.hidden, dtype=place.dtype, device=place.device)
    scores = torch.randn(tokens, mixture.count, device=place.device).to(place.dtype)
    ops, own = (
        choose_elementwise(place.dtype, place.device),
        choose_experts(place.dtype, place.device),
    )
    ids, shares = own.select_experts(
        scores, mixture.chosen, among_chosen=False, is_renormalised=True
    )
    seconds = place.replay_seconds(
        lambda: own.apply_experts(x, ids, shares, weights, mixture.gate, ops)
    )
    flops = 6 * tokens * mixture.chosen * mixture.hidden * mixture.inner
    numbers: Numbers = {"seconds": seconds, "flops_per_second": flops / seconds}
    read = len(set(ids.flatten().tolist())) / mixture.count
    moved = read * sum(weight.nbytes for weight in (both, down))
    numbers["share_of_copy"] = moved / seconds / place.card.bandwidth
    if form != "bf16":
        return numbers
    chosen = ids.long()

    def grouped() -> Tensor:
        return torchs.apply_experts(x, chosen, shares, weights, mixture.gate, ops)

    return {**numbers, **compared(place, grouped, seconds)}


def multiply(place: Place, form: str, rows: int) -> Numbers:
    """Time a product: ours, and torch's with the weight in bf16, which is dequantised before."""
    weight = weight_of(place, form, *(TINY_WEIGHT if place.is_tiny else WEIGHT))
    ops = choose_elementwise(place.dtype, place.device)
    product = choose_linear(ops, place.device).make(weight)
    x = torch.randn(rows, weight.shape[1], dtype=place.dtype, device=place.device)
    seconds = place.replay_seconds(lambda: product(x))
    numbers: Numbers = {
        "seconds": seconds,
        "flops_per_second": 2 * rows * weight.shape.numel() / seconds,
        "share_of_copy": weight.nbytes / seconds / place.card.bandwidth,
    }
    if not isinstance(weight, Quantised):
        return numbers
    plain = weight.dequantised()
    numbers |= compared(place, lambda: functional.linear(x, plain), seconds)
    if not place.is_tiny:
        from tidemill.engine.kernels.triton.linear import dequantised

        each = place.replay_seconds(lambda: functional.linear(x, dequantised(weight)))
        numbers["dequantised_each_time_seconds"] = each
    return numbers


def compared(place: Place, call: Callable[[], Tensor], seconds: float) -> Numbers:
    """Return torch's time, and ours as a multiple of it; its failures are reported."""
    try:
        of_torch = place.replay_seconds(call)
    except RuntimeError as exc:
        place.wait()
        return {"torch_refuses": str(exc)[:300]}
    return {"torch_seconds": of_torch, "times_torch": seconds / of_torch}
