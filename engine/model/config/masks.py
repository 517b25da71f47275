"""Attention masks of transformers' classes: the sliding window in each layer's mask.

Some classes pass the window only to the mask and not to the attention call. So a forward pass of
one token runs with our own masks, which carry the window as a number. The mask function is probed
at positions beyond any context, so that a window of any size is found without running past it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

MASKS = "tidemill_masks"
# The query position whose keys are probed; no model has as many positions.
FAR = 2**24
_UNKNOWN = -1

# Batch, head, query, key → whether the query sees the key.
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Any]


@torch.inference_mode()
def windows_by_masks(module: nn.Module, device: torch.device) -> Mapping[int, int | None]:
    """Return the windows of attention modules by their `id`, in the order of their calls.

    A window is 0 if every earlier token is visible. It is None for a mask of any other form, or one
    made without transformers' mask functions.
    """
    windows: dict[int, int | None] = {}

    def note(layer: nn.Module, mask: Any) -> None:
        is_ours = isinstance(mask, Tensor) and mask.dtype == torch.float64
        window = int(mask.flatten()[0]) if is_ours else _UNKNOWN
        windows[id(layer)] = None if window == _UNKNOWN else window

    config: Any = module.config
    before = config._attn_implementation  # noqa: SLF001 - transformers has no other switch
    config._attn_implementation = MASKS  # noqa: SLF001
    try:
        one = torch.zeros(1, 1, dtype=torch.long, device=device)
        module(input_ids=one, use_cache=False, note=note)
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError):
        return {}  # it takes no such mask
    finally:
        config._attn_implementation = before  # noqa: SLF001
    return windows


def window_of(sees: MaskFunction) -> int | None:
    """Return the window of a causal mask function, 0 for none; None for any other function."""

    def is_seen(query: int, distance: int) -> bool:
        zero = torch.tensor(0)
        return bool(sees(zero, zero, torch.tensor(query), torch.tensor(query - distance)))

    try:
        if not is_seen(FAR, 0) or is_seen(FAR, -1):
            return None
        if is_seen(FAR, FAR):
            return 0 if is_seen(FAR, FAR // 2) and is_seen(FAR, 1) else None
        seen, unseen = 0, FAR
        while unseen - seen > 1:
            middle = (seen + unseen) // 2
            seen, unseen = (middle, unseen) if is_seen(FAR, middle) else (seen, middle)
        other = FAR + FAR // 3  # a mask of chunks shows other distances there
        is_window = is_seen(other, unseen - 1) and not is_seen(other, unseen)
    except (IndexError, TypeError, ValueError, RuntimeError):
        return None  # it looks something up for each position
    return unseen if is_window else None


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *,
    mask_function: MaskFunction,
    device: torch.device | str = "cpu",
    **others: Any,
) -> Tensor:
    """Return the window of a mask function in place of its mask `[B, 1, Q, K]`."""
    del others
    window = window_of(mask_function)
    width = float(_UNKNOWN if window is None else window)
    shape = (batch_size, 1, q_length, kv_length)
    return torch.full(shape, width, dtype=torch.float64, device=device)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,  # noqa: ARG001 - transformers' signature
    value: Tensor,
    attention_mask: Any,
    *,
    note: Callable[[nn.Module, Any], None],
    **options: Any,
) -> tuple[Tensor, None]:
    """Note the mask of a call, and answer zeros `[B, T, Hq, Dv]`."""
    del options
    note(module, attention_mask)
    batch, heads, tokens, _ = query.shape
    return value.new_zeros(batch, tokens, heads, value.shape[3]), None


AttentionInterface.register(MASKS, _attend)
AttentionMaskInterface.register(MASKS, _mask)
