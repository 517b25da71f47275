"""Rotary embeddings: from the parameters of a config to the frequencies that rotate a head.

The formulas are those of transformers (`modeling_rope_utils`), in the same order of operations, so
that the frequencies are bit-identical.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ...errors import ModelRefused
from .architecture import Rope
from .hf_config import ConfigFields, UnsupportedConfig

# In transformers these switch by the longest position of all sequences that run together, so that
# one request would change another: its classes are served only where they never switch. Only
# longrope switches at the original positions.
SWITCHING = {"dynamic", "longrope"}
NUM_AXES = 3
# Orders of the frequencies of M-RoPE's axes: one axis after the other, or in turns.
Sections = Literal["consecutive", "interleaved"]
_SECTIONS = {"consecutive": [16, 24, 24], "interleaved": [24, 20, 20]}
# Rope types whose parameters contain the context before it was stretched.
_STRETCHED = {"llama3", "yarn", "longrope"}
MOST_STRETCHED = 10_000


class Plain(NamedTuple):
    """Inputs of every rope type: `powers [R]` are the unscaled wavelengths over 2π.

    `width` is that of a head.
    """

    fields: ConfigFields
    base: float
    powers: Tensor
    positions: int
    original: int
    width: int


def read_rope(
    fields: ConfigFields,
    width: int,
    positions: int,
    theta: float,
    kinds: Mapping[str, str] | None = None,
    *,
    may_be_partial: bool = False,
    sections: Sections | None = None,
    default: Mapping[str, Any] | None = None,
) -> Rope:
    """Return the rope for a model's one set of parameters, in the old spelling or the new.

    `width` is that of a head, `theta` the default base. `kinds` are the types that the family
    supports, by their names there; `default` are the parameters of a config without any.
    """
    sources = fields.get("rope_scaling"), fields.get("rope_parameters"), default
    parameters = dict(next((part for part in sources if part), {}))
    for key in ("rope_theta", "partial_rotary_factor"):
        parameters.setdefault(key, fields.get(key))
    original = fields.get("original_max_position_embeddings")
    kind: Any = parameters.get("rope_type", parameters.get("type", "default"))
    if original and (kinds or {}).get(kind, kind) in _STRETCHED:
        parameters["original_max_position_embeddings"] = original
    if not may_be_partial and parameters.pop("partial_rotary_factor") not in (None, 1):
        raise UnsupportedConfig("its rope has unsupported partial_rotary_factor")
    return make_rope(parameters, width, positions, theta, kinds, sections=sections)


def make_rope(
    parameters: Mapping[str, Any],
    width: int,
    positions: int,
    theta: float,
    kinds: Mapping[str, str] | None = None,
    *,
    sections: Sections | None = None,
    may_be_odd: bool = False,
) -> Rope:
    """Return the rope of one set of parameters; `UnsupportedConfig` names an unknown one.

    Some classes rotate one element more if the number is odd.
    """
    fields = ConfigFields("its rope", parameters)
    called = fields.get("rope_type", fields.get("type", "default"))
    kind = str(called) if kinds is None else kinds.get(str(called), "")
    if kind not in _KINDS:
        raise UnsupportedConfig(f"its rope has unsupported rope_type {called!r}")
    _check_factor(fields, parameters.get("factor"))
    base = fields.number("rope_theta", theta)
    turned = int(width * fields.number("partial_rotary_factor", 1.0))
    is_odd = turned % 2 == 1
    if turned < 1 or turned + is_odd > width or (is_odd and not may_be_odd):
        raise UnsupportedConfig(f"its rope rotates {turned} of the {width} elements of a head")
    original = fields.count("original_max_position_embeddings", positions)
    if kind == "dynamic":
        original = positions  # transformers ignores the other number
    spread = width if kind == "proportional" else turned
    powers = base ** (torch.arange(0, turned, 2, dtype=torch.float) / spread)
    plain = Plain(fields, base, powers, positions, original, width)
    frequencies, scale = _KINDS[kind](plain)
    axes = None if sections is None else _axes(fields, len(frequencies), sections)
    reach = _reach(kind, parameters, positions)
    long = _LONG[kind](plain) if original < (reach or positions) and kind in _LONG else None
    fields.check_all_read()
    if not all(found.isfinite().all() for found in (frequencies, long) if found is not None):
        raise UnsupportedConfig("a rope parameter is not a number")
    rope = Rope(tuple(frequencies.tolist()), scale, reach, axes)
    if long is None or torch.equal(long, frequencies):
        return rope
    return replace(rope, original_positions=original, long_inv_freq=tuple(long.tolist()))


def _reach(kind: str, parameters: Mapping[str, Any], positions: int) -> int | None:
    """Return how many positions frequencies hold for; None means the model's own number."""
    if kind == "dynamic":
        return int(parameters["factor"] * positions)
    if kind == "yarn":
        stretched = stretched_positions(parameters)
        return stretched if stretched > positions else None
    return None


def is_switched(parameters: Mapping[str, Any]) -> bool:
    """Return whether a rope's long factors replace its short ones, too."""
    long = parameters.get("long_factor")
    return long is not None and long == parameters.get("short_factor")


def stretched_positions(parameters: Mapping[str, Any]) -> int:
    """Return the positions that YaRN stretches a model to; 0 without such a parameter."""
    factor, original = parameters.get("factor"), parameters.get("original_max_position_embeddings")
    if factor is None or type(original) is not int or not _is_factor(factor):
        return 0
    return int(factor * original)


def _check_factor(fields: ConfigFields, factor: object) -> None:
    """Refuse a factor below 1 or far too large, which transformers would accept."""
    if factor is not None and not _is_factor(factor):
        raise ModelRefused(
            f"{fields.where} has factor {factor!r}; it must be a number from 1 to "
            f"{MOST_STRETCHED:,}."
        )


