"""The proof that a model runs right here: packed, paged and chunked, as by its own attention.

What each layer attends with comes from a one-token probe, not from reading configs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from engine.config import EngineConfig
from engine.errors import ModelRefused, first_line_of
from engine.kernels.attention import AttentionShape
from engine.kernels.packed import Chunk, PackedStep
from engine.model.cache import KVCache
from engine.model.forward import ATTENTION, LoadedModel, PagedAttention, RecordingAttention, forward

PROOF_TOKENS = 40
# Relative L2 distance of logits above which paged and eager attention cannot be the same function.
PROOF_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.15}


def probe(
    name: str, network: nn.Module, device: torch.device
) -> tuple[tuple[nn.Module, ...], tuple[AttentionShape, ...]]:
    """Run one token and return each layer's attention module and shape, in order."""
    recording = RecordingAttention()
    one = torch.zeros(1, dtype=torch.long, device=device)
    try:
        forward(network, one, one, one, recording)
    except (TypeError, ValueError, KeyError, AttributeError) as exc:
        raise ModelRefused(
            f"{name}: {type(network).__name__} does not pass the attention interface's arguments "
            f"through: {first_line_of(exc)}"
        ) from exc
    config: Any = network.config
    expected = config.num_hidden_layers
    if len(recording.modules) != expected or len(set(map(id, recording.modules))) != expected:
        raise ModelRefused(
            f"{name}: {type(network).__name__} has {expected} layers but made "
            f"{len(recording.modules)} attention calls a token. Every layer must be one attention "
            "layer: the state of any other kind would be silently wrong."
        )
    return tuple(recording.modules), tuple(recording.shapes)


def run_eagerly(loaded: LoadedModel) -> tuple[Tensor, Tensor]:
    """Return random `token_ids [t]` and the logits `[t, V]` of the network's own attention."""
    token_ids = torch.randint(
        0, loaded.vocab_size, (PROOF_TOKENS,), generator=torch.Generator().manual_seed(0)
    ).to(loaded.device)
    config: Any = loaded.network.config
    config._attn_implementation = "eager"  # noqa: SLF001 - transformers has no other switch
    expected = loaded.network(input_ids=token_ids[None], use_cache=False).logits[0]
    config._attn_implementation = ATTENTION  # noqa: SLF001
    return token_ids, expected


def prove(settings: EngineConfig, loaded: LoadedModel, token_ids: Tensor, expected: Tensor) -> None:
    """Refuse a model whose paged, packed and chunked logits are not those of eager attention.

    `token_ids [t]` run twice side by side, in two chunks each and a final single token, against
    `expected [t, V]` from one eager pass: state that does not live in keys and values shows here.
    """
    total = token_ids.shape[0]
    cut = total // 2
    pages_each = -(-total // settings.page_size)
    cache = KVCache(loaded.shapes, 2 * pages_each, settings.page_size, loaded.dtype, loaded.device)
    pages = torch.arange(2 * pages_each, device=loaded.device).view(2, pages_each)
    paged = PagedAttention(loaded.layers, loaded.shapes, cache)
    logits = [
        _proof_step(
            loaded, paged, token_ids[start:stop], start, pages, page_size=settings.page_size
        )
        for start, stop in ((0, cut), (cut, total - 1), (total - 1, total))
    ]
    for sequence in range(2):
        got = torch.cat([part.view(2, -1, part.shape[-1])[sequence] for part in logits])
        scale = expected.float().norm().clamp(min=1e-6)
        if not expected.isfinite().all():
            raise ModelRefused(
                f"{settings.model}: it answers with NaN or infinity: its weights are damaged, or a "
                "number in its config.json is."
            )
        distance = float((got.float() - expected.float()).norm() / scale)
        if not distance <= PROOF_TOLERANCE[loaded.dtype]:
            raise ModelRefused(
                f"{settings.model}: {type(loaded.network).__name__} gives other logits with paged "
                f"attention than with its own (relative distance {distance:.2g}): it keeps state "
                "that is not in keys and values, or masks in a way that its attention call does "
                "not tell."
            )


def _proof_step(
    loaded: LoadedModel,
    paged: PagedAttention,
    token_ids: Tensor,
    start: int,
    pages: Tensor,
    *,
    page_size: int,
) -> Tensor:
    """Run `token_ids [t]` from position `start` for both copies as one step → `[2·t, V]`."""
    device, span = loaded.device, token_ids.shape[0]
    positions = torch.arange(start, start + span, device=device)
    single = span == 1
    step = PackedStep(
        num_decodes=2 if single else 0,
        token_pages=pages[:, positions // page_size].reshape(-1),
        token_offsets=(positions % page_size).repeat(2),
        decode_pages=pages[: 2 * single].int(),
        decode_lengths=torch.full((2 * single,), start + 1, dtype=torch.int32, device=device),
        chunks=()
        if single
        else tuple(Chunk(i * span, (i + 1) * span, start, pages[i]) for i in range(2)),
    )
    rows = torch.arange(2 * span, device=device)
    return loaded.forward(token_ids.repeat(2), positions.repeat(2), rows, paged.over(step))
