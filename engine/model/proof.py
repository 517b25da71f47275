"""The proof that a model runs right here: packed, paged and chunked, as by its own attention."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.errors import ModelRefused
from engine.kernels.step import Step
from engine.model.network import Eye, LoadedModel
from engine.scheduling.pictures import Picture, ShownSpan, axes_of, shown_between, whole_stop

PROOF_TOKENS = 40
# Up to here a window is worth the tokens that it takes to see it slide.
LONGEST_WINDOW = 256
# Relative L2 distance of logits above which paged and eager attention cannot be the same function.
PROOF_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.15}


def proof_tokens(vocab_size: int, windows: Iterable[int]) -> Tensor:
    """Return random tokens `[t]`, so many that a window slides if it is a short one."""
    longest = max((window for window in windows if window <= LONGEST_WINDOW), default=0)
    count = max(PROOF_TOKENS, longest + PROOF_TOKENS // 2)
    return torch.randint(0, vocab_size, (count,), generator=torch.Generator().manual_seed(0))


def prove(name: str, loaded: LoadedModel, token_ids: Tensor, expected: Tensor) -> None:
    """Refuse a model whose paged, packed and chunked logits are not those of eager attention."""
    distance = distance_of(answers(loaded, token_ids), expected)
    if not distance <= PROOF_TOLERANCE[loaded.dtype]:
        raise ModelRefused(
            f"{name}: it gives other logits with paged attention than with its own (relative "
            f"distance {distance:.2g}): it keeps state that is not in keys and values, or "
            "masks in a way that its attention call does not tell."
        )


def distance_of(got: Tensor, expected: Tensor) -> float:
    """Return the larger relative L2 distance of two copies: `[2, t, V]`, `[…, t, V]`."""
    scale = expected.float().norm(dim=(-2, -1)).clamp(min=1e-6)
    return float(((got.float() - expected.float()).norm(dim=(1, 2)) / scale).max())


@torch.inference_mode()
def answers(
    loaded: LoadedModel, token_ids: Tensor, pictures: Sequence[Picture] = (), adapter: int = 0
) -> Tensor:
    """Return the logits `[2, t, V]` of two copies of `token_ids [t]` that run side by side.

    Some of the tokens stand for `pictures`, which a loaded model's own eye looks at. The first copy
    goes through an adapter.

    In three steps, two chunks and a final single token, over pages: state that does not live in
    keys and values shows here.
    """
    tokens = token_ids.numpy()
    total, size = len(tokens), loaded.backend.page_size
    pages = np.arange(2 * -(-total // size)).reshape(2, -1)
    attention = loaded.attention(pages.size)
    axes = axes_of(pictures, total)
    cut = whole_stop(pictures, 0, total // 2)
    parts = []
    for start, stop in ((0, cut), (cut, total - 1), (total - 1, total)):
        shown = shown_between(pictures, axes, start, stop)
        step = _copies_step(tokens[start:stop], start, pages, loaded, shown, adapter=adapter)
        attention.prepare(step)
        logits = loaded.network.forward(step, attention)
        parts.append(logits.view(2, stop - start, -1))
    return torch.cat(parts, dim=1)


def _copies_step(
    token_ids: NDArray[np.int64],
    start: int,
    pages: NDArray[np.int64],
    loaded: LoadedModel,
    shown: ShownSpan,
    *,
    adapter: int,
) -> Step:
    """Return the step of `token_ids [n]` from position `start` on, once in each row of `pages`.

    The first of these copies goes through an adapter.
    """
    count, copies, page_size = len(token_ids), len(pages), loaded.backend.page_size
    positions = np.arange(start, start + count)
    needed = pages[:, : -(-(start + count) // page_size)]
    slots = needed[:, positions // page_size] * page_size + positions % page_size
    arrays, vectors = _shown_copies(shown, copies, loaded.eye)
    step = Step.pack(
        copies if count == 1 else 0,
        loaded.device,
        token_ids=np.tile(token_ids, copies),
        positions=np.tile(positions, copies),
        slots=slots.ravel(),
        query_starts=np.arange(copies + 1) * count,
        context_lengths=np.full(copies, start),
        page_starts=np.arange(copies + 1) * needed.shape[1],
        pages=needed.ravel(),
        logit_rows=np.arange(copies * count),
        adapters=np.array([adapter, *[0] * (copies - 1)]),
        **arrays,
    )
    return replace(step, shown=vectors)


def _shown_copies(
    shown: ShownSpan, copies: int, eye: Eye | None
) -> tuple[dict[str, NDArray[Any]], Tensor | None]:
    """Return what copies of a span show, side by side: arrays of their step, and vectors."""
    if eye is None:
        return {}, None
    arrays: dict[str, NDArray[Any]] = {"axes": np.tile(shown.axes, copies).ravel()}
    if eye.sight.sees_whole:
        arrays["ends"] = np.tile(shown.ends, copies)
    if not shown.parts:
        return arrays, None
    count = len(shown.ends)
    arrays["shown_rows"] = np.add.outer(np.arange(copies) * count, shown.rows).ravel()
    vectors = [eye.tower.look(picture.pixels)[i:j] for picture, i, j in shown.parts]
    return arrays, torch.cat(vectors * copies)