def _is_factor(factor: Any) -> bool:
    return type(factor) in (int, float) and 1 <= factor <= MOST_STRETCHED


def _axes(fields: ConfigFields, count: int, sections: Sections) -> tuple[int, ...]:
    """Return the axis of each frequency; the sections give the number of frequencies per axis.

    Interleaved axes take turns, time first, until height and width have theirs; time has the rest.
    """
    sizes = fields.get("mrope_section", _SECTIONS[sections])
    is_list = isinstance(sizes, list) and all(type(size) is int for size in sizes)
    is_fit = is_list and len(sizes) == NUM_AXES and min(sizes) >= 0
    if not is_fit or (sections == "consecutive" and sum(sizes) != count):
        raise UnsupportedConfig(f"its rope has unsupported mrope_section {sizes!r}")
    if sections == "consecutive":
        return tuple(axis for axis, size in enumerate(sizes) for _ in range(size))
    fields.get("mrope_interleaved")  # transformers' class ignores it
    turns = (
        index % NUM_AXES if index // NUM_AXES < sizes[index % NUM_AXES] else 0
        for index in range(count)
    )
    return tuple(turns)


def _default(plain: Plain) -> tuple[Tensor, float]:
    return 1.0 / plain.powers, 1.0


def _dynamic(plain: Plain) -> tuple[Tensor, float]:
    plain.fields.number("factor")
    return 1.0 / plain.powers, 1.0


def _dynamic_long(plain: Plain) -> Tensor:
    """Return a rope for more positions than the model's: the base is that of the longest context.

    In transformers it grows with each sequence, whose first keys have an older base; vLLM does so.
    """
    factor, width = plain.fields.number("factor"), 2 * len(plain.powers)
    stretch = float((factor * factor - (factor - 1)) ** (width / (width - 2)))
    exponents = torch.arange(0, width, 2, dtype=torch.float) / width
    return 1.0 / (plain.base * stretch) ** exponents


def _linear(plain: Plain) -> tuple[Tensor, float]:
    return 1.0 / plain.powers / plain.fields.number("factor"), 1.0


def _proportional(plain: Plain) -> tuple[Tensor, float]:
    """Return frequencies of the whole head, of which the longest wavelengths rotate nothing."""
    still = torch.zeros(plain.width // 2 - len(plain.powers))
    return torch.cat([1.0 / plain.powers, still]) / plain.fields.number("factor", 1.0), 1.0


def _llama3(plain: Plain) -> tuple[Tensor, float]:
    """Return frequencies with long waves stretched, short ones kept, and those between blended."""
    fields, original = plain.fields, plain.original
    factor = fields.number("factor")
    low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
    frequencies = 1.0 / plain.powers
    lengths = 2 * math.pi / frequencies
    stretched = torch.where(lengths > original / low, frequencies / factor, frequencies)
    share = (original / lengths - low) / (high - low)
    mixed = (1 - share) * stretched / factor + share * stretched
    is_between = ~(lengths < original / high) * ~(lengths > original / low)
    return torch.where(is_between, mixed, stretched), 1.0


def _yarn(plain: Plain) -> tuple[Tensor, float]:
    """Return frequencies with fast ones kept and slow ones stretched, with a ramp between."""
    fields, powers, original = plain.fields, plain.powers, plain.original
    factor = fields.number("factor", plain.positions / original)
    above, below = fields.get("mscale"), fields.get("mscale_all_dim")
    scale = magnitude(factor, above) / magnitude(factor, below) if above and below else None
    scale = fields.number("attention_factor", magnitude(factor) if scale is None else scale)
    width = 2 * len(powers)
    first, last = (
        width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(plain.base))
        for turns in (fields.get("beta_fast") or 32, fields.get("beta_slow") or 1)
    )
    if fields.flag("truncate", default=True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    last += 0.001 if first == last else 0
    ramp = (torch.arange(width // 2, dtype=torch.float32) - first) / (last - first)
    kept = 1 - ramp.clamp(0, 1)
    return 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept, scale


def magnitude(factor: float, share: float = 1) -> float:
    """Return YaRN's factor of attention for a rope that is stretched by a factor."""
    return 1.0 if factor <= 1 else 0.1 * share * math.log(factor) + 1.0


def _longrope(plain: Plain) -> tuple[Tensor, float]:
    fields, original = plain.fields, plain.original
    factor = fields.number("factor", plain.positions / original)
    stretch = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    _longrope_long(plain)  # checks that it exists and fits
    return _factored(plain, "short_factor"), fields.number("attention_factor", stretch)


def _longrope_long(plain: Plain) -> Tensor:
    return _factored(plain, "long_factor")


def _factored(plain: Plain, key: str) -> Tensor:
    """Return each frequency divided by its own factor."""
    factors = torch.tensor(plain.fields.get(key), dtype=torch.float32)
    if factors.shape != plain.powers.shape:
        raise UnsupportedConfig(f"its rope has {factors.numel()} numbers in {key}")
    return 1.0 / (factors * plain.powers)


_KINDS: dict[str, Callable[[Plain], tuple[Tensor, float]]] = {
    "default": _default,
    "dynamic": _dynamic,
    "linear": _linear,
    "llama3": _llama3,
    "longrope": _longrope,
    "proportional": _proportional,
    "yarn": _yarn,
}
# The key of the factors for sequences beyond the original positions.
_LONG: dict[str, Callable[[Plain], Tensor]] = {"dynamic": _dynamic_long, "longrope": _longrope_long}
