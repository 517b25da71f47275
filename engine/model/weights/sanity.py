"""Sanity checks of a load: numbers and answers that no trained model has.

Every check of shapes passes where a file was damaged or cut with a hole, or another tool wrote it
wrong. What is left then is noise, and it must not be served row by row.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ...errors import ModelRefused

# fp16 ends at 65,504, and no model that was trained in bf16 comes near.
LARGEST_NUMBER = 1e6
# Below it the likeliest token is as likely as the least likely one but for a thousandth.
LEAST_SPREAD = 1e-3
# In units of their dtype, by how much answers to different tokens must differ: rounding makes one.
ROUNDING_UNITS = 4
# Answers to so many tokens are compared: as many as logits are for 150,000 tokens, all would take a
# tenth of a second.
FEW = 16
# torch computes so many numbers on one thread.
_ONE_THREAD = 2**15
_SMALL = 2**20
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_DAMAGED = "its files are damaged, or were not written as they should be: copy or fetch them again."


def check_numbers(name: str, tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Refuse weights, by their keys, that hold NaN, infinity or what is far too large.

    Return the keys of the matrices that hold nothing but 0. Biases may be as large as they like:
    some shut tokens out.
    """
    floats = [pair for pair in tensors if pair[1].dtype in _FLOATS and pair[1].numel()]
    if not floats:
        return []
    found = [_extremes(tensor) for _, tensor in floats]
    zeros = []
    for (key, tensor), (low, high) in zip(floats, torch.stack(found).tolist(), strict=True):
        largest = max(-low, high)
        if not largest < float("inf"):  # NaN is not, either
            raise ModelRefused(f"{name}: {key} holds NaN or infinity: {_DAMAGED}")
        if largest > LARGEST_NUMBER and not key.endswith("bias"):
            raise ModelRefused(
                f"{name}: {key} holds numbers up to {largest:.2g}, and those of trained models are "
                f"below {LARGEST_NUMBER:,.0f}: {_DAMAGED}"
            )
        if largest == 0 and tensor.ndim > 1 and not key.endswith("bias"):
            zeros.append(key)
    return zeros


def _extremes(tensor: Tensor) -> Tensor:
    """Return the lowest and the highest number `[2]`, of a small tensor on this thread alone.

    Where a machine is busy, waking torch's other threads takes longer than all else here.
    """
    parts = [tensor]
    if tensor.device.type == "cpu" and tensor.numel() <= _SMALL and tensor.is_contiguous():
        parts = list(torch.split(tensor.view(-1), _ONE_THREAD))
    found = torch.stack([torch.stack(torch.aminmax(part)) for part in parts])
    return torch.stack((found[:, 0].amin(), found[:, 1].amax())).double()


def check_finite(name: str, answers: Tensor) -> None:
    """Refuse a model whose answers are no numbers."""
    if not answers.isfinite().all():
        raise ModelRefused(
            f"{name}: it answers with NaN or infinity: its weights are damaged, or a "
            "number in its config.json is."
        )


def check_logits(name: str, logits: Tensor) -> None:
    """Refuse a model whose logits `[…, V]` are no numbers, or say nothing of what it was given."""
    check_finite(name, logits)
    if (logits.amax(-1) - logits.amin(-1)).max() < LEAST_SPREAD:
        raise ModelRefused(
            f"{name}: it gives every token of its vocabulary the same score: weights that its "
            f"answers pass through are 0 or far too large; {_DAMAGED}"
        )
    rows = logits.flatten(0, -2)[:FEW].float()
    probabilities = rows.softmax(-1)
    largest = (probabilities - probabilities.mean(0)).abs().sum(-1).max()
    if len(probabilities) > 1 and largest < LEAST_SPREAD:
        raise _constant(name)
    check_not_constant(name, (rows - rows.mean(-1, keepdim=True)).to(logits.dtype))


def check_not_constant(name: str, answers: Tensor) -> None:
    """Refuse a model that answers different tokens with the same numbers: `[…, V]`.

    The same but for rounding to their dtype.
    """
    check_finite(name, answers)
    rows = answers.flatten(0, -2).float()
    apart = (rows - rows.mean(0)).norm(dim=-1).max()
    most = ROUNDING_UNITS * torch.finfo(answers.dtype).eps
    if len(rows) > 1 and apart <= most * rows.norm(dim=-1).max():
        raise _constant(name)


def _constant(name: str) -> ModelRefused:
    return ModelRefused(
        f"{name}: it answers the same whatever it reads: weights that its answers pass through "
        f"are 0, far too large or all alike; {_DAMAGED}"
    )
