"""What a model's files say of images: how they are prepared, and how a prompt shows them.

What is not understood of that is `NotUnderstood`: such a model is served as one of text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import first_line_of
from engine.files import find_file
from engine.model.description import Description, Fields, NotUnderstood
from engine.scheduling.pictures import Fit, Sight

_PREPARATION, _PROCESSOR = "preprocessor_config.json", "processor_config.json"
# What says nothing of how an image is prepared.
_NAMES = (
    *("image_processor_type", "processor_class", "feature_extractor_type", "image_seq_length"),
    *("auto_map", "data_format", "default_to_square"),
)
_BILINEAR, _BICUBIC = 2, 3
_FILTERS = range(6)
_MOST_SIDE = 2**14
_CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
_CLIP_STD = [0.26862954, 0.26130258, 0.27577711]


@dataclass(frozen=True, slots=True)
class OneSize:
    """Every image has the same size, and as many tokens on each side."""

    height: int
    width: int
    side: int

    def fit(self, height: int, width: int) -> Fit:
        """Return that size."""
        del height, width
        return Fit(self.height, self.width, self.side, self.side)


@dataclass(frozen=True, slots=True)
class BySquares:
    """An image keeps its shape, brought to whole squares of `square` pixels: a token each.

    All of them together have between `min_pixels` and `max_pixels`, as far as whole ones can.
    """

    square: int
    min_pixels: int
    max_pixels: int

    def fit(self, height: int, width: int) -> Fit:
        """Return the nearest whole squares: transformers' `smart_resize`."""
        if max(height, width) > 200 * min(height, width):
            raise ValueError("one of its sides is more than 200 times the other")
        square = self.square
        tall, wide = (round(side / square) * square for side in (height, width))
        if tall * wide > self.max_pixels:
            ratio = math.sqrt(height * width / self.max_pixels)
            tall, wide = (
                max(square, math.floor(side / ratio / square) * square) for side in (height, width)
            )
        elif tall * wide < self.min_pixels:
            ratio = math.sqrt(self.min_pixels / (height * width))
            tall, wide = (math.ceil(side * ratio / square) * square for side in (height, width))
        return Fit(tall, wide, tall // square, wide // square)


@dataclass(frozen=True, slots=True)
class Vision:
    """What a model of a `kind` says of images.

    `shades [3, 256]` are what the levels of each channel are for its tower.
    """

    kind: str
    sight: Sight
    shades: NDArray[np.float32]


def describe(description: Description, otherwise: Mapping[str, Any] | None = None) -> Vision | None:
    """Return what a model that sees says of it; None for one of text alone.

    `otherwise` stands in for what its files say of how images are prepared.
    """
    if "vision_config" not in description.whole:
        return None
    kind = str(description.whole.get("model_type"))
    reader = _READERS.get(kind)
    if reader is None:
        raise NotUnderstood(f"images of {kind!r} are not supported")
    try:
        said = _preparation(description.name)
        fields = Fields(_PREPARATION, {**said, **(otherwise or {})})
        sight, shades = reader(description.whole, fields)
        _close(fields, sight)
        return Vision(kind, sight, shades)
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as exc:
        raise NotUnderstood(f"what it says of images does not fit together: {exc!r}") from exc


def _preparation(name: str) -> dict[str, Any]:
    """Return how images are prepared, of two files the one that transformers believes."""
    for file, part in ((_PROCESSOR, "image_processor"), (_PREPARATION, None)):
        try:
            path = find_file(name, file)
            said = None if path is None else json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError) as exc:
            raise NotUnderstood(f"{file} cannot be read: {first_line_of(exc)}") from exc
        if isinstance(said, dict) and part is not None:
            said = said.get(part)
        if isinstance(said, dict):
            return said
    raise NotUnderstood(f"there is no {_PREPARATION} that says how images are prepared")


