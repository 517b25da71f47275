"""Weights of recurrent mixers by role, and the stored tensors that fill them."""

from __future__ import annotations

from collections.abc import Iterator

from ...kernels.communicator import Shard
from ...kernels.recurrence import GatedDelta, RecurrentShape
from ..config.architecture import Architecture, Recurrence
from .weight_parts import (
    Band,
    Part,
    Place,
    Weight,
    banded,
    bands_of,
    between,
    head_rows,
    sliced,
    whole,
)


def recurrent_weights(
    model: Architecture, recurrence: Recurrence, role: str, prefix: str, shard: Shard
) -> Iterator[Weight]:
    """Yield a rank's share of a mixer, whose roles begin with `role` and names with `prefix`."""
    names, shape, hidden = model.names, recurrence.shape, model.hidden_size
    prefix = f"{prefix}{names.recurrence}."
    bands = _Bands(recurrence, shard)
    if names.has_in_proj_groups:
        yield _grouped_in_proj(model, recurrence, role, prefix, bands.key_heads)
    else:
        yield banded(f"{role}in_proj", prefix, "weight", bands.in_proj(names.in_proj), hidden)
    if recurrence.has_proj_bias:
        yield banded(f"{role}in_proj_bias", prefix, "bias", bands.in_proj(names.in_proj))
        if shard.rank == 0:  # a sum over ranks contains it once
            yield whole(f"{role}out_proj_bias", f"{prefix}{names.out_proj}.bias", hidden)
    yield _taps(f"{role}conv_weight", f"{prefix}{names.conv}.weight", shape, bands)
    if recurrence.has_conv_bias:
        yield banded(f"{role}conv_bias", prefix, "bias", bands.channels(names.conv))
    if (rule := shape.rule) is not None:
        for name, key in (("a_log", "A_log"), ("dt_bias", "dt_bias"), ("d", "D")):
            if name != "d" or not isinstance(rule, GatedDelta):
                count = (rule.state_shape[0],)
                yield sliced(f"{role}{name}", f"{prefix}{key}", count, bands.heads)
    inner = recurrence.inner_size
    if recurrence.norm_groups:
        key = f"{prefix}{names.gate_norm}.weight"
        if isinstance(rule, GatedDelta):
            yield whole(f"{role}gate_norm", key, rule.value_dim)
        else:
            yield sliced(f"{role}gate_norm", key, (inner,), bands.inner)
    out = f"{prefix}{names.out_proj}.weight"
    yield sliced(f"{role}out_proj", out, (hidden, inner), None, bands.inner)


class _Bands:
    """A rank's rows of a mixer's projections and channels, by its heads."""

    def __init__(self, recurrence: Recurrence, shard: Shard) -> None:
        rule, channels = recurrence.shape.rule, recurrence.shape.num_channels
        if isinstance(rule, GatedDelta):
            self.heads = shard.indices(rule.num_value_heads)
            self.key_heads = shard.indices(rule.num_key_heads)
            keys = head_rows(self.key_heads, rule.key_dim)
            self.inner = head_rows(self.heads, rule.value_dim)
            self._channels = [(width, keys) for width in rule.widths[:2]]
            self._channels.append((rule.widths[2], self.inner))
            gates = [(recurrence.inner_size, self.inner)]
            self._parts = [self._channels, gates, *[[(rule.num_value_heads, self.heads)]] * 2]
        elif rule is not None:
            self.heads = self.key_heads = shard.indices(rule.num_heads)
            self.inner = head_rows(self.heads, rule.head_dim)
            groups = head_rows(shard.kv_head_indices(rule.num_groups), rule.state_dim)
            self._channels = [(rule.widths[0], self.inner)]
            self._channels += [(width, groups) for width in rule.widths[1:]]
            own = (recurrence.inner_size, self.inner)
            self._parts = [[own], self._channels, [(rule.num_heads, self.heads)]]
        else:
            self.inner = self.heads = self.key_heads = shard.indices(channels)
            self._channels = [(channels, self.inner)]
            self._parts = [self._channels] * 3

    def in_proj(self, names: tuple[str, ...]) -> list[Band]:
        """Return the rows of projections that are one tensor per part, or one of all."""
        if len(names) == 1:
            return _bands(names[0], [piece for part in self._parts for piece in part])
        return [
            band
            for name, part in zip(names, self._parts, strict=True)
            for band in _bands(name, part)
        ]

    def channels(self, name: str) -> list[Band]:
        """Return the channels of the convolution."""
        return _bands(name, self._channels)


def _bands(name: str, pieces: list[tuple[int, range]]) -> list[Band]:
    heights, taken = zip(*pieces, strict=True)
    return bands_of((name,), list(heights), list(taken))


def _taps(role: str, key: str, shape: RecurrentShape, bands: _Bands) -> Weight:
    """Return a convolution's weight `[C, K]`, which is stored as `[C, 1, K]`."""
    parts, start = [], 0
    for _, height, taken in bands.channels(""):
        stop = start + len(taken)
        stored = (height, 1, shape.num_taps)
        parts.append(Part(key, stored, _as_stored(start, stop), (taken,)))
        start = stop
    return Weight(role, (start, shape.num_taps), tuple(parts))


def _as_stored(start: int, stop: int) -> Place:
    return lambda weight: weight[start:stop, None]


def _grouped_in_proj(
    model: Architecture, recurrence: Recurrence, role: str, prefix: str, heads: range
) -> Weight:
    """Return the projections of some key heads of a DeltaNet that are stored by key heads.

    Each head has its query, its key, and the values and gates of its value heads; a separate tensor
    contains their b and their a.
    """
    rule, hidden = recurrence.shape.rule, model.hidden_size
    assert isinstance(rule, GatedDelta)
    group = rule.num_value_heads // rule.num_key_heads
    keys, values = rule.key_dim, group * rule.value_dim
    parts, count = [], len(heads)
    query, channels = count * keys, count * (2 * keys + values)  # of this rank
    gates = channels + count * values
    for name, pieces in (
        (
            model.names.in_proj[0],
            ((keys, 0), (keys, query), (values, 2 * query), (values, channels)),
        ),
        (
            model.names.in_proj[1],
            ((group, gates), (group, gates + count * group)),
        ),
    ):
        height = sum(size for size, _ in pieces)
        stored = (rule.num_key_heads * height, hidden)
        for index, head in enumerate(heads):
            first = head * height
            for size, start in pieces:
                place = between(start + index * size, start + (index + 1) * size)
                taken = (range(first, first + size),)
                parts.append(Part(f"{prefix}{name}.weight", stored, place, taken))
                first += size
    return Weight(f"{role}in_proj", (gates + 2 * count * group, hidden), tuple(parts))
