"""Sanity checks of a load: numbers and answers that no trained model has.

Shape checks pass even if a file was damaged, has a hole, or was written incorrectly by another
tool. The weights are then noise, which must not be served.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ...errors import ModelRefused

# fp16 ends at 65,504, and no model that was trained in bf16 comes near.
LARGEST_NUMBER = 1e6
# Below it, the likeliest and the least likely token differ by at most a thousandth.
LEAST_SPREAD = 1e-3
# The least difference of answers to different tokens, in units of their dtype: rounding makes one.
ROUNDING_UNITS = 4
# Number of tokens whose answers are compared: all would take a tenth of a second, with logits for
# 150,000 tokens.
FEW = 16
# torch computes this many numbers on one thread.
_ONE_THREAD = 2**15
_SMALL = 2**20
_UNBOUNDED = ("bias", "_global_scale")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_DAMAGED = "its files are damaged or were written incorrectly: copy or fetch them again."


def check_numbers(name: str, tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Refuse weights, by their keys, that contain NaN, infinity or impossibly large numbers.

    Return the keys of the matrices that contain only 0. Biases may have any size: some exclude
    tokens. So may the inverse scales of small weights.
    """
    floats = [pair for pair in tensors if pair[1].dtype in _FLOATS and pair[1].numel()]
    if not floats:
        return []
    extremes = [_extremes(tensor) for _, tensor in floats]
    zeros = []
    for (key, tensor), (low, high) in zip(floats, torch.stack(extremes).tolist(), strict=True):
        largest = max(-low, high)
        if not largest < float("inf"):  # NaN fails this, too
            raise ModelRefused(f"{name}: {key} contains NaN or infinity: {_DAMAGED}")
        if largest > LARGEST_NUMBER and not key.endswith(_UNBOUNDED):
            raise ModelRefused(
                f"{name}: {key} contains numbers up to {largest:.2g}, but those of trained models "
                f"are below {LARGEST_NUMBER:,.0f}: {_DAMAGED}"
            )
        if largest == 0 and tensor.ndim > 1 and not key.endswith("bias"):
            zeros.append(key)
    return zeros


def _extremes(tensor: Tensor) -> Tensor:
    """Return the minimum and maximum `[2]`, of a small tensor on this thread alone.

    On a busy machine, waking torch's other threads takes longer than everything else here.
    """
    parts = [tensor]
    if tensor.device.type == "cpu" and tensor.numel() <= _SMALL and tensor.is_contiguous():
        parts = list(torch.split(tensor.view(-1), _ONE_THREAD))
    extremes = torch.stack([torch.stack(torch.aminmax(part)) for part in parts])
    return torch.stack((extremes[:, 0].amin(), extremes[:, 1].amax())).double()


def check_finite(name: str, answers: Tensor) -> None:
    """Refuse a model whose answers are not finite."""
    if not answers.isfinite().all():
        raise ModelRefused(
            f"{name}: its answers contain NaN or infinity: its weights or a number in its "
            "config.json are damaged."
        )


def check_logits(name: str, logits: Tensor) -> None:
    """Refuse a model whose logits `[…, V]` are not finite, or the same for all tokens."""
    check_finite(name, logits)
    if (logits.amax(-1) - logits.amin(-1)).max() < LEAST_SPREAD:
        raise ModelRefused(
            f"{name}: it gives every token of its vocabulary the same score: some weights are 0 or "
            f"far too large; {_DAMAGED}"
        )
    rows = logits.flatten(0, -2)[:FEW].float()
    probabilities = rows.softmax(-1)
    largest = (probabilities - probabilities.mean(0)).abs().sum(-1).max()
    if len(probabilities) > 1 and largest < LEAST_SPREAD:
        raise _constant(name)
    check_not_constant(name, (rows - rows.mean(-1, keepdim=True)).to(logits.dtype))


def check_not_constant(name: str, answers: Tensor) -> None:
    """Refuse a model that answers different tokens with the same numbers: `[…, V]`.

    Differences within the rounding error of the dtype do not count.
    """
    check_finite(name, answers)
    rows = answers.flatten(0, -2).float()
    apart = (rows - rows.mean(0)).norm(dim=-1).max()
    most = ROUNDING_UNITS * torch.finfo(answers.dtype).eps
    if len(rows) > 1 and apart <= most * rows.norm(dim=-1).max():
        raise _constant(name)


def _constant(name: str) -> ModelRefused:
    return ModelRefused(
        f"{name}: its output does not depend on its input: some weights are 0, far too large or "
        f"all the same; {_DAMAGED}"
    )
