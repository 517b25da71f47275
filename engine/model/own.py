"""A model run by our decoder: loaded from its files, and proved against transformers' classes.

The proof is of a function: both networks compute in fp32 from the same stored weights, where
nothing but the order of sums tells them apart, one after the other, so that one at a time must fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from engine.kernels.backends import choose_backend
from engine.kernels.ranks import ALONE, Group
from engine.model.adapters.loading import Adapter
from engine.model.architecture import Architecture
from engine.model.checkpoint import Checkpoint, some
from engine.model.decoder import Decoder
from engine.model.description import Description, NotUnderstood
from engine.model.layout import Weight, weights_of
from engine.model.memory import free_bytes
from engine.model.network import Eye, LoadedModel
from engine.model.proof import answers, distance_of, proof_tokens
from engine.model.shares import shared
from engine.model.vision.description import Vision
from engine.model.weights import read_weights
from engine.scheduling.pictures import Picture

# Relative L2 distance of a token's logits in fp32: orders of summation give some 1e-6, and a norm's
# weight that is rounded once too often 1e-3.
TOLERANCE = 1e-4
# That of all logits in the dtype that is served: above it is no rounding, but a kernel.
TOLERANCE_OF_DTYPE = 0.3
# Where two experts score the same but for rounding, a token may be given to either.
TOLERANCE_OF_TIES = 0.1
SHARE_WITHOUT_TIES = 0.9
# What a network in fp32 takes while it is made, as a multiple of its weights.
ROOM = 1.25


@dataclass(frozen=True, slots=True)
class Proof:
    """Whether our decoder computes what transformers does, and by which distance of logits at most.

    `num_layers` is None where the whole model was compared, else how many of its first layers.
    """

    holds: bool
    distance: float
    num_layers: int | None


class Leads(Protocol):
    """The first of the ranks that share a model."""

    size: int

    def loaded(
        self,
        load: Callable[[Group], LoadedModel],
        dtype: torch.dtype,
        num_layers: int | None,
        *,
        has_adapters: bool,
    ) -> LoadedModel:
        """Have all ranks load their shares, this one's by `load`, and return the model of all."""


def load(
    checkpoint: Checkpoint,
    description: Description,
    architecture: Architecture,
    dtype: torch.dtype,
    device: torch.device,
    *,
    vision: Vision | None = None,
    num_layers: int | None = None,
    adapters: Sequence[Adapter] = (),
    leader: Leads | None = None,
) -> LoadedModel:
    """Return the model, or its first layers, with its adapters; it sees by `vision`.

    A `leader` shares it with other ranks.
    """
    parts = (checkpoint, description, architecture, dtype, device)
    share = partial(load_share, *parts, vision=vision, num_layers=num_layers, adapters=adapters)
    if leader is None:
        return share(group=ALONE)
    return leader.loaded(
        lambda group: share(group=group), dtype, num_layers, has_adapters=bool(adapters)
    )


def load_share(
    checkpoint: Checkpoint,
    description: Description,
    architecture: Architecture,
    dtype: torch.dtype,
    device: torch.device,
    *,
    vision: Vision | None = None,
    num_layers: int | None = None,
    adapters: Sequence[Adapter] = (),
    group: Group,
) -> LoadedModel:
    """Return a rank's share of the model, or of its first layers, with its adapters.

    It sees by `vision`.
    """
    zeros: list[str] = []
    weights = read_weights(
        checkpoint,
        architecture,
        dtype,
        device,
        is_part=description.is_part,
        num_layers=num_layers,
        share=group.share,
        zeros=zeros,
    )
    first = replace(architecture, blocks=architecture.blocks[:num_layers])
    architecture = shared(first, group.share)
    eye = None
    if vision is not None:
        from engine.model.vision.tower import load_tower

        eye = Eye(vision.sight, load_tower(checkpoint, description, vision, dtype, device))
    shapes = tuple(block.attention for block in architecture.blocks)
    return LoadedModel(
        network=Decoder(
            architecture,
            weights,
            adapters=[one.placed(first, dtype, device, group.share) for one in adapters],
            group=group,
        ),
        shapes=shapes,
        backend=choose_backend(shapes, dtype, device),
        dtype=dtype,
        device=device,
        vocab_size=architecture.vocab_size,
        max_model_len=architecture.max_positions,
        hidden_width=architecture.hidden_size,
        inner_width=architecture.widest,
        eos_token_ids=architecture.eos_token_ids,
        eye=eye,
        notes=_notes_of(zeros),
    )


def _notes_of(zeros: list[str]) -> tuple[str, ...]:
    """Return a note on matrices that hold nothing but 0, as those of layers just added may."""
    if not zeros:
        return ()
    return (
        f"nothing but 0 is in {some(sorted(zeros))}: unless that is meant, copy the files again",
    )


