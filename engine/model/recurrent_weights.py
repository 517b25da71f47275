"""Weights of recurrent mixers by role, and the stored tensors that fill them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from ..kernels.recurrence import GatedDelta
from .architecture import Architecture, Recurrence
from .weight_parts import Part, Weight, between, stacked, whole


def recurrent_weights(
    model: Architecture, recurrence: Recurrence, role: str, prefix: str
) -> Iterator[Weight]:
    """Yield a mixer's weights, whose roles begin with `role` and names with `prefix`."""
    names, shape, hidden = model.names, recurrence.shape, model.hidden_size
    prefix = f"{prefix}{names.recurrence}."
    yield _in_proj(model, recurrence, role, prefix)
    if recurrence.has_proj_bias:
        sizes = _sizes_of(names.in_proj, recurrence)
        yield stacked(f"{role}in_proj_bias", prefix, "bias", sizes)
        yield whole(f"{role}out_proj_bias", f"{prefix}{names.out_proj}.bias", hidden)
    taps = (shape.num_channels, 1, shape.num_taps)
    key = f"{prefix}{names.conv}."
    yield Weight(
        f"{role}conv_weight", (taps[0], taps[2]), (Part(f"{key}weight", taps, _as_stored),)
    )
    if recurrence.has_conv_bias:
        yield whole(f"{role}conv_bias", f"{key}bias", shape.num_channels)
    if (rule := shape.rule) is not None:
        heads, _, width = rule.state_shape
        yield whole(f"{role}a_log", f"{prefix}A_log", heads)
        yield whole(f"{role}dt_bias", f"{prefix}dt_bias", heads)
        if not isinstance(rule, GatedDelta):
            yield whole(f"{role}d", f"{prefix}D", heads)
        if recurrence.norm_groups:
            size = width if isinstance(rule, GatedDelta) else recurrence.inner_size
            yield whole(f"{role}gate_norm", f"{prefix}{names.gate_norm}.weight", size)
    inner = recurrence.inner_size
    yield whole(f"{role}out_proj", f"{prefix}{names.out_proj}.weight", hidden, inner)


def _as_stored(weight: Tensor) -> Tensor:
    """Return a convolution's weight `[C, K]` as `[C, 1, K]`."""
    return weight[:, None]


def _in_proj(model: Architecture, recurrence: Recurrence, role: str, prefix: str) -> Weight:
    """Return all projections of a token as one."""
    names = model.names
    if names.has_in_proj_groups:
        return _grouped_in_proj(model, recurrence, role, prefix)
    sizes = _sizes_of(names.in_proj, recurrence)
    return stacked(f"{role}in_proj", prefix, "weight", sizes, model.hidden_size)


def _sizes_of(names: tuple[str, ...], recurrence: Recurrence) -> list[tuple[str, int]]:
    """Return the projections' names with their rows; one name has them all."""
    sizes = recurrence.proj_sizes
    return [(names[0], sum(sizes))] if len(names) == 1 else list(zip(names, sizes, strict=True))


def _grouped_in_proj(model: Architecture, recurrence: Recurrence, role: str, prefix: str) -> Weight:
    """Return the projections of a DeltaNet stored by key heads.

    Each has its query, its key, and the values and the gates of its value heads; in a tensor of its
    own their b and their a.
    """
    rule, hidden = recurrence.shape.rule, model.hidden_size
    assert isinstance(rule, GatedDelta)
    group = rule.num_value_heads // rule.num_key_heads
    keys, values = rule.key_dim, group * rule.value_dim
    parts = []
    channels, gates, heads, _ = recurrence.proj_sizes
    query, key, _ = rule.widths
    for name, pieces in (
        (
            model.names.in_proj[0],
            ((keys, 0), (keys, query), (values, query + key), (values, channels)),
        ),
        (
            model.names.in_proj[1],
            ((group, channels + gates), (group, channels + gates + heads)),
        ),
    ):
        height = sum(size for size, _ in pieces)
        stored = (rule.num_key_heads * height, hidden)
        for head in range(rule.num_key_heads):
            first = head * height
            for size, start in pieces:
                place = between(start + head * size, start + (head + 1) * size)
                taken = (range(first, first + size),)
                parts.append(Part(f"{prefix}{name}.weight", stored, place, taken))
                first += size
    return Weight(f"{role}in_proj", (sum(recurrence.proj_sizes), hidden), tuple(parts))
