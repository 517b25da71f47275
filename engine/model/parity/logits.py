"""Parity check: packed, paged and chunked logits against those of eager attention."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...errors import ModelRefused, TransformersRefused
from ...kernels.attention import AttentionBackend
from ...kernels.paged_step import Span, paged_step
from ...kernels.step import Step
from ...scheduling.images import ImageSpan, PromptImage, axes_of, image_span, whole_stop
from ..network.loaded_model import LoadedModel, Network, VisionEncoder

PARITY_TOKENS = 40
# Up to this size, a check has enough tokens to see a window slide.
LONGEST_WINDOW = 256
# With more tokens, only the logits of some are compared.
MOST_COMPARED = 384
# Relative L2 distance of logits above which paged and eager attention cannot be the same function.
PARITY_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.15}
# Runs steps in order → the logits of each.
RunSteps = Callable[[Sequence[Step], AttentionBackend], list[Tensor]]
# Limit of a network's error, as a multiple of the rounding error of transformers' class.
ROUNDING_TOLERANCE = 2.0


def parity_tokens(
    vocab_size: int, windows: Iterable[int], longest_window: int = LONGEST_WINDOW
) -> Tensor:
    """Return random tokens `[t]`, enough for a window to slide unless it is a long one."""
    longest = max((window for window in windows if window <= longest_window), default=0)
    count = max(PARITY_TOKENS, longest + PARITY_TOKENS // 2)
    return torch.randint(0, vocab_size, (count,), generator=torch.Generator().manual_seed(0))


def compared_rows(num_tokens: int) -> NDArray[np.int64]:
    """Return the tokens whose logits are compared: all of a few, else the last and some others.

    The last ones see a window that has moved.
    """
    if num_tokens <= MOST_COMPARED:
        return np.arange(num_tokens)
    spread = np.linspace(0, num_tokens - 1, PARITY_TOKENS, dtype=np.int64)
    return np.union1d(spread, np.arange(num_tokens - PARITY_TOKENS // 2, num_tokens))


def check_parity(name: str, loaded: LoadedModel, token_ids: Tensor, expected: Tensor) -> None:
    """Refuse a model whose paged, packed and chunked logits are not those of eager attention."""
    distance = relative_distance(chunked_logits(loaded, token_ids), expected)
    if not distance <= PARITY_TOLERANCE[loaded.dtype]:
        raise TransformersRefused(
            f"{name}: its logits with paged attention differ from its own (relative distance "
            f"{distance:.2g}): it keeps state outside keys and values, or its masks are not "
            "visible in its attention calls."
        )


def round_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Round a module's parameters to a dtype; buffers stay, as frequencies are fp32 when served."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)


def logits_or_none(run: Callable[[], Tensor]) -> Tensor | None:
    """Return the logits of a class that was rounded to a dtype; None if it cannot run in it."""
    try:
        return run()
    except torch.OutOfMemoryError:
        raise
    except (ModelRefused, RuntimeError, TypeError):
        return None


def is_rounding(distance: float, eagers: float, dtype: torch.dtype) -> bool:
    """Return whether a distance from fp32 may be rounding, by that of eager attention."""
    return distance <= ROUNDING_TOLERANCE * eagers + torch.finfo(dtype).eps


def relative_distance(got: Tensor, expected: Tensor) -> float:
    """Return the larger relative L2 distance of two copies: `[2, t, V]`, `[…, t, V]`."""
    scale = expected.float().norm(dim=(-2, -1)).clamp(min=1e-6)
    return float(((got.float() - expected.float()).norm(dim=(1, 2)) / scale).max())


@torch.inference_mode()
def chunked_logits(
    loaded: LoadedModel,
    token_ids: Tensor,
    prompt_images: Sequence[PromptImage] = (),
    adapter: int = 0,
    run: RunSteps | None = None,
) -> Tensor:
    """Return the logits `[2, n, V]` of two copies of `token_ids [t]` that run side by side.

    Only the `compared_rows` are returned. Some of the tokens stand for `prompt_images`, which the
    model's vision encoder reads. The first copy goes through an adapter.

    There are three steps, two chunks and a final single token, over pages: state outside keys and
    values shows here. `run` returns the logits of these steps in another way than one by one.
    """
    tokens, rows = token_ids.numpy(), compared_rows(len(token_ids))
    total, size = len(tokens), loaded.backend.page_size
    pages = np.arange(2 * -(-total // size)).reshape(2, -1)
    attention = loaded.attention(pages.size, len(pages))
    axes = axes_of(prompt_images, total)
    cut = whole_stop(prompt_images, 0, total // 2)
    steps = []
    for start, stop in ((0, cut), (cut, total - 1), (total - 1, total)):
        shown = image_span(prompt_images, axes, start, stop)
        own = rows[(start <= rows) & (rows < stop)] - start
        step = _copies_step(
            tokens[start:stop], start, own, pages, loaded, shown=shown, adapter=adapter
        )
        steps.append(step)
    every = (run or partial(_run_in_turn, loaded.network))(steps, attention)
    return torch.cat([logits.view(2, -1, logits.shape[-1]) for logits in every], dim=1)


def _run_in_turn(
    network: Network, steps: Sequence[Step], attention: AttentionBackend
) -> list[Tensor]:
    every = []
    for step in steps:
        attention.prepare(step)
        every.append(network.forward(step, attention))
    return every


def _copies_step(
    token_ids: NDArray[np.int64],
    start: int,
    rows: NDArray[np.int64],
    pages: NDArray[np.int64],
    loaded: LoadedModel,
    *,
    shown: ImageSpan,
    adapter: int,
) -> Step:
    """Return the step of `token_ids [n]` from position `start` on, once in each row of `pages`.

    The logits of `rows` are wanted. The first copy goes through an adapter.
    """
    count, copies = len(token_ids), len(pages)
    arrays, vectors = _shown_copies(shown, copies, loaded.vision_encoder)
    step = paged_step(
        [Span(start, start + count, own) for own in pages],
        loaded.backend.page_size,
        loaded.device,
        token_ids=np.tile(token_ids, copies),
        logit_rows=np.add.outer(np.arange(copies) * count, rows).ravel(),
        adapters=np.array([adapter, *[0] * (copies - 1)]),
        state_sources=np.arange(copies) if start else np.full(copies, -1),
        state_rows=np.arange(copies),
        **arrays,
    )
    return replace(step, shown=vectors)


def _shown_copies(
    shown: ImageSpan, copies: int, vision_encoder: VisionEncoder | None
) -> tuple[dict[str, NDArray[Any]], Tensor | None]:
    """Return the images of copies of a span, side by side: arrays of their step, and vectors."""
    if vision_encoder is None:
        return {}, None
    arrays: dict[str, NDArray[Any]] = {"axes": np.tile(shown.axes, copies).ravel()}
    if vision_encoder.image_spec.is_bidirectional:
        arrays["ends"] = np.tile(shown.ends, copies)
    if not shown.parts:
        return arrays, None
    count = len(shown.ends)
    arrays["shown_rows"] = np.add.outer(np.arange(copies) * count, shown.rows).ravel()
    vectors = [
        vision_encoder.tower.encode(prompt_image.pixels)[i:j] for prompt_image, i, j in shown.parts
    ]
    return arrays, torch.cat(vectors * copies)