@torch.inference_mode()
def prove(
    checkpoint: Checkpoint,
    description: Description,
    architecture: Architecture,
    loaded: LoadedModel,
    vision: Vision | None = None,
    *,
    leader: Leads | None = None,
) -> Proof:
    """Compare the logits of our decoder with those of transformers' class and its eager attention.

    In fp32 for the function that it is, and what is `loaded`, roughly, for its dtype's kernels. A
    model of which fp32 weights do not fit is compared by its first layers in fp32 alone, as many as
    it takes to have one of each kind; one that sees, with an image among its tokens. Raises
    `ModelRefused` where transformers cannot run it.
    """
    from engine.model.vision import eager

    device = loaded.device
    num_layers, token_ids = compared(architecture, device)
    blocks = architecture.blocks[:num_layers]
    pictures: tuple[Picture, ...] = ()
    if vision is not None:
        token_ids, picture = eager.with_picture(token_ids, vision.sight)
        pictures = (picture,)
    exact = loaded
    if num_layers is not None or loaded.dtype != torch.float32:
        parts = (checkpoint, description, architecture)
        exact = load(
            *parts, torch.float32, device, vision=vision, num_layers=num_layers, leader=leader
        )
    got = answers(exact, token_ids, pictures)
    del exact
    windows: Sequence[int | None] = ()
    if pictures or description.kind in eager.WHOLE_ONLY:
        expected = eager.answer(
            checkpoint, description, token_ids, pictures, device, num_layers=num_layers
        )
    else:
        expected, windows = _text_answer(checkpoint, description, token_ids, device, num_layers)
    apart = distances(got, expected)
    has_experts = any(block.experts for block in blocks)
    holds = holds_for(apart, has_experts=has_experts)
    if holds:
        _check_windows(architecture, windows)
    if not holds or num_layers is not None or loaded.dtype == torch.float32:
        return Proof(holds, float(apart.max()), num_layers)
    rounded = distance_of(answers(loaded, token_ids, pictures), expected)
    return Proof(rounded <= TOLERANCE_OF_DTYPE, rounded, None)


def _text_answer(
    checkpoint: Checkpoint,
    description: Description,
    token_ids: Tensor,
    device: torch.device,
    num_layers: int | None,
) -> tuple[Tensor, Sequence[int | None]]:
    """Return what transformers' class answers in fp32, and its layers' windows by their masks.

    Logits are `[t, V]` for `token_ids [t]`; `num_layers` takes so many of its first layers.
    """
    from engine.model import fallback
    from engine.model.masks import windows_by_masks

    module = fallback.exact(checkpoint, description, device, num_layers)
    windows = tuple(windows_by_masks(module, device).values())
    return fallback.run_eagerly(checkpoint.name, module, token_ids, device), windows


def _check_windows(architecture: Architecture, windows: Sequence[int | None]) -> None:
    """Refuse to understand a model whose first layers have other windows by transformers' masks.

    A window that is longer than the tokens of a proof shows nowhere else. None is not known.
    """
    most = architecture.max_positions
    for block, window in zip(architecture.blocks, windows, strict=False):
        ours = block.attention.window
        if window is not None and min(ours or most, most) != min(window or most, most):
            raise NotUnderstood(f"by transformers' masks a layer has window {window}, not {ours}")


def compared(architecture: Architecture, device: torch.device) -> tuple[int | None, Tensor]:
    """Return how many first layers are compared, None for all, and by which tokens `[t]`."""
    is_whole = fits(weights_of(architecture), device)
    num_layers = None if is_whole else first_of_each_kind(architecture)
    windows = [block.attention.window for block in architecture.blocks[:num_layers]]
    return num_layers, proof_tokens(architecture.vocab_size, windows)


def holds_for(apart: Tensor, *, has_experts: bool) -> bool:
    """Say whether distances `[2·t]` are those of one function computed twice."""
    most = apart.quantile(SHARE_WITHOUT_TIES) if has_experts else apart.max()
    return bool(most <= TOLERANCE and apart.max() <= TOLERANCE_OF_TIES)


def distances(got: Tensor, expected: Tensor) -> Tensor:
    """Return the relative L2 distances of tokens' logits: `[2, t, V]`, `[…, t, V]` → `[2·t]`."""
    difference = torch.linalg.vector_norm(got - expected, dim=-1)  # [2, t]
    scale = torch.linalg.vector_norm(expected, dim=-1).clamp(min=1e-6)  # […, t]
    relative: Tensor = difference / scale
    return relative.flatten()


def fits(weights: Iterable[Weight], device: torch.device) -> bool:
    """Say whether a network of these weights does in fp32."""
    count = sum(prod(weight.shape) for weight in weights)
    return ROOM * count * torch.float32.itemsize <= free_bytes(device)


def first_of_each_kind(architecture: Architecture) -> int:
    """Return how many layers come before there is one of each kind, and two at least."""
    first = [architecture.blocks.index(block) for block in set(architecture.blocks)]
    return min(max(*first, 1) + 1, len(architecture.blocks))