def _qwen2_5_vl(whole: Mapping[str, Any], fields: Fields) -> tuple[Sight, NDArray[np.float32]]:
    tower = whole["vision_config"]
    patch, merged = tower.get("patch_size", 14), tower.get("spatial_merge_size", 2)
    frames = tower.get("temporal_patch_size", 2)
    said = fields.count("patch_size", 14), fields.count("merge_size", 2)
    if (*said, fields.count("temporal_patch_size", 2)) != (patch, merged, frames):
        raise NotUnderstood(f"{_PREPARATION} has other patches than its tower")
    size = fields.take("size") or {}
    least = fields.count("min_pixels", size.get("shortest_edge", 56 * 56))
    most = fields.count("max_pixels", size.get("longest_edge", 28 * 28 * 1280))
    if not 0 < least <= most:
        raise NotUnderstood(f"{_PREPARATION} says between {least} and {most} pixels")
    token = whole.get("image_token_id", 151_655)
    sight = Sight(
        mark=token,
        token=token,
        spelling=(token,),
        sizes=BySquares(patch * merged, least, most),
        filter=_filter(fields, _BICUBIC),
        sees_whole=False,
        has_axes=True,
    )
    return sight, _shades(fields, _CLIP_MEAN, _CLIP_STD)


def _gemma3(whole: Mapping[str, Any], fields: Fields) -> tuple[Sight, NDArray[np.float32]]:
    tower, count = whole["vision_config"], whole.get("mm_tokens_per_image", 256)
    size, side = fields.take("size") or {"height": 224, "width": 224}, math.isqrt(count)
    sides = {size.get("height"), size.get("width"), tower.get("image_size", 224)}
    if len(sides) != 1 or not 0 < min(sides) <= _MOST_SIDE:
        raise NotUnderstood(f"{_PREPARATION} has images of another size than its tower")
    if side * side != count or fields.take("image_seq_length", count) != count:
        raise NotUnderstood(f"it says {count} tokens an image, of which no square can be made")
    fields.only("do_pan_and_scan")
    for key in ("max_num_crops", "min_crop_size", "min_ratio_to_activate"):
        fields.take(f"pan_and_scan_{key}")
    begin, end = whole.get("boi_token_index", 255_999), whole.get("eoi_token_index", 256_000)
    token = whole.get("image_token_index", whole.get("image_token_id", 262_144))
    sight = Sight(
        mark=begin,
        token=token,
        spelling=("\n\n", begin, token, end, "\n\n"),
        sizes=OneSize(size["height"], size["width"], side),
        filter=_filter(fields, _BILINEAR),
        sees_whole=True,
        has_axes=False,
    )
    return sight, _shades(fields, [0.5] * 3, [0.5] * 3)


def _close(fields: Fields, sight: Sight) -> None:
    """Refuse to understand images when something of their preparation was not taken."""
    for key in _NAMES:
        fields.take(key)
    for key in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if not fields.flag(key, default=True):
            raise NotUnderstood(f"{_PREPARATION} says {key} false")
    fields.close()
    tokens = [one for one in (sight.mark, *sight.spelling) if not isinstance(one, str)]
    if not all(type(one) is int and one >= 0 for one in tokens):
        raise NotUnderstood(f"it calls images by the tokens {tokens!r}")


def _filter(fields: Fields, default: int) -> int:
    number = fields.take("resample", default)
    if number not in _FILTERS:
        raise NotUnderstood(f"{_PREPARATION} says resample {number!r}")
    return int(number)


def _shades(fields: Fields, mean: list[float], std: list[float]) -> NDArray[np.float32]:
    """Return each level of each channel, in transformers' order of operations and types."""
    mean, std = fields.take("image_mean", mean), fields.take("image_std", std)
    scale = fields.number("rescale_factor", 1 / 255)
    means, stds = np.array(mean, np.float32), np.array(std, np.float32)
    if not means.shape == stds.shape == (3,) or not np.isfinite(means).all() or not stds.all():
        raise NotUnderstood(f"{_PREPARATION} says image_mean {mean!r}, image_std {std!r}")
    levels = (np.arange(256, dtype=np.float64) * scale).astype(np.float32)
    return (levels - means[:, None]) / stds[:, None]


_Reader = Callable[[Mapping[str, Any], Fields], tuple[Sight, NDArray[np.float32]]]
_READERS: dict[str, _Reader] = {
    "gemma3": _gemma3,
    "qwen2_5_vl": _qwen2_5_vl,
}
