"""The proof that a model runs right here: packed, paged and chunked, as by its own attention.

What each layer attends with comes from a one-token probe, not from reading configs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from engine.errors import ModelRefused, first_line_of
from engine.kernels.attention import AttentionShape
from engine.kernels.step import Step
from engine.model.forward import ATTENTION, RecordingAttention, forward
from engine.model.network import LoadedModel

PROOF_TOKENS = 40
# Relative L2 distance of logits above which paged and eager attention cannot be the same function.
PROOF_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.15}


def probe(
    name: str, module: nn.Module, device: torch.device
) -> tuple[tuple[nn.Module, ...], tuple[AttentionShape, ...]]:
    """Run one token and return each layer's attention module and shape, in order."""
    recording = RecordingAttention()
    one = torch.zeros(1, dtype=torch.long, device=device)
    try:
        forward(module, one, one, one, recording)
    except (TypeError, ValueError, KeyError, AttributeError) as exc:
        raise ModelRefused(
            f"{name}: {type(module).__name__} does not pass the attention interface's arguments "
            f"through: {first_line_of(exc)}"
        ) from exc
    config: Any = module.config
    expected = config.num_hidden_layers
    if len(recording.modules) != expected or len(set(map(id, recording.modules))) != expected:
        raise ModelRefused(
            f"{name}: {type(module).__name__} has {expected} layers but made "
            f"{len(recording.modules)} attention calls a token. Every layer must be one attention "
            "layer: the state of any other kind would be silently wrong."
        )
    return tuple(recording.modules), tuple(recording.shapes)


def run_eagerly(module: nn.Module, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return random `token_ids [t]` and the logits `[t, V]` of the module's own attention."""
    config: Any = module.config
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(0, config.vocab_size, (PROOF_TOKENS,), generator=generator)
    config._attn_implementation = "eager"  # noqa: SLF001 - transformers has no other switch
    expected = module(input_ids=token_ids.to(device)[None], use_cache=False).logits[0]
    config._attn_implementation = ATTENTION  # noqa: SLF001
    return token_ids, expected


def prove(name: str, loaded: LoadedModel, token_ids: Tensor, expected: Tensor) -> None:
    """Refuse a model whose paged, packed and chunked logits are not those of eager attention.

    `token_ids [t]` run twice side by side, in two chunks each and a final single token, against
    `expected [t, V]` from one eager pass: state that does not live in keys and values shows here.
    """
    if not expected.isfinite().all():
        raise ModelRefused(
            f"{name}: it answers with NaN or infinity: its weights are damaged, or a "
            "number in its config.json is."
        )
    logits = _run_twice(loaded, token_ids.numpy())
    scale = expected.float().norm().clamp(min=1e-6)
    for got in logits:
        distance = float((got.float() - expected.float()).norm() / scale)
        if not distance <= PROOF_TOLERANCE[loaded.dtype]:
            raise ModelRefused(
                f"{name}: it gives other logits with paged attention than with its own (relative "
                f"distance {distance:.2g}): it keeps state that is not in keys and values, or "
                "masks in a way that its attention call does not tell."
            )


def _run_twice(loaded: LoadedModel, token_ids: NDArray[np.int64]) -> Tensor:
    """Run two copies of `token_ids [t]` side by side, in three steps each → logits `[2, t, V]`."""
    total, size = len(token_ids), loaded.backend.page_size
    pages = np.arange(2 * -(-total // size)).reshape(2, -1)
    attention = loaded.attention(pages.size)
    cut = total // 2
    parts = []
    for start, stop in ((0, cut), (cut, total - 1), (total - 1, total)):
        step = _copies_step(token_ids[start:stop], start, pages, size, loaded.device)
        attention.prepare(step)
        logits = loaded.network.forward(step, attention)
        parts.append(logits.view(2, stop - start, -1))
    return torch.cat(parts, dim=1)


def _copies_step(
    token_ids: NDArray[np.int64],
    start: int,
    pages: NDArray[np.int64],
    page_size: int,
    device: torch.device,
) -> Step:
    """Return the step of `token_ids [n]` from position `start` on, once in each row of `pages`."""
    count, copies = len(token_ids), len(pages)
    positions = np.arange(start, start + count)
    needed = pages[:, : -(-(start + count) // page_size)]
    slots = needed[:, positions // page_size] * page_size + positions % page_size
    return Step.pack(
        copies if count == 1 else 0,
        device,
        token_ids=np.tile(token_ids, copies),
        positions=np.tile(positions, copies),
        slots=slots.ravel(),
        query_starts=np.arange(copies + 1) * count,
        context_lengths=np.full(copies, start),
        page_starts=np.arange(copies + 1) * needed.shape[1],
        pages=needed.ravel(),
        logit_rows=np.arange(copies * count),
    )
